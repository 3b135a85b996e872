"""``dma-hf bench generate``: the speed of ``generate``, attention and cache together, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from dma_eval import console, options
from dma_eval.commands.ppl import check_plot, prepare_output
from dma_eval.errors import UserError

if TYPE_CHECKING:
    from dma_eval.generate_results import LongestContext
    from dma_eval.generate_speed import GenerateRun

CONTEXTS = [8192, 32768, 65536, 131072]
CPU_CONTEXTS = [256, 512]
DTYPES = ("bfloat16", "float16", "float32")
MIN_NEW_TOKENS = 8
EPILOG = """
[bold]Examples[/]

dma-hf bench generate --json generate.json --plot generate.png

dma-hf bench generate --context 32768 --run sdpa+static dma_mxfp:kv8+dma-static dma_mxfp:kv4+dma-static --longest

dma-hf bench generate --device cpu --shape tiny --dtype float32 --run sdpa+dynamic dma_mxfp:kv4+dma
"""


def generate(
    shape: Annotated[
        str, typer.Option(help="Model with random weights: llama-3.1-8b, llama-3.2-1b or tiny.")
    ] = "llama-3.1-8b",
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of the prompt.", show_default="8192 to 131072; on a CPU 256 and 512"),
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            "--run",
            "-r",
            metavar="ATTENTION+CACHE...",
            help="What to compare; the first is the reference. The cache is dynamic or static (Transformers' own), dma "
            "or dma-static (DMACache). Steps with a static cache are compiled by generate on a GPU.",
            show_default="SDPA with both caches, kv8 and kv4 with both",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    new_tokens: Annotated[int, typer.Option(min=MIN_NEW_TOKENS, help="Tokens to generate in each sequence.")] = 48,
    longest: Annotated[
        bool,
        typer.Option("--longest", help="Also find the longest context that fits; needs a GPU.", show_default="off"),
    ] = False,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto is CUDA if present.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of PyTorch's random numbers.")] = 0,
    json: options.Json = None,
    plot: options.Plot = None,
    debug: options.Debug = False,
) -> None:
    """Time generate: seconds to the first token, tokens per second, memory.

    The weights are random, which changes nothing about the speed. The JSON file is written after every run, so that an
    interruption keeps what there is. Exit code 1 if no run worked at some context, 2 for
    invalid input.
    """
    with console.user_errors(debug):
        check_plot(plot)
        for path in (json, plot):
            prepare_output(path)
        if dtype not in DTYPES:
            raise UserError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        with console.starting():
            import torch

            from dma_eval import generate_report, generate_speed
            from dma_eval.devices import parse_device
            from dma_eval.generate_results import GenerateReport
            from dma_eval.speed_results import report_writer
            from dma_eval.timing import look_at

        where = parse_device(device)
        if longest and where.type != "cuda":
            raise UserError("--longest needs a CUDA device: on a CPU memory has no clear end")
        runs = generate_speed.parse_runs(generate_speed.DEFAULT_RUNS if run is None else run)
        contexts = context or (CONTEXTS if where.type == "cuda" else CPU_CONTEXTS)
        if min(contexts) < 1:
            raise UserError(f"--context: expected at least 1, got {min(contexts)}")
        torch.manual_seed(seed)
        with console.working("Looking at the device"):
            facts = look_at(where)
        with console.working(f"Making {shape}"):
            model = generate_speed.build_model(shape, where, getattr(torch, dtype))

        def announce(tokens: int, each: GenerateRun) -> None:
            console.err.print(f"[dim]{tokens:>7,} tokens, {escape(each.label)}[/]", highlight=False)

        write = report_writer(
            GenerateReport,
            json,
            command=console.command_line(),
            seed=seed,
            model=shape,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            weight_bytes=generate_speed.weight_bytes(model),
            dtype=dtype,
            batch=batch,
            new_tokens=new_tokens,
            device=facts,
        )
        found: list[LongestContext] = []
        results = generate_speed.measure(
            model,
            sorted(set(contexts)),
            runs,
            batch=batch,
            new_tokens=new_tokens,
            on_run=announce,
            on_results=lambda so_far: write(results=so_far, longest=found),
        )
        for each in runs if longest else ():
            with console.working(f"Looking for the longest context of {each.label}"):
                guess = generate_speed.guess_longest(model, each, results)
                most = model.config.max_position_embeddings
                found.append(generate_speed.longest_context(model, each, batch, most, guess))
            write(results=results, longest=found)
        title = f"{shape}, {dtype}, batch {batch}, {facts.name}"
        console.print_table(generate_report.table(results, title))
        if found:
            console.print_table(generate_report.longest_table(found))
        if plot is not None:
            generate_report.plot(results, title, plot)
        for path in (json, plot):
            if path is not None:
                console.print_line(f"Wrote {escape(str(path))}")
    if any(all(r.failure is not None for r in results if r.context == tokens) for tokens in contexts):
        raise typer.Exit(console.BACKEND_FAILED)
