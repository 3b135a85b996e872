"""Several replicas of the server on Ray Serve: a gateway that takes requests, and replicas of the model.

The gateway checks the API key and forwards requests. Ray Serve chooses a replica for each, bounds how many wait, and
gives open ones time to end when the server stops. A replica answers with the application of :mod:`.app`, like a single
process. If it dies, the gateway tries another one. If a part of the answer was already sent, the gateway ends the
answer with an error in OpenAI's format.
"""

from __future__ import annotations

import asyncio
import os
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import ray
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from ray import serve
from ray.exceptions import NodeDiedError, RayActorError, RayError, TaskCancelledError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.metrics import Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dma_eval.errors import one_line
from dma_eval.names import API_KEY_VARIABLE

from .app import ERROR_HANDLERS, build, load
from .checks import ApiError
from .gate import Gate, overloaded, receiver, start_log
from .jobs import Job
from .ranks import start_ranks
from .settings import Settings

ATTEMPTS = 2  # a request that kills its replica must not kill all of them
CANCEL_SECONDS = 2.0  # for the errors of requests that are cut off when the server stops
FIRST_TOKEN_BUCKETS = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60]
PARTS_PER_SECOND = 1000
"""Most parts of answers that all replicas together send to the gateway, each of which costs it CPU time.

With two replicas of 32 open requests, a client gets new text every 64 ms: as a rule several tokens.
"""
_LOST = (RayActorError, NodeDiedError, WorkerCrashedError)
QUIET = {"log_level": "WARNING", "enable_access_log": False}
EVEN_ROUTER = "ray.serve.experimental.round_robin_router.RoundRobinRouter"
"""Ray Serve's default learns from a replica how busy it is, too late for requests that arrive together."""
SESSION_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
SESSION_HEADER = b"x-session-id"  # as Ray Serve has it


class Model:
    """A replica: the model, its engine and its application."""

    def __init__(self, settings: Settings) -> None:
        if settings.tensor_parallel > 1:
            start_ranks(settings)
        loaded, backend, self._engine = load(settings)
        self._app = build(loaded, self._engine, backend.label)
        self._open_requests = 0
        self._seconds_per_part = (settings.max_replicas or settings.replicas) / PARTS_PER_SECOND
        self._prompt_tokens = Counter("dma_hf_prompt_tokens", "Tokens of prompts.")
        self._new_tokens = Counter("dma_hf_new_tokens", "Generated tokens.")
        self._first_token = Histogram(
            "dma_hf_first_token_seconds", "Time from a request's arrival at a replica to its first token.",
            boundaries=FIRST_TOKEN_BUCKETS,
        )  # fmt: skip
        self._evicted = Counter("dma_hf_evicted_requests", "Requests that lost their pages and were computed again.")
        self._cache_use = Gauge("dma_hf_cache_use", "Share of the paged cache that is in use.")

    def __del__(self) -> None:
        """Stop all ranks together. Ray Serve calls it when it stops a replica."""
        if (engine := getattr(self, "_engine", None)) is not None:  # it has none if the model did not load
            engine.close()

    def _observe(self, job: Job) -> None:
        if job.total_tokens:
            self._prompt_tokens.inc(job.prompt_tokens)
            self._new_tokens.inc(job.total_tokens)
        if job.evictions:
            self._evicted.inc(job.evictions)
        if job.first_token_seconds is not None:
            self._first_token.observe(job.first_token_seconds)

    def check_health(self) -> None:
        """Tell Ray Serve that this replica must be replaced.

        Raises:
            RuntimeError: It cannot generate any more.
        """
        if not self._engine.is_alive():
            raise RuntimeError("the generation thread has ended")
        if (use := self._engine.cache_use()) is not None:
            self._cache_use.set(use)

    async def answer(self, request: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """Answer a request, given as a part of an ASGI scope and a body, by ASGI messages.

        Yields:
            The messages since the last part. The first part has the status, the headers and some text.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        state: dict[str, Any] = {}
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "state": state}
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
            if (job := state.get("job")) is not None:
                job.cancel()
                self._observe(job)


class Forward:
    """An ASGI application that forwards each request to a replica."""

    def __init__(self, model: DeploymentHandle[Any], *, has_sessions: bool) -> None:
        self._model = model.options(stream=True, method_name="answer")
        self._has_sessions = has_sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request.

        Raises:
            ApiError: It was not answered, and nothing was sent.
        """
        body = (await receive())["body"]
        request = {name: scope[name] for name in ("method", "path", "query_string")}
        request["headers"] = [each for each in scope["headers"] if each[0] != b"authorization"]
        model = self._model
        if self._has_sessions:
            model = model.options(session_id=dict(scope["headers"]).get(SESSION_HEADER, b"").decode("latin-1"))
        for attempt in range(1, ATTEMPTS + 1):
            is_sent = False
            try:
                answer = model.remote(request, body)
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
                error = _explain(failure)
                if is_sent:
                    await send({"type": "http.response.body", "body": error.event(scope["path"]).encode()})
                    return
                if not isinstance(failure, _LOST) or attempt == ATTEMPTS:
                    raise error from failure


def _explain(failure: BaseException) -> ApiError:
    """Return the answer to a client for a failure."""
    if isinstance(failure, BackPressureError):
        return overloaded("all replicas are busy and the queue is full (--max-queued)")
    if isinstance(failure, _LOST):
        message = "the replica that computed this answer has died; send the request again"
        return ApiError(message, code="replica_died", status=503)
    if isinstance(failure, (DeploymentUnavailableError, TaskCancelledError)):
        return ApiError(f"no replica can answer: {one_line(failure)}", status=503)
    return ApiError(f"the server failed: {one_line(failure)}", status=500)


def show_health() -> JSONResponse:
    """Answer whether a replica runs, and how many do."""
    status = serve.status().applications[serve.get_replica_context().app_name].deployments[Model.__name__]
    running = status.replica_states.get("RUNNING", 0)
    return JSONResponse({"status": "ok" if running else "error", "replicas": running}, 200 if running else 503)


def show_metrics() -> PlainTextResponse:
    """Answer with Ray's own metrics of this node."""
    here = ray.get_runtime_context().get_node_id()
    (node,) = [each for each in ray.nodes() if each["NodeID"] == here]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=5) as response:
        return PlainTextResponse(response.read().decode(), media_type="text/plain; version=0.0.4")


