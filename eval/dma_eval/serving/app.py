"""The server: an application with one loaded model, and the process that serves it.

``transformers serve`` accepts only the attention implementations that are built into Transformers. So the model is
loaded and switched first, and Transformers' handlers of the routes use this one model.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from dma_eval.errors import UserError, one_line
from dma_eval.load.backends import Backend, activate, parse_backends
from dma_eval.load.models import LoadedModel, batching_settings, load_model
from dma_eval.names import DMA, FORMAT_SUFFIXES, split_suffix
from dma_hf import DMAConfig
from dma_hf.config import settings_of
from dma_hf.integrations.serving import ModelManager

from .checks import ApiError, LoadRequest, check
from .gate import Gate, start_log
from .jobs import Batched, Engine, Sequential
from .routes import SSE, Chat, Complete, Respond
from .settings import Settings

GRACE_SECONDS = 1  # for open answers after the server is stopped


class OneModel(ModelManager):  # type: ignore[misc]
    """A manager of one loaded model, which it never unloads or loads again."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(model_timeout=-1)
        self._loaded = loaded

    def process_model_name(self, model_id: str) -> str:
        """Return the name that answers carry: the one that the model was loaded by and is requested by."""
        return self._loaded.name

    def load_model_and_processor(self, *arguments: Any, **options: Any) -> tuple[PreTrainedModel, Any]:
        """Return the model and its tokenizer. A request for another model was refused before."""
        return self._loaded.model, self._loaded.tokenizer


class _Server(uvicorn.Server):
    """A web server that cancels open requests when it stops."""

    def handle_exit(self, *arguments: Any) -> None:
        """Handle a signal to stop."""
        assert isinstance(self.config.app, Gate)
        self.config.app.close()
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
    """Return the application: the routes of ``transformers serve`` for one model, and OpenAI's format of errors."""
    app = FastAPI(exception_handlers=ERROR_HANDLERS)
    models = OneModel(loaded)
    for route in (Chat, Complete, Respond):
        app.add_api_route(route.path, route(models, loaded, engine).answer, methods=["POST"], response_model=None)
    entry = {
        "id": loaded.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "",
        "status": {"value": "loaded"},
        "max_model_len": loaded.max_context,
        "attention": attention,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device),
    }

    @app.get("/v1/models")
    @app.options("/v1/models")
    def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{name:path}")
    def show_model(name: str) -> dict[str, Any]:
        if name != loaded.name:
            raise ApiError(f"no such model: {name!r}", param="model", code="model_not_found", status=404)
        return entry

    @app.post("/load_model")
    async def load_model(request: Request) -> StreamingResponse:
        """Answer ``transformers chat``, which asks for a model before it talks to it."""
        model = check(LoadRequest, await request.body()).model
        event = {"status": "ready", "model": model, "cached": True}
        if model != loaded.name:
            event |= {"status": "error", "message": f"this server has {loaded.name} alone"}
        return StreamingResponse([f"data: {json.dumps(event)}\n\n"], media_type=SSE)

    @app.post("/reset")
    def reset() -> dict[str, str]:
        """Answer as Transformers' server, which unloads its models."""
        return {"status": "ok"}

    @app.get("/health")
    def show_health() -> JSONResponse:
        if engine.is_alive():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unhealthy", "reason": "cb_worker_dead"}, 503)

    return app


async def _tell(request: Request, error: Exception) -> JSONResponse:
    headers = getattr(error, "headers", None)  # such as the methods that a route allows
    if isinstance(error, HTTPException):
        error = ApiError(str(error.detail), status=error.status_code)
    elif not isinstance(error, ApiError):
        error = ApiError(f"the server failed: {one_line(error)}", status=500)
    return JSONResponse(error.body, error.status, headers)


ERROR_HANDLERS: dict[Any, Any] = dict.fromkeys((ApiError, HTTPException, Exception), _tell)
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
    name, suffix = split_suffix(settings.attn)
    if name == DMA:  # without a preset
        backend = replace(backend, config=_saved_config(loaded.model, FORMAT_SUFFIXES.get(suffix)))
    activate(loaded.model, backend)
    if not settings.continuous_batching:
        return loaded, backend, Sequential(loaded)
    batches = batching_settings(loaded.model, settings.cache_gib, is_compiled=settings.compile)
    return loaded, backend, Batched(loaded, batches)


def _saved_config(model: PreTrainedModel, cache: str | None) -> DMAConfig:
    """Return the settings in a model's ``config.json``, or ``balanced``; with a cache, if one is given."""
    try:
        config = settings_of(model.config.get_text_config(decoder=True)).config
    except (TypeError, ValueError) as error:
        raise UserError(f"the section {DMA} in the model's config.json is invalid: {one_line(error)}") from error
    return config if cache is None else replace(config, cache=cache)


def serve(app: FastAPI, listener: socket.socket, settings: Settings, api_key: str | None) -> None:
    """Answer requests until the process is stopped; then end the process.

    Args:
        app: The application, see :func:`build`.
        listener: Where to listen.
        settings: The limit of requests, and the level of the log on standard error.
        api_key: Key that requests must carry; ``None`` accepts all.
    """
    start_log(settings.log_level)
    config = uvicorn.Config(
        Gate(app, api_key=api_key, most=settings.max_requests),
        log_level="warning" if settings.log_level == "info" else settings.log_level,  # its requests are in our log
        access_log=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        lifespan="off",
    )
    with suppress(KeyboardInterrupt):  # how a server is stopped
        _Server(config).run(sockets=[listener])
    sys.stdout.flush()
    sys.stderr.flush()
    # Python would wait for a step that cannot be interrupted, and needs seconds to unload PyTorch.
    os._exit(0)
