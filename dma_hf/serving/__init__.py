"""Serve a loaded model over HTTP, with OpenAI's interface (extra ``serve``)::

    import uvicorn
    from dma_hf.serving import Sequential, make_app

    uvicorn.run(make_app(Sequential(model, tokenizer)))

:mod:`.requests` checks the fields of a request, :mod:`.engines` generates, and :mod:`.routes` joins both. What they use
of ``transformers serve`` decodes streams and parses tool calls. :mod:`.items` writes the events of ``/v1/responses``.
:mod:`.gate` checks keys and limits. :mod:`.replicas` runs several copies on Ray Serve.
"""

from .app import make_app
from .engines import Batched, Engine, Sequential

__all__ = ["Batched", "Engine", "Sequential", "make_app"]
