"""``dma-hf serve``: a server with OpenAI's interface, low-bit attention and a packed cache."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter
from rich.markup import escape

from dma_eval import config, console
from dma_eval.config import argument, option
from dma_eval.errors import UserError, one_line
from dma_eval.load.hub import check_inputs
from dma_eval.names import API_KEY_VARIABLE, DMA, FORMAT_SUFFIXES, PEER_SUFFIXES, is_file, parse_name, split_suffix

if TYPE_CHECKING:
    from ray.serve import Application

    from dma_hf.serving import Engine
    from dma_hf.serving.gate import Gate

NEEDED = ("fastapi", "uvicorn", "openai")
DEFAULT_REQUESTS = 64
server, on_ray = partial(option, panel="Server"), partial(option, panel="Replicas, on Ray Serve")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(config.LoadOptions):
    model: str = argument(**config.MODEL)
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
    port: int = server(8000, min=0, max=65535, help="Port to listen on; 0 takes any free one.")
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
    replicas: int = on_ray(1, min=1, help="Copies of the model, each with its own GPUs; 1 needs no Ray.")
    max_replicas: int | None = on_ray(
        None, min=1, shown="no autoscaling", help="Add replicas under load, up to this number."
    )
    gpus_per_replica: float | None = on_ray(
        None,
        min=0,
        shown="1; 0 on a CPU",
        help="GPUs of a replica; with several, the layers are spread over them.",
    )
    max_queued: int = on_ray(
        DEFAULT_REQUESTS,
        min=1,
        help="Requests that wait while every replica has --max-requests; more are refused with status 429.",
    )
    ray_address: str | None = on_ray(
        None,
        metavar="ADDRESS",
        shown="a new Ray on this machine",
        help="Run on this Ray cluster, on whose nodes dma-hf and the model must be; auto is the cluster of this node.",
    )


def serve(args: ServeOptions) -> int:
    r"""Serve a model over HTTP, as `transformers serve` does, with any attention backend.

    The routes are those of OpenAI's interface: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models; and
    /health. `transformers chat` and OpenAI's clients talk to it. Stop it with Ctrl-C.

    Examples:
    dma-hf serve meta-llama/Llama-3.1-8B-Instruct --attn dma_mxfp:balanced+int4 --continuous-batching
    dma-hf serve ./my-model --dtype bfloat16 --port 8001
    dma-hf serve ./my-model --continuous-batching --replicas 2
    torchrun --nproc-per-node 2 --no-python dma-hf serve ./my-model --continuous-batching
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \
        -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f"serve needs {', '.join(missing)}, not installed here: pip install 'dma-hf[serve]'")
    if args.api_key is None:
        args = replace(args, api_key=os.environ.get(API_KEY_VARIABLE))
    parse_name(args.attn)
    _check(args)
    on_ray = args.replicas > 1 or args.max_replicas is not None or args.ray_address is not None
    ranks, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    if not on_ray and args.gpus_per_replica is not None:
        raise UserError("--gpus-per-replica is for --replicas; --device-map auto spreads the layers of one copy")
    if not on_ray and args.max_queued != DEFAULT_REQUESTS:
        raise UserError("--max-queued is for --replicas; --max-requests limits the requests of one copy")
    if ranks > 1 and (on_ray or not args.continuous_batching or args.device_map is not None):
        raise UserError("torchrun: serve needs --continuous-batching, and neither --replicas nor --device-map")
    if args.ray_address is None:
        check_inputs(args.model)
    with console.starting():
        from dma_eval.load.backends import parse_backends
        from dma_hf.serving import Batched, app

    parse_backends([args.attn])
    if on_ray:
        return _serve_replicas(args)
    _interrupt_when_terminated()
    if rank > 0:
        console.quiet()
        with suppress(KeyboardInterrupt):
            engine, _ = load(args)
            assert isinstance(engine, Batched)
            engine.follow()
        return _end_process()
    with _listen(args) as listener:
        with console.working(f"Loading {args.model}"):
            engine, gate = load(args)
        if engine.tokenizer.chat_template is None:
            console.print_warning(
                f"the tokenizer of {args.model} has no chat template, which /v1/chat/completions needs; "
                "/v1/completions takes plain text"
            )
        _announce(args, listener.getsockname()[1])
        app.run(gate, listener, log_level=args.log_level)
        if ranks > 1 and isinstance(engine, Batched):
            engine.close()
    return _end_process()


