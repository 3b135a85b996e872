"""``dma-hf serve``: Transformers' own server, with low-bit attention and a packed cache."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Literal

from rich.markup import escape

from dma_eval import console
from dma_eval.command import REQUIRED, option
from dma_eval.commands import options
from dma_eval.commands.quality import join, load
from dma_eval.errors import UserError
from dma_eval.names import DMA, check_names

NEEDED = ("fastapi", "uvicorn", "openai")
DEFAULT_PORT = 8000
DEFAULT_REQUESTS = 64
KEY_VARIABLE = "DMA_HF_API_KEY"


server = partial(option, panel="Server")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(options.LoadOptions):
    """The model, its attention, and the server."""

    model: str = option(REQUIRED, **options.MODEL)
    attn: str = option(
        DMA,
        "--attn",
        "-a",
        metavar="BACKEND",
        help="Attention backend: dma_mxfp, dma_mxfp:PRESET or dma_mxfp:FILE.toml, with +int8 or +int4 for a packed "
        "cache; or an attn_implementation of Transformers.",
    )
    continuous_batching: bool = server(
        False,
        "--continuous-batching",
        help="Batch requests continuously over a paged cache; without it, requests are answered one after another.",
    )
    cache_gib: float | None = server(
        None, "--cache-gib", min=0, shown="most of the free memory", help="Memory for the paged cache, in GiB."
    )
    host: str = server("localhost", "--host", help="Address to listen on.")
    port: int = server(DEFAULT_PORT, "--port", min=0, max=65535, help="Port to listen on; 0 takes any free one.")
    max_requests: int = server(
        DEFAULT_REQUESTS,
        "--max-requests",
        min=1,
        help="Requests at once, running and waiting; more are refused with status 429.",
    )
    api_key: str | None = server(
        None,
        "--api-key",
        metavar="KEY",
        shown="none",
        help=f"Key that requests must carry as a bearer token; or set it in {KEY_VARIABLE}.",
    )
    log_level: Literal["critical", "error", "warning", "info", "debug"] = server(
        "info", "--log-level", help="Of the log on standard error; info has a line for each request."
    )


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def serve(args: ServeOptions) -> int:
    r"""Serve a model over HTTP, as `transformers serve` does, with any attention backend.

    The routes are those of OpenAI's interface: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models; and
    /health. `transformers chat` and OpenAI's clients talk to it. Stop it with Ctrl-C.

    Examples:
    dma-hf serve meta-llama/Llama-3.1-8B-Instruct --attn dma_mxfp:balanced+int4 --continuous-batching
    dma-hf serve ./my-model --dtype bfloat16 --port 8001
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \
        -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f"serve needs {', '.join(missing)}, not installed here: pip install 'dma-hf[serve]'")
    api_key = os.environ.get(KEY_VARIABLE) if args.api_key is None else args.api_key
    if api_key == "":
        raise UserError(f"--api-key: expected a key, got ''; leave out --api-key and {KEY_VARIABLE} to need none")
    check_names([args.attn])
    if args.cache_gib is not None and not args.continuous_batching:
        raise UserError("--cache-gib is for --continuous-batching; without it a cache grows with its request")
    with console.starting():
        from dma_eval.backends import activate, parse_backends
        from dma_eval.environment import need_transformers
        from dma_eval.models import batching_settings, parse_source

        if args.continuous_batching:
            need_transformers("5.18", "serve --continuous-batching")
        from dma_eval.serving import listen, make_engine, serve

    (backend,) = parse_backends([args.attn])
    parse_source(args.model)
    listener = listen(args.host, args.port)
    with listener, terminated_as_interrupted():
        loaded = load(args, join(args))
        activate(loaded.model, backend)
        batches = batching_settings(loaded.model, args.cache_gib) if args.continuous_batching else None
        if loaded.tokenizer.chat_template is None:
            console.print_warning(
                f"the tokenizer of {args.model} has no chat template, which /v1/chat/completions needs; "
                "/v1/completions takes plain text"
            )
        engine = make_engine(loaded, batches)
        host = f"[{args.host}]" if ":" in args.host else args.host
        address = f"http://{host}:{listener.getsockname()[1]}/v1"
        console.print_line(f"Serving {escape(args.model)} with {escape(backend.label)} at {address}")
        serve(
            loaded,
            listener,
            engine,
            attention=backend.label,
            most=args.max_requests,
            api_key=api_key,
            log_level=args.log_level,
        )
    return 0
