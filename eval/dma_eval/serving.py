"""Transformers' own server (``transformers serve``), with one model that runs a backend of ours.

That command takes the names of attention that are built into Transformers, and no other. So the model is loaded and
switched here, and the server is given a manager of models that has this one. Its routes, handlers and generation are
Transformers'.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerationState

from .errors import UserError, one_line
from .models import LoadedModel


class OneModel(ModelManager):  # type: ignore[misc]
    """A manager of models that has one, which it did not load, and so never unloads or loads again.

    A request may name the model, or none.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(model_timeout=-1)
        self._loaded = loaded
        self._created = int(time.time())
        self.force_model = loaded.name

    def load_model_and_processor(self, *arguments: Any, **options: Any) -> tuple[PreTrainedModel, Any]:
        """Return the model and its tokenizer, whatever is asked for: a request for another one was refused before."""
        return self._loaded.model, self._loaded.tokenizer

    async def load_model_streaming(self, model_id_and_revision: str, **options: Any) -> AsyncIterator[str]:
        """Say that the model is there, or that another one is not, as an event."""
        event = {"status": "ready", "model": model_id_and_revision, "cached": True}
        if model_id_and_revision != self.process_model_name(self._loaded.name):
            message = f"this server has {self._loaded.name} alone"
            event = {"status": "error", "model": model_id_and_revision, "message": message}
        yield f"data: {json.dumps(event)}\n\n"

    def get_gen_models(self, *arguments: Any) -> list[dict[str, Any]]:
        """Return the one model, and not what the Hub's cache on this machine holds."""
        return [{"id": self._loaded.name, "object": "model", "created": self._created, "owned_by": ""}]


class _Stopless:
    """Mixed into a handler of requests that are batched continuously, whose stop strings Transformers would drop."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer a request, or refuse it if it has stop strings."""
        if body.get("stop") is not None:
            detail = "continuous batching has no stop strings; leave out 'stop', or serve without --continuous-batching"
            raise HTTPException(status_code=422, detail=detail)
        return await super().handle_request(body, request_id)  # type: ignore[misc]


class _ChatBatched(_Stopless, ChatCompletionHandler):  # type: ignore[misc]
    """Messages, batched continuously."""


class _CompletionBatched(_Stopless, CompletionHandler):  # type: ignore[misc]
    """Plain text, batched continuously."""


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """Answer a request that cannot be computed (a length below 1, no chat template) with what is wrong with it."""
    del request
    return JSONResponse({"detail": one_line(error)}, status_code=400)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; clients that come before the server runs wait for it.

    Raises:
        UserError: It cannot; the message says why.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]
        raise UserError(
            f"--port: cannot listen at {host}:{port}: {why}; choose another --port (0 takes any free one) or --host"
        ) from error


def serve(
    loaded: LoadedModel, listener: socket.socket, batches: ContinuousBatchingConfig | None, *, log_level: str
) -> None:
    """Answer requests until the process is stopped; without ``batches``, ``generate`` answers one after another."""
    is_batched = batches is not None
    manager, state = OneModel(loaded), GenerationState(is_batched, cb_config=batches)
    app = build_server(
        manager,
        (_ChatBatched if is_batched else ChatCompletionHandler)(manager, state),
        completion_handler=(_CompletionBatched if is_batched else CompletionHandler)(manager, state),
        response_handler=ResponseHandler(manager, state),
        transcription_handler=TranscriptionHandler(manager, state),
        systemone_handler=SystemOneHandler(manager, state),
        generation_state=state,
    )
    app.add_exception_handler(ValueError, _refuse)
    try:
        uvicorn.Server(uvicorn.Config(app, log_level=log_level)).run(sockets=[listener])
    except KeyboardInterrupt:  # how a server is stopped
        pass
    finally:
        state.shutdown()
