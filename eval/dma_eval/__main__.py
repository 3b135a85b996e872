"""``python -m dma_eval`` is the same as ``dma-hf``. It is for ``accelerate launch -m dma_eval``."""

from .cli import main

main()
