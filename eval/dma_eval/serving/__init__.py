"""The server of ``dma-hf serve``: OpenAI's interface to one model.

Transformers' own handlers (``transformers serve``) apply the chat template, parse tool calls and format answers.
:mod:`.checks` checks the fields of a request, :mod:`.jobs` generates answers, :mod:`.gate` checks keys and limits, and
:mod:`.app` puts them together.
"""
