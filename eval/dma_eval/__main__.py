"""``python -m dma_eval``: the same as ``dma-hf``; lets ``accelerate launch -m dma_eval`` start it."""

from .cli import main

main()
