"""Several replicas of the server on Ray Serve: a gateway that takes requests, and replicas of the model.

The gateway checks the API key and forwards requests. Ray Serve chooses a replica for each and bounds how many wait. A
replica answers like a single process. If it dies, the gateway tries another one. If a part of the answer was already
sent, the gateway ends the answer with an error in OpenAI's format.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from fastapi.responses import JSONResponse
from ray import serve
from ray.exceptions import NodeDiedError, RayActorError, RayError, TaskCancelledError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .engines import Engine
from .gate import Gate, overloaded, receiver
from .requests import ApiError

APPLICATION = "dma-hf"
QUIET = {"log_level": "WARNING", "enable_access_log": False}
DRAIN_SECONDS, CANCEL_SECONDS = 20.0, 2.0  # Ray's time for open requests when it stops; for the errors of the others
CONNECT_SECONDS = 10.0
ATTEMPTS = 2  # a request that kills its replica must not kill all of them
PARTS_PER_SECOND = 1000
"""Most parts of answers that all replicas together send to the gateway, each of which costs it CPU time.

With two replicas of 32 open requests, a client gets new text every 64 ms: as a rule several tokens.
"""
_LOST = (RayActorError, NodeDiedError, WorkerCrashedError)
_EVEN_ROUTER = "ray.serve.experimental.round_robin_router.RoundRobinRouter"
"""Ray Serve's default learns from a replica how busy it is, too late for requests that arrive together."""


