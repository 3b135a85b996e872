"""Serve a loaded model over HTTP, with OpenAI's interface (extra ``serve``)::

    import uvicorn
    from dma_hf.serving import Sequential, make_app

    uvicorn.run(make_app(Sequential(model, tokenizer)))

Transformers' own handlers (``transformers serve``) apply the chat template, parse tool calls and format answers.
:mod:`.requests` checks the fields of a request, :mod:`.engines` generates, and :mod:`.routes` joins both. :mod:`.gate`
checks keys and limits. :mod:`.replicas` runs several copies on Ray Serve.
"""

from .app import make_app
from .engines import Batched, Engine, Sequential

__all__ = ["Batched", "Engine", "Sequential", "make_app"]