def _check(args: ServeOptions) -> None:
    """Check options that exclude each other, the cache, and the key."""
    if (cache := split_suffix(args.attn)[1]) in PEER_SUFFIXES:
        raise UserError(f"--attn: a server cannot keep the cache {cache}; of {DMA} it has {', '.join(FORMAT_SUFFIXES)}")
    if args.api_key == "":
        raise UserError(f"--api-key: expected a key, got ''; leave out --api-key and {API_KEY_VARIABLE} to need none")
    if args.api_key is not None and args.api_key != args.api_key.strip():
        raise UserError(f"--api-key: expected no spaces or line ends around the key, also in {API_KEY_VARIABLE}")
    if not args.host:
        raise UserError("--host: expected an address or a name, got ''; 0.0.0.0 is every address of this machine")
    if args.cache_gib is not None and not args.continuous_batching:
        raise UserError("--cache-gib is for --continuous-batching; without it a cache grows with its request")
    if args.compile and not args.continuous_batching:
        raise UserError("--compile is for --continuous-batching")
    if (args.gpus_per_replica or 0) > 1 and args.device != "auto":
        why = "with several GPUs the layers are spread over them"
        raise UserError(f"--gpus-per-replica: {why}; leave out --device {args.device}")
    if args.max_replicas is not None and args.max_replicas < args.replicas:
        raise UserError(f"--max-replicas: expected at least --replicas {args.replicas}, got {args.max_replicas}")