class Model:
    """A replica.

    Args:
        make: Loads the model, and returns its engine and its application.
        most_replicas: Maximum number of replicas.
    """

    def __init__(self, make: Callable[[], tuple[Engine, Gate]], most_replicas: int) -> None:
        self._engine, self._app = make()
        self._open_requests = 0
        self._seconds_per_part = most_replicas / PARTS_PER_SECOND

    def check_health(self) -> None:
        """Tell Ray Serve that this replica must be replaced.

        Raises:
            RuntimeError: It cannot generate any more.
        """
        if not self._engine.is_alive:
            raise RuntimeError("the generation thread has ended")

    async def answer(self, request: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """Answer a request, given as a part of an ASGI scope and a body, by ASGI messages.

        Yields:
            The messages since the last part. The first part has the status, the headers and some text.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
        running = asyncio.ensure_future(self._app(scope | request, receiver(body), messages.put))
        running.add_done_callback(lambda _: messages.put_nowait(None))
        self._open_requests += 1
        part: list[Message] = []
        try:
            while (message := await messages.get()) is not None:
                part.append(message)
                if messages.empty() and message["type"] == "http.response.body":
                    yield part
                    part = []
                    if message.get("more_body", False):
                        await asyncio.sleep(self._seconds_per_part * self._open_requests)
            if part and part[-1]["type"] == "http.response.body":
                yield part
            await running
        finally:
            self._open_requests -= 1
            running.cancel()
            await asyncio.wait({running})


def _explain(failure: BaseException) -> ApiError:
    """Return the answer to a client for a failure."""
    if isinstance(failure, BackPressureError):
        return overloaded("all replicas are busy and the queue is full (--max-queued)")
    if isinstance(failure, _LOST):
        message = "the replica that computed this answer has died; send the request again"
        return ApiError(message, code="replica_died", status=503)
    if isinstance(failure, (DeploymentUnavailableError, TaskCancelledError)):
        return ApiError(f"no replica can answer: {failure}", status=503)
    return ApiError(f"the server failed: {failure}", status=500)


def _show_health(_: Request) -> JSONResponse:
    """Answer whether a replica runs, and how many do."""
    status = serve.status().applications[serve.get_replica_context().app_name].deployments[Model.__name__]
    running = status.replica_states.get("RUNNING", 0)
    return JSONResponse({"status": "ok" if running else "error", "replicas": running}, 200 if running else 503)


class Gateway:
    """The entry point for clients. It forwards each request to a replica."""

    def __init__(self, model: DeploymentHandle[Any], api_key: str | None, key_variable: str) -> None:
        self._model = model.options(stream=True, method_name="answer")
        self._models: dict[str, list[Message]] = {}  # answers about the model, by path
        router = Router([Route("/health", _show_health)], default=self._answer)
        self._gate = Gate(router, api_key=api_key or os.environ.get(key_variable))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application that Ray Serve's proxies call."""
        return self._gate

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. What a replica has said about the model needs no other one, which may be busy."""
        if scope["method"] != "GET" or not scope["path"].startswith("/v1/models"):
            await self._forward(scope, receive, send)
            return
        messages: list[Message] = []

        async def note(message: Message) -> None:
            messages.append(message)

        if (known := self._models.get(scope["path"])) is None:
            await self._forward(scope, receive, note)
            known = messages
            if known[0]["status"] == 200:
                self._models[scope["path"]] = known
        for message in known:
            await send(message)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a replica answer a request.

        Raises:
            ApiError: No replica has answered it, or one died in the middle.
        """
        body = (await receive())["body"]
        request = {name: scope[name] for name in ("method", "path", "query_string")}
        request["headers"] = [each for each in scope["headers"] if each[0] != b"authorization"]
        for attempt in range(1, ATTEMPTS + 1):
            is_sent = False
            answer = self._model.remote(request, body)
            try:
                async for part in answer:
                    if not is_sent:  # until here another replica can take over
                        await send(part.pop(0))
                        is_sent = True
                    await send(part[-1] | {"body": b"".join(message["body"] for message in part)})
                return
            except asyncio.CancelledError:  # the client is gone
                answer.cancel()
                raise
            except (RayError, RayServeException) as failure:
                if is_sent or not isinstance(failure, _LOST) or attempt == ATTEMPTS:
                    raise _explain(failure) from failure


def make_application(
    make: Callable[[], tuple[Engine, Gate]],
    *,
    replicas: int,
    max_replicas: int | None,
    gpus: float,
    max_requests: int,
    max_queued: int,
    api_key: str | None,
    key_variable: str,
    log_level: str,
) -> serve.Application:
    """Return the gateway and the replicas of a model, with the options of ``dma-hf serve``.

    Args:
        make: Loads the model on a replica, and returns its engine and its application.
        replicas: Number of replicas.
        max_replicas: Number up to which Ray adds replicas under load.
        gpus: GPUs of a replica.
        max_requests: Running requests of a replica.
        max_queued: Waiting requests; more get status 429.
        api_key: Key that requests must carry. ``None`` reads it from an environment variable on the gateway's node.
        key_variable: That variable. If it is not set, no key is needed.
        log_level: Level of the log of requests.
    """
    options: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas is not None:
        scaling = {"min_replicas": replicas, "max_replicas": max_replicas}
        options = {"autoscaling_config": scaling | {"target_ongoing_requests": max(1, max_requests // 2)}}
    model = serve.deployment(Model).options(
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        max_ongoing_requests=max_requests,
        max_queued_requests=max_queued,
        max_constructor_retry_count=3,
        request_router_config={"request_router_class": _EVEN_ROUTER},
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        logging_config=QUIET,
        **options,
    )
    gateway = serve.deployment(serve.ingress()(Gateway)).options(
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=1 << 20,  # the replicas of the model refuse requests, and /health must always pass
        graceful_shutdown_timeout_s=DRAIN_SECONDS + CANCEL_SECONDS,
        logging_config={"log_level": log_level.upper(), "enable_access_log": log_level in ("info", "debug")},
    )
    return gateway.bind(model.bind(make, max_replicas or replicas), api_key, key_variable)


@contextmanager
def running(application: serve.Application, *, address: str | None, host: str, port: int) -> Iterator[None]:
    """Run an application on the Ray cluster at an address, or on a new one here, for a ``with`` block.

    Raises:
        OSError, RayError or ValueError: There is no cluster at the address.
        RuntimeError: The model does not load.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    server, _, number = (address or "").rpartition(":")
    if server:  # Ray itself would try for minutes
        socket.create_connection((server, int(number)), CONNECT_SECONDS).close()
    ray.init(address or "local", include_dashboard=None if address else False, logging_level=logging.ERROR)
    try:
        serve.start(http_options={"host": host, "port": port}, logging_config=QUIET)
        try:
            serve.run(application, name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            message = serve.status().applications[APPLICATION].deployments[Model.__name__].message
            *_, reason = [str(error), *filter(None, message.splitlines())]  # the last line of a traceback
            raise RuntimeError(f"the replicas did not start: {reason.strip()}") from error
        yield
    finally:
        while APPLICATION in serve.status().applications:
            with suppress(TimeoutError):
                serve.delete(APPLICATION)
        ray.shutdown()
