"""Checks of every HTTP request: the API key, the limit of requests, the log, and clients that disconnect."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from typing import Any
from urllib.parse import quote

from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .checks import ApiError

MOST_BYTES = 32 << 20  # of a request's body
CLIENT_GONE = 499  # in the log, as nginx has it
REQUEST_ID = b"x-request-id"
log = logging.getLogger("dma_eval.serving")


class Gate:
    """An ASGI application around another one, whose routes put their job into ``request.state.job``.

    Args:
        app: The application.
        api_key: Bearer token that requests must carry; ``None`` accepts all.
        most: Maximum number of running and waiting requests that generate; ``None`` means no limit.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None = None, most: int | None = None) -> None:
        self._app = app
        self._api_key = api_key
        self._most = most
        self._states: dict[int, dict[str, Any]] = {}  # of open requests, by the identity of their scopes
        self._generating: set[int] = set()  # those of them that count
        self._is_closed = False

    def close(self) -> None:
        """Cancel all requests and refuse new ones. A signal handler may call it."""
        self._is_closed = True
        for state in self._states.values():
            if (job := state.get("job")) is not None:
                job.loop.call_soon_threadsafe(job.fail, _closed())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = CLIENT_GONE
        request_id = dict(scope["headers"]).get(REQUEST_ID) or str(uuid.uuid4()).encode()
        state = scope.setdefault("state", {})

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (REQUEST_ID, request_id)]
            await send(message)

        try:
            self._admit(scope)
            self._states[id(scope)] = state
            if _generates(scope):
                self._generating.add(id(scope))
            await self._answer(scope, receive, send_on)
        except ClientDisconnect:
            pass
        except ApiError as error:
            await JSONResponse(error.body, error.status)(scope, receive, send_on)
        finally:
            self._states.pop(id(scope), None)
            self._generating.discard(id(scope))
            tokens = ""
            if (job := state.get("job")) is not None:
                job.cancel()
                tokens = f", {job.prompt_tokens} + {job.total_tokens} tokens, {job.finish_reason or 'unfinished'}"
            seconds = time.perf_counter() - start
            log.info("%s %s %d%s, %.2f s", scope["method"], quote(scope["path"]), status, tokens, seconds)

    def _admit(self, scope: Scope) -> None:
        if scope["path"] == "/health" and scope["method"] in ("GET", "HEAD"):
            return
        if self._is_closed:
            raise _closed()
        if self._api_key is not None:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {self._api_key}".encode()):
                message = "wrong or missing API key; send it as 'Authorization: Bearer KEY'"
                raise ApiError(message, code="invalid_api_key", status=401)
        if _generates(scope) and self._most is not None and len(self._generating) >= self._most:
            raise overloaded(f"the server has {self._most} requests already (--max-requests)")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application until it has answered or the client is gone."""
        body = bytearray()
        async for chunk in Request(scope, receive).stream():
            body += chunk
            if len(body) > MOST_BYTES:
                raise ApiError(f"the body has more than {MOST_BYTES >> 20} MiB", status=413)

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        answering = asyncio.ensure_future(self._app(scope, receiver(bytes(body)), send))
        listening = asyncio.create_task(listen())
        try:
            await asyncio.wait({answering, listening}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                await answering
        finally:
            for task in (answering, listening):
                task.cancel()
            await asyncio.wait({answering, listening})


def receiver(body: bytes) -> Receive:
    """Return what an application receives: the body, then nothing. It is cancelled if the client disconnects."""
    bodies = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not bodies:
            await asyncio.Event().wait()
        return bodies.pop()

    return receive


def _generates(scope: Scope) -> bool:
    return bool(scope["method"] == "POST" and scope["path"].startswith("/v1/"))


def _closed() -> ApiError:
    return ApiError("the server is shutting down", status=503)


def overloaded(reason: str) -> ApiError:
    """Return the error of requests that exceed a limit."""
    return ApiError(f"{reason}; try again later", code="rate_limit_exceeded", status=429)


def start_log(level: str) -> None:
    """Log requests to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(level.upper())