def _interrupt_when_terminated() -> None:
    """Let SIGTERM end this process as Ctrl-C does, also in the background of a script, where SIGINT is ignored."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.default_int_handler)


def _end_process() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    # Python would wait for a step that cannot be interrupted, and needs seconds to unload PyTorch.
    os._exit(0)


def load(args: ServeOptions, name: str | None = None) -> tuple[Engine, Gate]:
    """Load the model, switch it to its attention, and return its engine and its application.

    Requests call the model ``name``, by default as the options do.
    """
    import torch
    from transformers.utils import logging

    import dma_hf
    from dma_eval.load.backends import activate, parse_backends
    from dma_eval.load.models import batching_settings, load_model
    from dma_hf.serving import Batched, Sequential, make_app

    logging.set_verbosity_error()
    torch.manual_seed(args.seed)
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")  # of tensor parallelism: before NCCL starts
    ranks = int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
    loaded = load_model(args.model, **args.loading, tensor_parallel=ranks)
    (backend,) = parse_backends([args.attn])
    implementation, setting, suffix = parse_name(args.attn)
    try:
        if implementation == DMA and not setting:  # without a preset, it keeps the settings in config.json
            config = dma_hf.configure(loaded.model, cache=FORMAT_SUFFIXES.get(suffix, ...), activate=True)
            backend = replace(backend, config=config)
        activate(loaded.model, backend)
        if args.continuous_batching:
            batches = batching_settings(
                loaded.model, args.cache_gib, most_requests=args.max_requests, is_compiled=args.compile
            )
            engine: Engine = Batched(loaded.model, loaded.tokenizer, batches)
        else:
            engine = Sequential(loaded.model, loaded.tokenizer)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"cannot serve {args.model} with {args.attn}: {one_line(error)}") from error
    gate = make_app(
        engine,
        name=loaded.name if name is None else name,
        attention=backend.label,
        api_key=args.api_key,
        max_requests=args.max_requests,
    )
    return engine, gate


def _load_replica(args: ServeOptions, name: str | None) -> tuple[Engine, Gate]:
    """Load a copy of the model with a separate seed, so that copies do not give the same samples."""
    from ray.serve import get_replica_context

    return load(replace(args, seed=(args.seed + get_replica_context().rank.rank) % 2**32), name)


def build_application(arguments: dict[str, Any]) -> Application:
    """Return the application for Ray's own commands and for Kubernetes. The arguments are options of ``dma-hf serve``.

    Without ``api_key``, the API key comes from an environment variable on the nodes.

    Raises:
        UserError: Arguments exclude each other, or the key is empty.
        ValueError: An argument is unknown, or has a value of a wrong type.
    """
    known = ServeOptions.__dataclass_fields__
    if unknown := arguments.keys() - known:
        raise ValueError(f"unknown options of dma-hf serve: {', '.join(unknown)}; valid: {', '.join(known)}")
    args = TypeAdapter(ServeOptions).validate_python(arguments)  # Ray passes texts
    _check(args)
    return _make_application(args)


def _make_application(args: ServeOptions, name: str | None = None) -> Application:
    from dma_hf.serving.replicas import make_application

    gpus = float(args.device != "cpu") if args.gpus_per_replica is None else args.gpus_per_replica
    if gpus > 1 and args.device_map is None:
        args = replace(args, device_map="auto")
    names = ("replicas", "max_replicas", "max_requests", "max_queued", "log_level", "api_key")
    same = {name: getattr(args, name) for name in names}
    make = partial(_load_replica, replace(args, api_key=None), name)  # the gateway checks the key
    return make_application(make, gpus=gpus, key_variable=API_KEY_VARIABLE, **same)


def _serve_replicas(args: ServeOptions) -> int:
    if find_spec("ray") is None:
        raise UserError("--replicas needs ray, not installed here: pip install 'dma-hf[ray]'")
    port = args.port
    if args.ray_address is None:
        # Anyone who reaches Ray's ports can run code, unless they need a token.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Ray kills its proxy if it has not started in three times 5 seconds, too few where all cores are busy.
        os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
        with _listen(args) as listener:
            port = listener.getsockname()[1]
    elif port == 0:
        raise UserError("--port: expected a port that is free on every machine of --ray-address, got 0")
    with console.starting():
        from ray.exceptions import RayError

        from dma_eval.load.models import parse_device
        from dma_hf.serving import replicas
    if args.ray_address is None and args.gpus_per_replica is None and parse_device(args.device).type == "cpu":
        args = replace(args, gpus_per_replica=0.0)
    application = _make_application(_absolute(args), args.model)
    with ExitStack() as stack:
        try:
            with console.working(f"Starting {args.replicas} replicas of {args.model}"):
                stack.enter_context(replicas.running(application, address=args.ray_address, host=args.host, port=port))
        except (OSError, RayError, ValueError) as error:
            place = "Ray did not start" if args.ray_address is None else "--ray-address"
            raise UserError(f"{place}: {one_line(error)}") from error
        except RuntimeError as error:
            raise UserError(one_line(error)) from error
        _interrupt_when_terminated()  # after Ray has installed its own handlers
        _announce(args, port)
        with suppress(KeyboardInterrupt):  # how a server is stopped
            threading.Event().wait()
    return 0


def _absolute(args: ServeOptions) -> ServeOptions:
    """Return the options with absolute paths, because other processes have other working folders."""
    model = Path(args.model).expanduser()
    _, setting, suffix = parse_name(args.attn)
    return replace(
        args,
        model=str(model.absolute()) if model.exists() else args.model,
        attn=f"{DMA}:{Path(setting).absolute()}{suffix}" if setting and is_file(setting) else args.attn,
    )


def _listen(args: ServeOptions) -> socket.socket:
    """Return a listening socket. Clients that connect before the server runs wait for it."""
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:
        return socket.create_server((args.host, args.port), family=family)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]
        way_out = "choose another --port (0 takes any free one) or --host"
        raise UserError(f"--port: cannot listen at {args.host}:{args.port}: {why}; {way_out}") from error


def _announce(args: ServeOptions, port: int) -> None:
    host = f"[{args.host}]" if ":" in args.host else args.host
    console.print_line(f"Serving {escape(args.model)} with {escape(args.attn)} at http://{host}:{port}/v1")
