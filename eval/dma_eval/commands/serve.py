"""``dma-hf serve``: Transformers' own server, with low-bit attention and a packed cache."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.markup import escape

from dma_eval import console, options
from dma_eval.command import argument, option
from dma_eval.errors import UserError
from dma_eval.files import prepare_file
from dma_eval.names import API_KEY_VARIABLE, DMA, check_names, is_file, parse_source, split_suffix

if TYPE_CHECKING:
    from dma_eval.load.backends import Backend
    from dma_eval.serving.settings import Settings

NEEDED = ("fastapi", "uvicorn", "openai")
DEFAULT_PORT = 8000
DEFAULT_REQUESTS = 64


server, on_ray = partial(option, panel="Server"), partial(option, panel="Replicas, on Ray Serve")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(options.LoadOptions):
    """The model, its attention, and the server."""

    model: str = argument(**options.MODEL)
    attn: str = option(
        DMA,
        "-a",
        metavar="BACKEND",
        help="Attention backend: dma_mxfp (the settings in the model's config.json, or balanced), dma_mxfp:PRESET or "
        "dma_mxfp:FILE.toml, with +int8 or +int4 for a packed cache; or an attn_implementation of Transformers.",
    )
    continuous_batching: bool = server(
        False,
        help="Batch requests continuously over a paged cache; without it, requests are answered one after another.",
    )
    cache_gib: float | None = server(
        None, min=0, shown="most of the free memory", help="Memory for the paged cache, in GiB."
    )
    compile: bool = server(False, help="Compile the batches of --continuous-batching: faster, but slower to start.")
    host: str = server("localhost", help="Address to listen on.")
    port: int = server(DEFAULT_PORT, min=0, max=65535, help="Port to listen on; 0 takes any free one.")
    max_requests: int = server(
        DEFAULT_REQUESTS, min=1, help="Requests at once, running and waiting; more are refused with status 429."
    )
    api_key: str | None = server(
        None,
        metavar="KEY",
        shown="none",
        help=f"Key that requests must carry as a bearer token; or set it in {API_KEY_VARIABLE}.",
    )
    log_level: Literal["critical", "error", "warning", "info", "debug"] = server(
        "info", help="Of the log on standard error; info has a line for each request."
    )
    replicas: int = on_ray(
        1, min=1, help="Copies of the model, each with its own GPUs; 1 needs no Ray, unless --tensor-parallel."
    )
    max_replicas: int | None = on_ray(
        None, min=1, shown="no autoscaling", help="Add replicas under load, up to this number."
    )
    gpus_per_replica: float | None = on_ray(
        None,
        min=0,
        shown="--tensor-parallel; 0 on a CPU",
        help="GPUs of a replica; with several and no --tensor-parallel, the layers are spread over them.",
    )
    tensor_parallel: int = on_ray(
        1,
        min=1,
        help="Processes of a replica, each with its own GPU and a share of every layer; for --continuous-batching.",
    )
    max_queued: int = on_ray(
        DEFAULT_REQUESTS,
        min=1,
        help="Requests that wait while every replica has --max-requests; more are refused with status 429.",
    )
    session_affinity: bool = on_ray(
        False,
        help="Send requests with the same x-session-id header to the same replica, which shares the pages of their "
        "beginning; without it, replicas take turns.",
    )
    drain_seconds: float = on_ray(10.0, min=0, help="Time for open requests to end when the server stops.")
    ray_address: str | None = on_ray(
        None,
        metavar="ADDRESS",
        shown="a new Ray on this machine",
        help="Run on this Ray cluster, on whose nodes dma-hf and the model must be; auto is the cluster of this node.",
    )
    write_config: Path | None = on_ray(
        None,
        metavar="FILE",
        help="Do not serve; write the configuration that `serve run` and `serve deploy` of Ray take.",
    )


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does, also in the background of a script, where SIGINT is ignored."""
    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(each, signal.default_int_handler) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


