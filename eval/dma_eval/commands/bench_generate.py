"""``dma-hf bench generate``: the speed of ``generate``, attention and cache together, side by side."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dma_eval import console
from dma_eval.commands import options
from dma_eval.commands.benching import add_bench, finish, look, positive
from dma_eval.errors import UserError
from dma_eval.names import check_names

if TYPE_CHECKING:
    from dma_eval.bench.generate import GenerateRun
    from dma_eval.bench.results import LongestContext

CONTEXTS = [8192, 32768, 65536, 131072]
CPU_CONTEXTS = [256, 512]
MIN_NEW_TOKENS = 8
EXAMPLES = """
dma-hf bench generate --json generate.json --plot generate.png
dma-hf bench generate --context 32768 --run sdpa+static dma_mxfp:kv8+dma-static dma_mxfp:kv4+dma-static --longest
dma-hf bench generate --device cpu --shape tiny --dtype float32 --run sdpa+dynamic dma_mxfp:kv4+dma
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    help = "Model with random weights: llama-3.1-8b, llama-3.2-1b or tiny."
    options.add(parser, "--shape", default="llama-3.1-8b", help=help)
    shown = "8192 to 131072; on a CPU 256 and 512"
    options.add(parser, "--context", type=positive, several=True, shown=shown, help="Tokens of the prompt.")
    help = (
        "What to compare; the first is the reference. The cache is dynamic or static (Transformers' own), dma or "
        "dma-static (DMACache). Steps with a static cache are compiled by generate on a GPU."
    )
    shown = "SDPA with both caches, kv8 and kv4 with both"
    options.add(parser, "--run", "-r", dest="runs", metavar="ATTENTION+CACHE", several=True, shown=shown, help=help)
    options.add(parser, "--batch", type=positive, default=1, help="Sequences.")
    help = "Tokens to generate in each sequence."
    options.add(parser, "--new-tokens", type=options.number(MIN_NEW_TOKENS), default=48, help=help)
    help = "Also find the longest context that fits; needs a GPU."
    options.add(parser, "--longest", action="store_true", help=help)
    add_bench(parser, files=("json", "plot"), dtypes=("bfloat16", "float16", "float32"))


def run(args: argparse.Namespace) -> int:
    """Time generate: seconds to the first token, tokens per second, memory.

    The weights are random, which changes nothing about the speed. The JSON file is written after every run, so that an
    interruption keeps what there is. Exit code 1 if no run worked at some context, 2 for invalid input.
    """
    options.prepare_files(args)
    check_names((each.partition("+")[0] for each in args.runs), "--run")
    with console.starting():
        from dma_eval.bench import generate
        from dma_eval.bench.results import GenerateReport, report_writer
        from dma_eval.bench.shown import failures, generate_tables, plot_generate

    runs = generate.parse_runs(args.runs or generate.DEFAULT_RUNS)
    device, dtype, facts = look(args)
    if args.longest and device.type != "cuda":
        raise UserError("--longest needs a CUDA device: on a CPU memory has no clear end")
    contexts = args.context or (CONTEXTS if device.type == "cuda" else CPU_CONTEXTS)
    with console.working(f"Making {args.shape}"):
        model = generate.build_model(args.shape, device, dtype)

    def announce(tokens: int, each: GenerateRun) -> None:
        console.print_note(f"{tokens:,} tokens, {each.label}")

    write = report_writer(
        GenerateReport,
        args.json,
        command=console.command_line(),
        seed=args.seed,
        model=args.shape,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_bytes=generate.weight_bytes(model),
        dtype=args.dtype,
        batch=args.batch,
        new_tokens=args.new_tokens,
        device=facts,
    )
    longest: list[LongestContext] = []
    results = generate.measure(
        model,
        sorted(set(contexts)),
        runs,
        batch=args.batch,
        new_tokens=args.new_tokens,
        on_run=announce,
        on_results=lambda so_far: write(results=so_far, longest=longest),
    )
    for each in runs if args.longest else ():
        with console.working(f"Looking for the longest context of {each.label}"):
            guess = generate.guess_longest(model, each, results)
            most = model.config.max_position_embeddings
            longest.append(generate.longest_context(model, each, args.batch, most, guess))
        write(results=results, longest=longest)
    title = f"{args.shape}, {args.dtype}, batch {args.batch}, {facts.name}"
    if args.plot is not None:
        plot_generate(results, title, args.plot)
    did_not_run = failures(results, lambda r: f"{r.context:,} tokens")
    return finish(args, generate_tables(results, longest, title), did_not_run, results, lambda r: r.context)