class Gateway:
    """The entry point for clients. It checks the API key and forwards requests."""

    def __init__(self, model: DeploymentHandle[Any], settings: Settings, api_key: str | None) -> None:
        start_log(settings.log_level)
        app = FastAPI(openapi_url=None, exception_handlers=ERROR_HANDLERS)
        app.add_api_route("/health", show_health, response_model=None)
        app.add_api_route("/metrics", show_metrics, response_model=None)
        app.mount("/", Forward(model, has_sessions=settings.session_affinity))
        self._gate = Gate(app, api_key=api_key or os.environ.get(API_KEY_VARIABLE))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application that Ray Serve's proxies call."""
        return self._gate


def build_application(arguments: dict[str, Any]) -> serve.Application:
    """Return the application of ``serve_config.yaml``, whose ``args`` are those of :class:`Settings`."""
    return make_application(Settings.model_validate(arguments), None)


def make_application(settings: Settings, api_key: str | None) -> serve.Application:
    """Return the gateway and the replicas of the model.

    Without an API key the gateway uses the value of :data:`API_KEY_VARIABLE` on its node.
    """
    options: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.max_replicas is not None:
        scaling = {"min_replicas": settings.replicas, "max_replicas": settings.max_replicas}
        options = {"autoscaling_config": scaling | {"target_ongoing_requests": max(1, settings.max_requests // 2)}}
    router = SESSION_ROUTER if settings.session_affinity else EVEN_ROUTER
    options["request_router_config"] = {"request_router_class": router}
    shared: dict[str, Any] = {
        "graceful_shutdown_wait_loop_s": 0.5,
        "max_constructor_retry_count": 3,
        "logging_config": QUIET,
    }
    process = {"CPU": 1, "GPU": settings.gpus_per_rank}
    if settings.tensor_parallel > 1:
        options["placement_group_bundles"] = [process] * settings.tensor_parallel
        options["placement_group_strategy"] = "STRICT_PACK"
    model = serve.deployment(Model).options(
        ray_actor_options={"num_cpus": 1, "num_gpus": settings.gpus_per_rank},
        max_ongoing_requests=settings.max_requests,
        max_queued_requests=settings.max_queued,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        **options,
        **shared,
    )
    gateway = serve.deployment(serve.ingress()(Gateway)).options(
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=1 << 20,  # its replicas refuse more than they take, and /health must always pass
        graceful_shutdown_timeout_s=settings.drain_seconds + CANCEL_SECONDS,
        **shared,
    )
    return gateway.bind(model.bind(settings), settings, api_key)
