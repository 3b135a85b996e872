"""``dma-hf bench prefill``: the speed of prefill attention, side by side."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from dma_eval import console, options
from dma_eval.commands.ppl import check_plot, prepare_output
from dma_eval.errors import UserError

if TYPE_CHECKING:
    import torch

    from dma_eval.speed_results import Shape

SHAPE_PANEL = "Shapes"
LENGTHS = [1024 << i for i in range(8)]
CPU_LENGTHS = [256, 1024]
HEAD_DIMS = [128, 64]
HEADS = ["32/8", "32/32"]
MASKS = ["causal", "full"]
DTYPES = ("bfloat16", "float16")
EPILOG = """
[bold]Examples[/]

dma-hf bench prefill --json prefill.json --plot prefill.png

dma-hf bench prefill --length 2048 8192 32768 --head-dim 128 --heads 32/8 --mask causal

dma-hf bench prefill --attn sdpa dma_mxfp:balanced dma_mxfp:my.toml --length 16384

dma-hf bench prefill --device cpu --length 256 --heads 4/2
"""


def prefill(
    attn: Annotated[
        list[str] | None,
        typer.Option(
            "--attn",
            "-a",
            metavar="IMPLEMENTATION...",
            help="What to compare; the first is the reference. sdpa (PyTorch's choice), sdpa:flash, sdpa:cudnn, flex "
            "(FlexAttention, compiled), dma_mxfp:PRESET, dma_mxfp:FILE.toml.",
            show_default="all, with every preset",
        ),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(help="Tokens.", show_default="1024 to 131072; on a CPU 256 and 1024", rich_help_panel=SHAPE_PANEL),
    ] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="Head dimensions.", show_default="128 64", rich_help_panel=SHAPE_PANEL)
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(
            metavar="QUERY/KV...", help="Query and kv heads.", show_default="32/8 32/32", rich_help_panel=SHAPE_PANEL
        ),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(metavar="causal|full...", help="Masks.", show_default="causal full", rich_help_panel=SHAPE_PANEL),
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--every-combination",
            help="Measure all combinations. Otherwise a shape departs from the first value of each option in one "
            "option only (and in its length).",
            show_default="off",
            rich_help_panel=SHAPE_PANEL,
        ),
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.", rich_help_panel=SHAPE_PANEL)] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto is CUDA if present.")] = "auto",
    seconds: Annotated[
        float, typer.Option(min=0.0, help="About how long one shape is measured, compiling not counted.")
    ] = 1.5,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of PyTorch's random numbers.")] = 0,
    json: options.Json = None,
    plot: options.Plot = None,
    debug: options.Debug = False,
) -> None:
    """Time prefill attention: SDPA, FlexAttention and dma_mxfp on the same inputs, quantisation counted.

    Medians of calls in turns. The error is against fp64 on sampled rows. The JSON file is written after every shape, so
    that an interruption keeps what there is. Exit code 1 if no implementation ran on some shape, 2 for invalid input.
    The default takes several minutes on an H200; --length, --attn and --seconds shorten it.
    """
    with console.user_errors(debug):
        check_plot(plot)
        for path in (json, plot):
            prepare_output(path)
        if dtype not in DTYPES:
            raise UserError(f"--dtype: expected {' or '.join(DTYPES)}, got {dtype!r}")
        with console.starting():
            import torch

            from dma_eval.devices import parse_device
            from dma_eval.speed import default_names, measure, parse_implementations
            from dma_eval.speed_report import failures, plot_prefill, tables
            from dma_eval.speed_results import PrefillReport, report_writer
            from dma_eval.timing import look_at

        where = parse_device(device)
        implementations = parse_implementations(default_names() if attn is None else attn)
        lengths = length or (LENGTHS if where.type == "cuda" else CPU_LENGTHS)
        shapes = make_shapes(
            lengths, head_dim or HEAD_DIMS, heads or HEADS, mask or MASKS, batch, every_combination=every
        )
        torch.manual_seed(seed)
        with console.working("Looking at the device"):
            facts = look_at(where)

        def announce(shape: Shape) -> None:
            console.err.print(f"[dim]{shape.length:>7,} tokens, {shape.family}[/]", highlight=False)

        write = report_writer(PrefillReport, json, command=console.command_line(), seed=seed, dtype=dtype, device=facts)
        results = measure(
            shapes,
            implementations,
            facts,
            where,
            _dtype(dtype),
            seconds=seconds,
            on_shape=announce,
            on_results=lambda so_far: write(results=so_far),
        )
        for table in tables(results):
            console.print_table(table)
        for line in failures(results):
            console.print_warning(line)
        if plot is not None:
            plot_prefill(results, f"Prefill attention on {facts.name}, {dtype}", plot)
        for path in (json, plot):
            if path is not None:
                console.print_line(f"Wrote {escape(str(path))}")
    if any(all(r.failure is not None for r in results if r.shape == shape) for shape in shapes):
        raise typer.Exit(console.BACKEND_FAILED)


def make_shapes(
    lengths: list[int], head_dims: list[int], heads: list[str], masks: list[str], batch: int, *, every_combination: bool
) -> list[Shape]:
    """Return the shapes to measure, longest last within each family.

    Raises:
        UserError: A value cannot be; the message names the option.
    """
    from dma_eval.speed_results import Shape

    for name, values in (("--length", lengths), ("--head-dim", head_dims)):
        for value in values:
            if value < 1:
                raise UserError(f"{name}: expected at least 1, got {value}")
    for mask in masks:
        if mask not in MASKS:
            raise UserError(f"--mask: expected {' or '.join(MASKS)}, got {mask!r}")
    pairs = [heads_of(value) for value in heads]
    families = list(dict.fromkeys(itertools.product(head_dims, pairs, masks)))
    if not every_combination:
        base = families[0]
        families = [f for f in families if sum(a != b for a, b in zip(f, base, strict=True)) <= 1]
    return [
        Shape(
            length=length,
            head_dim=head_dim,
            query_heads=query_heads,
            kv_heads=kv_heads,
            is_causal=mask == "causal",
            batch=batch,
        )
        for head_dim, (query_heads, kv_heads), mask in families
        for length in sorted(set(lengths))
    ]


def heads_of(value: str) -> tuple[int, int]:
    """Return the query and kv heads of a value of ``--heads``."""
    query, _, kv = value.partition("/")
    if not (query.isdecimal() and kv.isdecimal() and int(kv) > 0 and int(query) > 0 and int(query) % int(kv) == 0):
        raise UserError(f"--heads: expected QUERY/KV with KV dividing QUERY, such as 32/8, got {value!r}")
    return int(query), int(kv)


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype
