"""``dma-hf bench decode``: the speed of one decoding step, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from dma_eval import console, options
from dma_eval.commands.bench_prefill import DTYPES, SHAPE_PANEL, heads_of
from dma_eval.commands.ppl import prepare_output
from dma_eval.errors import UserError

if TYPE_CHECKING:
    from dma_eval.decode_results import DecodeResult, DecodeShape

SIZES = ["1x4096", "1x32768", "1x131072", "8x4096", "8x32768", "64x4096"]
CPU_SIZES = ["1x300"]
HEADS = ["32/8", "32/32", "9/3"]
HEAD_DIMS = [128, 64]
EPILOG = """
[bold]Examples[/]

dma-hf bench decode --json decode.json

dma-hf bench decode --size 1x131072 8x32768 --heads 32/8 --head-dim 128

dma-hf bench decode --cache sdpa dma_mxfp:kv4 dma_mxfp:my.toml --size 1x32768

dma-hf bench decode --device cpu --size 2x300 --heads 4/2 --head-dim 64
"""


def decode(
    cache: Annotated[
        list[str] | None,
        typer.Option(
            "--cache",
            "-c",
            metavar="CACHE...",
            help="What to compare; the first is the reference. sdpa (PyTorch's choice, on preallocated keys and "
            "values), sdpa:flash, sdpa:dynamic (behind the concatenation of a DynamicCache), sdpa:quanto, sdpa:hqq and "
            "sdpa:fp8 (behind a QuantizedCache of that backend), dma_mxfp:PRESET, dma_mxfp:FILE.toml.",
            show_default="sdpa sdpa:flash sdpa:dynamic sdpa:quanto dma_mxfp:kv8 dma_mxfp:kv4",
        ),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BATCHxKEYS...",
            help="Sequences and keys of each.",
            show_default=f"{' '.join(SIZES)}; on a CPU {' '.join(CPU_SIZES)}",
            rich_help_panel=SHAPE_PANEL,
        ),
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(
            metavar="QUERY/KV...",
            help="Query and kv heads.",
            show_default=" ".join(HEADS),
            rich_help_panel=SHAPE_PANEL,
        ),
    ] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="Head dimensions.", show_default="128 64", rich_help_panel=SHAPE_PANEL)
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto is CUDA if present.")] = "auto",
    seconds: Annotated[
        float, typer.Option(min=0.0, help="About how long one shape is measured, compiling not counted.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of PyTorch's random numbers.")] = 0,
    json: options.Json = None,
    debug: options.Debug = False,
) -> None:
    """Time one step of decoding: SDPA on 16-bit caches and dma_mxfp on packed ones.

    Medians of steps in turns, called from Python and, on a CUDA device, replayed as CUDA graphs. A step of dma_mxfp
    stores the new key and attends. The JSON file is written after every shape, so that an interruption keeps what there
    is. Exit code 1 if no implementation ran on some shape, 2 for invalid input.
    """
    with console.user_errors(debug):
        prepare_output(json)
        if dtype not in DTYPES:
            raise UserError(f"--dtype: expected {' or '.join(DTYPES)}, got {dtype!r}")
        with console.starting():
            import torch

            from dma_eval.decode_results import DecodeReport
            from dma_eval.decode_speed import default_names, measure, parse_implementations
            from dma_eval.devices import parse_device
            from dma_eval.speed_results import report_writer
            from dma_eval.timing import look_at

        where = parse_device(device)
        implementations = parse_implementations(default_names() if cache is None else cache)
        sizes = size or (SIZES if where.type == "cuda" else CPU_SIZES)
        shapes = make_shapes(sizes, heads or HEADS, head_dim or HEAD_DIMS)
        torch.manual_seed(seed)
        with console.working("Looking at the device"):
            facts = look_at(where)

        def announce(shape: DecodeShape) -> None:
            console.err.print(f"[dim]{shape.batch:>3} x {shape.length:>7,} keys, {shape.family}[/]", highlight=False)

        write = report_writer(DecodeReport, json, command=console.command_line(), seed=seed, dtype=dtype, device=facts)
        results = measure(
            shapes,
            implementations,
            where,
            getattr(torch, dtype),
            seconds=seconds,
            on_shape=announce,
            on_results=lambda so_far: write(results=so_far),
        )
        for table in tables(results):
            console.print_table(table)
        for warning in warnings(results):
            console.print_warning(warning)
        if json is not None:
            console.print_line(f"Wrote {escape(str(json))}")
    if any(all(r.failure is not None for r in results if r.shape == shape) for shape in shapes):
        raise typer.Exit(console.BACKEND_FAILED)


def make_shapes(sizes: list[str], heads: list[str], head_dims: list[int]) -> list[DecodeShape]:
    """Return the shapes to measure: all sizes with the first heads and head dimension, and with one other of either.

    Raises:
        UserError: A value cannot be; the message names the option.
    """
    from dma_eval.decode_results import DecodeShape

    for value in head_dims:
        if value < 1:
            raise UserError(f"--head-dim: expected at least 1, got {value}")
    pairs = [heads_of(value) for value in heads]
    families = [(pairs[0], dim) for dim in head_dims] + [(pair, head_dims[0]) for pair in pairs[1:]]
    return [
        DecodeShape(length=length, batch=batch, head_dim=dim, query_heads=query_heads, kv_heads=kv_heads)
        for (query_heads, kv_heads), dim in dict.fromkeys(families)
        for batch, length in map(_size, sizes)
    ]


def _size(value: str) -> tuple[int, int]:
    batch, _, length = value.partition("x")
    if not (batch.isdecimal() and length.isdecimal() and int(batch) > 0 and int(length) > 0):
        raise UserError(f"--size: expected BATCHxKEYS, such as 8x32768, got {value!r}")
    return int(batch), int(length)


def warnings(results: list[DecodeResult]) -> list[str]:
    """Return what did not run and why, once for all shapes that share the reason."""
    failed: dict[tuple[str, str], list[DecodeShape]] = {}
    for result in results:
        if result.failure is not None:
            failed.setdefault((result.label, result.failure), []).append(result.shape)
    found = []
    for (label, failure), shapes in failed.items():
        first = f"{shapes[0].batch} x {shapes[0].length:,} keys, {shapes[0].family}"
        more = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
        found.append(f"{label} did not run: {failure} ({first}{more})")
    return found


def tables(results: list[DecodeResult]) -> list[Table]:
    """Return a table for each family of shapes."""
    made: dict[str, Table] = {}
    for result in results:
        family = result.shape.family
        if family not in made:
            table = Table(title=family, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
            for header in ("batch", "keys", "cache", "us", "as graph", "TB/s", "of 16 bit", "speed"):
                table.add_column(header, justify="left" if header == "cache" else "right")
            made[family] = table
        made[family].add_row(
            str(result.shape.batch),
            f"{result.shape.length:,}",
            escape(result.label),
            _number(result.milliseconds, 1e3, ".1f"),
            _number(result.graph_milliseconds, 1e3, ".1f"),
            _number(result.bytes_per_second, 1e-12, ".2f"),
            _number(result.bytes_ratio, 1.0, ".3f"),
            _number(result.speedup, 1.0, ".2f"),
            style="red" if result.failure else "",
        )
    return list(made.values())


def _number(value: float | None, factor: float, form: str) -> str:
    return "–" if value is None else format(value * factor, form)
