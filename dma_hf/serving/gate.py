"""What every HTTP request passes: the API key, the limits, and an end if its client disconnects or the server stops."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .requests import ApiError

MOST_BYTES = 32 << 20  # of a request's body
BODY_SECONDS = 120  # for a body to arrive; a client that lost its network sends no more, and its connection stays open


class Gate:
    """An ASGI application around another one, which reads the whole body at once.

    A route that generates puts its :class:`~dma_hf.serving.engines.Answer` into ``request.state.answer``.

    Args:
        app: The application. It may raise :class:`ApiError`, also after it has sent a part of an answer.
        api_key: Bearer token that requests must carry; ``None`` accepts all.
        most: Maximum number of running and waiting requests that generate; ``None`` means no limit.

    Raises:
        ValueError: No header can carry the key.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None = None, most: int | None = None) -> None:
        if api_key is not None and api_key != (api_key.strip() or None):
            raise ValueError(
                "api_key: expected a key without spaces or line ends around it, which headers cannot carry"
            )
        self._app, self._api_key, self._most = app, api_key, most
        self._generating = 0
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End all requests with status 503, also later ones. A signal handler of the main thread may call it."""
        self._closed.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            with self._admitted(scope):
                await self._answer(scope, receive, send_on)
        except ClientDisconnect:
            pass
        except ApiError as error:
            if has_begun:
                await send({"type": "http.response.body", "body": error.event(scope["path"])})
            else:
                await JSONResponse(error.body, error.status)(scope, receive, send)

    @contextmanager
    def _admitted(self, scope: Scope) -> Iterator[None]:
        is_health = scope["path"] == "/health" and scope["method"] in ("GET", "HEAD")
        if self._api_key is not None and not is_health:
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given, self._api_key.encode()):
                message = "wrong or missing API key; send it as 'Authorization: Bearer KEY'"
                raise ApiError(message, code="invalid_api_key", status=401)
        generates = scope["method"] == "POST" and scope["path"].startswith("/v1/")
        if generates and self._most is not None and self._generating >= self._most:
            raise overloaded(f"the server has {self._most} requests already (--max-requests)")
        self._generating += generates
        try:
            yield
        finally:
            self._generating -= generates

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application until it has answered, the client is gone or the server stops."""
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in Request(scope, receive).stream():
                    body += chunk
                    if len(body) > MOST_BYTES:
                        raise ApiError(f"the body has more than {MOST_BYTES >> 20} MiB", status=413)
        except TimeoutError as error:
            raise ApiError(f"the body did not arrive within {BODY_SECONDS} seconds", status=408) from error

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        state: dict[str, Any] = scope.setdefault("state", {})
        answering = asyncio.ensure_future(self._app(scope, receiver(bytes(body)), send))
        tasks = [answering, asyncio.create_task(listen()), asyncio.create_task(self._closed.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                await answering
            elif self._closed.is_set():
                raise ApiError("the server is shutting down", status=503)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if (answer := state.get("answer")) is not None:
                answer.cancel()


def receiver(body: bytes) -> Receive:
    """Return what an application receives: the body, then nothing. It is cancelled if the client disconnects."""
    bodies = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not bodies:
            await asyncio.Event().wait()
        return bodies.pop()

    return receive


def overloaded(reason: str) -> ApiError:
    """Return the error of requests that exceed a limit."""
    return ApiError(f"{reason}; try again later", code="rate_limit_exceeded", status=429)
