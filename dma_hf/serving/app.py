"""The application: the routes of ``transformers serve`` for one loaded model, and OpenAI's format of errors.

``transformers serve`` accepts only the attention implementations that are built into Transformers. Here the model is
loaded and switched first.
"""

from __future__ import annotations

import gc
import logging
import socket
import time
from contextlib import suppress
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from dma_hf.integrations.internals import attention_name

from .engines import Engine
from .gate import Gate
from .requests import ApiError, LoadRequest, check, event
from .routes import SSE, Chat, Complete, Respond

GRACE_SECONDS = 1  # for the errors of open requests after the server is stopped


def make_app(
    engine: Engine,
    *,
    name: str | None = None,
    attention: str | None = None,
    api_key: str | None = None,
    max_requests: int | None = None,
) -> Gate:
    """Return the application that serves a model, for uvicorn or another ASGI server.

    Args:
        engine: What generates, with its model and tokenizer.
        name: Name of the model in requests and answers; by default the one that it was loaded by.
        attention: Name of its attention in ``/v1/models``; by default Transformers' own.
        api_key: Bearer token that requests must carry; ``None`` accepts all.
        max_requests: Maximum number of running and waiting requests that generate; ``None`` means no limit.
    """
    model = engine.model
    name = model.config.name_or_path if name is None else name
    app = FastAPI(exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _tell))
    for route in (Chat, Complete, Respond):
        app.add_api_route(route.path, route(engine, name).answer, methods=["POST"], response_model=None)
    entry = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "",
        "status": {"value": "loaded"},
        "max_model_len": engine.room,
        "attention": attention or attention_name(model.config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
    }

    @app.get("/v1/models")
    def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{asked:path}")
    def show_model(asked: str) -> dict[str, Any]:
        if asked != name:
            raise ApiError(f"no such model: {asked!r}", param="model", code="model_not_found", status=404)
        return entry

    @app.post("/load_model")
    async def load_model(request: Request) -> StreamingResponse:
        """Answer ``transformers chat``, which asks for a model before it talks to it."""
        asked = check(LoadRequest, await request.body()).model
        state = {"status": "ready", "model": asked, "cached": True}
        if asked != name:
            state |= {"status": "error", "message": f"this server has {name} alone"}
        return StreamingResponse([event(state)], media_type=SSE)

    @app.get("/health")
    def show_health() -> JSONResponse:
        if engine.is_alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unhealthy", "reason": "cb_worker_dead"}, 503)

    return Gate(app, api_key=api_key, most=max_requests)


async def _tell(request: Request, error: Exception) -> JSONResponse:
    headers = getattr(error, "headers", None)  # such as the methods that a route allows
    if isinstance(error, HTTPException):
        error = ApiError(str(error.detail), status=error.status_code)
    elif not isinstance(error, ApiError):
        error = ApiError(f"the server failed: {error}", status=500)
    return JSONResponse(error.body, error.status, headers)


class _Server(uvicorn.Server):
    """A web server that ends open requests when it stops."""

    def handle_exit(self, *arguments: Any) -> None:
        """Handle a signal to stop."""
        assert isinstance(self.config.app, Gate)
        self.config.app.close()
        super().handle_exit(*arguments)


def run(app: Gate, listener: socket.socket, *, log_level: str = "info") -> None:
    """Answer requests at a listening socket until the process is interrupted. The log goes to standard error."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    gc.collect()
    gc.freeze()  # otherwise collections under load look at all loaded modules again
    config = uvicorn.Config(
        app, log_config=None, log_level=log_level, timeout_graceful_shutdown=GRACE_SECONDS, lifespan="off"
    )
    with suppress(KeyboardInterrupt):  # how a server is stopped
        _Server(config).run(sockets=[listener])
