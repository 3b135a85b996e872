"""Checks of every HTTP request: the API key, the limit of requests, the log, and clients that disconnect."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from urllib.parse import quote

from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .checks import ApiError
from .jobs import Job

MOST_BYTES = 32 << 20  # of a request's body
CLIENT_GONE = 499  # in the log, as nginx has it
REQUEST_ID = b"x-request-id"
log = logging.getLogger("dma_eval.serving")


@dataclass(eq=False)
class _Exchange:
    """A request, and its answer so far."""

    job: Job | None = None
    status: int = CLIENT_GONE
    is_sent: bool = False  # completely


_current: ContextVar[_Exchange] = ContextVar("current")


def register(job: Job) -> None:
    """Register the job of the current request, for the log and for a client that disconnects."""
    _current.get().job = job


class Gate:
    """An ASGI application around another one.

    Args:
        app: The application.
        api_key: Bearer token that requests must carry; ``None`` accepts all.
        most: Maximum number of running and waiting requests; ``None`` means no limit.
        observe: Called with each job when its request ends.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None = None,
        most: int | None = None,
        observe: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self._app = app
        self._api_key = api_key
        self._most = most
        self._observe = observe
        self._exchanges: list[_Exchange] = []
        self._is_closed = False

    @property
    def open_requests(self) -> int:
        """How many requests are computed or wait."""
        return len(self._exchanges)

    def refuse(self) -> None:
        """Refuse new requests; those that were admitted go on."""
        self._is_closed = True

    def close(self) -> None:
        """Cancel all requests and refuse new ones. A signal handler may call it."""
        self.refuse()
        for exchange in self._exchanges:
            if (job := exchange.job) is not None:
                job.loop.call_soon_threadsafe(job.fail, closed())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        request_id = dict(scope["headers"]).get(REQUEST_ID) or str(uuid.uuid4()).encode()
        exchange = _Exchange()
        _current.set(exchange)

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                if not any(name == REQUEST_ID for name, _ in message["headers"]):  # a replica may have set it
                    message["headers"] = [*message["headers"], (REQUEST_ID, request_id)]
            else:
                exchange.is_sent = not message.get("more_body", False)
            await send(message)

        try:
            self._admit(scope)
            self._exchanges.append(exchange)
            try:
                await self._answer(scope, receive, send_on, exchange)
            finally:
                self._exchanges.remove(exchange)
                if exchange.job is not None:
                    exchange.job.cancel()
                    self._observe(exchange.job)
        except ClientDisconnect:
            exchange.status = CLIENT_GONE
        except ApiError as error:
            await JSONResponse(error.body, error.status)(scope, receive, send_on)
        tokens = ""
        if (job := exchange.job) is not None:
            tokens = f", {job.prompt_tokens} + {job.total_tokens} tokens, {job.finish_reason or 'unfinished'}"
        seconds = time.perf_counter() - start
        log.info("%s %s %d%s, %.2f s", scope["method"], quote(scope["path"]), exchange.status, tokens, seconds)

    def _admit(self, scope: Scope) -> None:
        if scope["path"] == "/health":
            return
        if self._is_closed:
            raise closed()
        if self._api_key is not None:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {self._api_key}".encode()):
                message = "wrong or missing API key; send it as 'Authorization: Bearer KEY'"
                raise ApiError(message, code="invalid_api_key", status=401)
        if scope["method"] == "POST" and self._most is not None and len(self._exchanges) >= self._most:
            raise overloaded(f"the server has {self._most} requests already (--max-requests)")

    async def _answer(self, scope: Scope, receive: Receive, send: Send, exchange: _Exchange) -> None:
        """Run the application until it has answered.

        Raises:
            ClientDisconnect: The client is gone.
        """
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
            if not answering.done() and not exchange.is_sent:
                raise ClientDisconnect
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


def closed() -> ApiError:
    """Return the error of requests to a server that stops."""
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
