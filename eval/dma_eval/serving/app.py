"""The server: Transformers' application with one loaded model.

``transformers serve`` accepts only the attention implementations that are built into Transformers. So the model is
loaded and switched first, and the routes of the application use this one model.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from dma_eval.backends import Backend, activate, parse_backends
from dma_eval.errors import UserError, one_line
from dma_eval.models import LoadedModel, batching_settings, load_model
from dma_hf.integrations.serving import ModelManager, build_app

from .checks import ApiError
from .gate import Gate, start_log
from .jobs import Batched, Engine, Sequential
from .routes import Absent, Chat, Complete, Respond
from .settings import Settings

GRACE_SECONDS = 1  # for open answers after the server is stopped


class OneModel(ModelManager):  # type: ignore[misc]
    """A manager of one loaded model, which it never unloads or loads again.

    A request may name this model or none.
    """

    def __init__(self, loaded: LoadedModel, attention: str) -> None:
        super().__init__(model_timeout=-1)
        self._loaded = loaded
        self._attention = attention
        self._created = int(time.time())
        self.force_model = loaded.name

    def load_model_and_processor(self, *arguments: Any, **options: Any) -> tuple[PreTrainedModel, Any]:
        """Return the model and its tokenizer. A request for another model was refused before."""
        return self._loaded.model, self._loaded.tokenizer

    async def load_model_streaming(self, model_id_and_revision: str, **options: Any) -> AsyncIterator[str]:
        """Yield an event: the model is loaded, or another one is not available."""
        event = {"status": "ready", "model": model_id_and_revision, "cached": True}
        if model_id_and_revision != self.process_model_name(self._loaded.name):
            message = f"this server has {self._loaded.name} alone"
            event = {"status": "error", "model": model_id_and_revision, "message": message}
        yield f"data: {json.dumps(event)}\n\n"

    def list_models(self, *arguments: Any) -> list[dict[str, Any]]:
        """Return the one model, instead of the contents of the Hub's cache."""
        model = self._loaded.model
        return [
            {
                "id": self._loaded.name,
                "object": "model",
                "created": self._created,
                "owned_by": "",
                "status": {"value": "loaded"},
                "max_model_len": self._loaded.max_context,
                "attention": self._attention,
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": str(model.device),
            }
        ]

    get_gen_models = list_models  # its name before Transformers 5.24


class _Server(uvicorn.Server):
    """A web server that cancels open requests when it stops."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    def handle_exit(self, *arguments: Any) -> None:
        """Handle a signal to stop."""
        self._stop()
        super().handle_exit(*arguments)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Clients that connect before the server runs wait for it.

    Raises:
        UserError: It cannot listen. The message says why.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]
        raise UserError(
            f"--port: cannot listen at {host}:{port}: {why}; choose another --port (0 takes any free one) or --host"
        ) from error


def build(loaded: LoadedModel, engine: Engine, attention: str) -> FastAPI:
    """Return the application: Transformers', with our routes and OpenAI's format of errors."""
    models = OneModel(loaded, attention)
    absent = Absent()
    app: FastAPI = build_app(
        models,
        Chat(models, loaded, engine),
        completion_handler=Complete(models, loaded, engine),
        response_handler=Respond(models, loaded, engine),
        transcription_handler=absent,
        systemone_handler=absent,
        generation_state=SimpleNamespace(is_cb_alive=engine.is_alive),  # for /health
    )

    @app.get("/v1/models/{name:path}")
    def show_model(name: str) -> dict[str, Any]:
        (entry,) = models.list_models()
        if name != entry["id"]:
            raise ApiError(f"no such model: {name!r}", param="model", code="model_not_found", status=404)
        return entry

    for kind, handler in ERROR_HANDLERS.items():
        app.add_exception_handler(kind, handler)
    return app


async def _tell(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        error = ApiError(str(error.detail), status=error.status_code)
    elif isinstance(error, RequestValidationError):
        error = ApiError(f"the body: expected a JSON object: {error.errors()[0]['msg']}")
    elif not isinstance(error, ApiError):
        error = ApiError(f"the server failed: {one_line(error)}", status=500)
    return JSONResponse(error.body, error.status)


ERROR_HANDLERS: dict[Any, Any] = dict.fromkeys((ApiError, HTTPException, RequestValidationError, Exception), _tell)
"""What answers errors in OpenAI's format."""


def load(settings: Settings) -> tuple[LoadedModel, Backend, Engine]:
    """Load the model, switch it to its attention and start its engine.

    Raises:
        UserError: The model does not load, or continuous batching does not start.
    """
    transformers_logging.set_verbosity_error()
    torch.manual_seed(settings.seed)
    names = ("device", "dtype", "device_map", "revision", "trust_remote_code", "yarn", "tensor_parallel")
    loaded = load_model(settings.model, **{name: getattr(settings, name) for name in names})
    (backend,) = parse_backends([settings.attn])
    activate(loaded.model, backend)
    if not settings.continuous_batching:
        return loaded, backend, Sequential(loaded)
    return loaded, backend, Batched(loaded, batching_settings(loaded.model, settings.cache_gib))


def serve(app: FastAPI, engine: Engine, listener: socket.socket, settings: Settings, api_key: str | None) -> None:
    """Answer requests until the process is stopped; then end the process.

    Args:
        app: The application, see :func:`build`.
        engine: Its engine.
        listener: Where to listen.
        settings: The limit of requests, and the level of the log on standard error.
        api_key: Key that requests must carry; ``None`` accepts all.
    """
    gate = Gate(app, api_key=api_key, most=settings.max_requests)
    start_log(settings.log_level)
    config = uvicorn.Config(
        gate,
        log_level="warning" if settings.log_level == "info" else settings.log_level,  # its requests are in our log
        access_log=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        lifespan="off",
    )
    with suppress(KeyboardInterrupt):  # how a server is stopped
        _Server(config, gate.close).run(sockets=[listener])
    engine.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Python would wait for a step that cannot be interrupted, and needs seconds to unload PyTorch.
    os._exit(0)
