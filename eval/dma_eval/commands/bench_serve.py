"""``dma-hf bench serve``: many requests at once, over a paged cache, one backend after another."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dma_eval import console
from dma_eval.commands import options
from dma_eval.commands.benching import add_bench, finish, look, positive
from dma_eval.errors import UserError
from dma_eval.names import check_names

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from dma_eval.backends import Backend
    from dma_eval.bench.serve import RequestSet

REQUESTS = ["32x2048+64", "8x16384+32"]
CPU_REQUESTS = ["8x64-512+16-32"]
ATTN = ["sdpa", "dma_mxfp", "dma_mxfp+int8", "dma_mxfp+int4"]
DEFAULT_SHAPE = "llama-3.1-8b"
EXAMPLES = """
dma-hf bench serve --json serve.json --plot serve.png
dma-hf bench serve --requests 256x512-4096+64-256 --attn dma_mxfp dma_mxfp+int8 dma_mxfp+int4 --cache-gib 16
dma-hf bench serve --model meta-llama/Llama-3.1-8B --requests 32x2048+64
dma-hf bench serve --device cpu --shape tiny --dtype float32 --requests 8x64-512+16-32
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    help = "Model with random weights: llama-3.1-8b, llama-3.2-1b or tiny."
    options.add(parser, "--shape", help=help, shown=DEFAULT_SHAPE)
    options.add(parser, "--layers", type=positive, help="Layers of it.", shown="as many as its name says")
    help = "Hub name, local folder, or GGUF file; instead of --shape."
    options.add(parser, "--model", "-m", metavar="NAME|FOLDER|FILE.gguf", help=help)
    help = (
        "Requests that come at once: how many, tokens of a prompt, tokens to generate. A length may be a range, from "
        "which each request draws its own. Takes several values."
    )
    shown = f"{' '.join(REQUESTS)}; on a CPU {' '.join(CPU_REQUESTS)}"
    options.add(parser, "--requests", metavar="COUNTxPROMPT+NEW", several=True, shown=shown, help=help)
    help = (
        "Backends to compare; the first is the reference. sdpa or eager, or dma_mxfp, dma_mxfp:PRESET, "
        "dma_mxfp:FILE.toml, whose pages are in 16 bits; +int8 or +int4 for packed ones."
    )
    options.add(parser, "--attn", "-a", metavar="BACKEND", several=True, default=ATTN, help=help)
    shown = "most of what is free; on a CPU what all requests need"
    help = "Memory for the paged cache, in GiB, the same for all."
    options.add(parser, "--cache-gib", type=options.number(0, kind=float), shown=shown, help=help)
    add_bench(parser, files=("json", "plot"), dtypes=("bfloat16", "float16", "float32"))


def run(args: argparse.Namespace) -> int:
    """Time many requests at once: new tokens per second, waiting times, requests at once.

    Transformers' continuous batching answers them, as in `generate_batch` and `dma-hf serve --continuous-batching`.
    With random weights the speed is that of trained ones. Eight requests that are not counted come before each run. In
    the table, "first" is the time to a request's first token, its waiting counted, and "between" that between two of
    its tokens, both as median and 99th percentile; "at once" are the most requests that had pages at the same time;
    "per token" is what it takes in pages, and "per request" what a request takes beside them. The JSON file is written
    after every run, so that an interruption keeps what there is. Exit code 1 if no backend answered some set of
    requests, 2 for invalid input.
    """
    options.prepare_files(args)
    check_names(args.attn)
    if args.model is not None and (args.shape or args.layers):
        raise UserError("--model excludes --shape and --layers; give one or the other")
    with console.starting():
        from dma_eval.environment import need_transformers

        need_transformers("5.23", "bench serve")
        from dma_eval.backends import parse_backends
        from dma_eval.bench import serve
        from dma_eval.bench.generate import weight_bytes
        from dma_eval.bench.results import ServeReport, report_writer
        from dma_eval.bench.shown import failures, plot_serve, serve_tables

    backends = parse_backends(args.attn)
    serve.parse_requests(args.requests or REQUESTS)
    device, dtype, facts = look(args)
    sets = serve.parse_requests(args.requests or (REQUESTS if device.type == "cuda" else CPU_REQUESTS))
    model = make_model(args, device, dtype)
    serve.check(model, sets, args.cache_gib)
    text = model.config.get_text_config()
    name, layers = args.model or args.shape or DEFAULT_SHAPE, text.num_hidden_layers

    def announce(requests: RequestSet, backend: Backend) -> None:
        console.print_note(f"{requests.name}, {backend.label}")

    write = report_writer(
        ServeReport,
        args.json,
        command=console.command_line(),
        seed=args.seed,
        model=name,
        layers=layers,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_bytes=weight_bytes(model),
        dtype=args.dtype,
        cache_gib=args.cache_gib,
        device=facts,
    )
    results = serve.measure(
        model,
        sets,
        backends,
        seed=args.seed,
        cache_gib=args.cache_gib,
        on_run=announce,
        on_results=lambda so_far: write(results=so_far),
    )
    room = "" if args.cache_gib is None else f", cache of {args.cache_gib:g} GiB"
    title = f"{name}, {layers} layers, {args.dtype}, {facts.name}{room}"
    if args.plot is not None:
        plot_serve(results, title, args.plot)
    return finish(
        args, serve_tables(results, title), failures(results, lambda r: r.requests), results, lambda r: r.requests
    )


def make_model(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Make the model of a shape, or load one.

    Raises:
        UserError: There is none, or it does not fit.
    """
    from dma_eval.bench.generate import build_model
    from dma_eval.models import load_model

    if args.model is not None:
        with console.working(f"Loading {args.model}"):
            return load_model(args.model, dtype=args.dtype, device=str(device)).model
    shape = args.shape or DEFAULT_SHAPE
    with console.working(f"Making {shape}"):
        return build_model(shape, device, dtype, args.layers)