def serve(args: ServeOptions) -> int:
    r"""Serve a model over HTTP, as `transformers serve` does, with any attention backend.

    The routes are those of OpenAI's interface: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models; and
    /health. `transformers chat` and OpenAI's clients talk to it. Stop it with Ctrl-C.

    Examples:
    dma-hf serve meta-llama/Llama-3.1-8B-Instruct --attn dma_mxfp:balanced+int4 --continuous-batching
    dma-hf serve ./my-model --dtype bfloat16 --port 8001
    dma-hf serve ./my-model --continuous-batching --replicas 2
    dma-hf serve ./my-model --replicas 2 --max-replicas 8 --write-config serve_config.yaml
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \
        -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f"serve needs {', '.join(missing)}, not installed here: pip install 'dma-hf[serve]'")
    api_key = os.environ.get(API_KEY_VARIABLE) if args.api_key is None else args.api_key
    if api_key == "":
        raise UserError(f"--api-key: expected a key, got ''; leave out --api-key and {API_KEY_VARIABLE} to need none")
    check_names([args.attn])
    if args.cache_gib is not None and not args.continuous_batching:
        raise UserError("--cache-gib is for --continuous-batching; without it a cache grows with its request")
    if args.compile and not args.continuous_batching:
        raise UserError("--compile is for --continuous-batching")
    if args.max_replicas is not None and args.max_replicas < args.replicas:
        raise UserError(f"--max-replicas: expected at least --replicas {args.replicas}, got {args.max_replicas}")
    if args.tensor_parallel > 1 and (not args.continuous_batching or args.device_map is not None):
        raise UserError("--tensor-parallel needs --continuous-batching, and excludes --device-map")
    if args.write_config is not None:
        from dma_eval.serving.settings import write_config

        prepare_file(args.write_config, "--write-config")
        settings = _settings(_for_cluster(args), has_gpus=True)
        write_config(settings, args.write_config, host=args.host, port=args.port)
        console.print_wrote(args.write_config)
        return 0
    if args.ray_address is None:
        options.check_inputs(args.model, None)
    else:
        args = _for_cluster(args)
    with console.starting():
        from dma_eval.environment import need_transformers
        from dma_eval.load.backends import parse_backends

        if args.continuous_batching:
            need_transformers("5.18", "serve --continuous-batching")
        from dma_eval.serving.app import build, listen, load, serve

    (backend,) = parse_backends([args.attn])
    if max(args.replicas, args.tensor_parallel) > 1 or args.max_replicas is not None or args.ray_address is not None:
        return _serve_replicas(args, backend, api_key)
    listener = listen(args.host, args.port)
    with listener, terminated_as_interrupted():
        settings = _settings(args, has_gpus=True)
        with console.working(f"Loading {args.model}"):
            loaded, _, engine = load(settings)
        if loaded.tokenizer.chat_template is None:
            console.print_warning(
                f"the tokenizer of {args.model} has no chat template, which /v1/chat/completions needs; "
                "/v1/completions takes plain text"
            )
        _announce(args, backend, listener.getsockname()[1])
        serve(build(loaded, engine, backend.label), listener, settings, api_key)
    return 0


def _for_cluster(args: ServeOptions) -> ServeOptions:
    """Return the options with absolute paths, because other nodes have other working folders.

    A folder with an absolute path may be on them alone; a warning says that it is not here.
    """
    model = Path(args.model).expanduser()
    if model.is_absolute() and not model.exists():
        console.print_warning(f"no such folder here: {args.model}; every node needs it")
    else:
        parse_source(args.model)
    rest, suffix = split_suffix(args.attn)
    implementation, _, setting = rest.partition(":")
    has_file = implementation == DMA and setting and is_file(setting)
    return replace(
        args,
        model=str(model.absolute()) if model.exists() else args.model,
        attn=f"{DMA}:{Path(setting).absolute()}{suffix}" if has_file else args.attn,
    )


def _announce(args: ServeOptions, backend: Backend, port: int) -> None:
    host = f"[{args.host}]" if ":" in args.host else args.host
    label = f"{escape(args.model)} with {escape(backend.label)}"
    console.print_line(f"Serving {label} at http://{host}:{port}/v1")


def _settings(args: ServeOptions, has_gpus: bool) -> Settings:
    """Return the options as the settings of replicas, on a cluster with GPUs or without."""
    from dma_eval.serving.settings import Settings

    gpus = args.gpus_per_replica
    if gpus is None:
        gpus = float(args.tensor_parallel if has_gpus and args.device != "cpu" else 0)
    given = {name: getattr(args, name) for name in Settings.model_fields if name != "gpus_per_replica"}
    if gpus > args.tensor_parallel == 1 and args.device_map is None:
        given["device_map"] = "auto"
    return Settings(**given, gpus_per_replica=gpus)


def _serve_replicas(args: ServeOptions, backend: Backend, api_key: str | None) -> int:
    if find_spec("ray") is None:
        raise UserError("--replicas needs ray, not installed here: pip install 'dma-hf[ray]'")
    if args.ray_address is None:
        # Anyone who reaches Ray's ports can run code, unless they need a token.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with console.starting():
        from dma_eval.serving import cluster
        from dma_eval.serving.app import listen

    port = args.port
    if args.ray_address is None:
        with listen(args.host, args.port) as listener:
            port = listener.getsockname()[1]
    elif port == 0:
        raise UserError("--port: expected a port that is free on every machine of --ray-address, got 0")
    with cluster.joined(args.ray_address), terminated_as_interrupted():  # after Ray installs its own handlers
        settings = _settings(args, cluster.has_gpus())
        if args.ray_address is None:
            cluster.check_resources(settings)
        with console.working(f"Starting {args.replicas} replicas of {args.model}"):
            cluster.start(settings, host=args.host, port=port, api_key=api_key)
        _announce(args, backend, port)
        cluster.wait()
    return 0
