"""All code that depends on private or version-specific interfaces of Transformers.

No other module of this package or of ``dma_eval`` may use them. ``docs/compatibility.md`` lists them.
"""
