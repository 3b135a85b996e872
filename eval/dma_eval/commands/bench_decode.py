"""``dma-hf bench decode``: the speed of one decoding step, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dma_eval import console
from dma_eval.commands import options
from dma_eval.commands.benching import add_bench, finish, heads_of, look, positive
from dma_eval.errors import UserError
from dma_eval.names import check_names

if TYPE_CHECKING:
    from dma_eval.bench.results import DecodeResult, DecodeShape

SIZES = ["1x4096", "1x32768", "1x131072", "8x4096", "8x32768", "64x4096"]
CPU_SIZES = ["1x300"]
HEADS = ["32/8", "32/32", "9/3"]
HEAD_DIMS = [128, 64]
EXAMPLES = """
dma-hf bench decode --json decode.json
dma-hf bench decode --size 1x131072 8x32768 --heads 32/8 --head-dim 128
dma-hf bench decode --cache sdpa dma_mxfp:kv4 dma_mxfp:my.toml --size 1x32768
dma-hf bench decode --device cpu --size 2x300 --heads 4/2 --head-dim 64
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    help = (
        "What to compare; the first is the reference. sdpa (PyTorch's choice, on preallocated keys and values), "
        "sdpa:flash, sdpa:dynamic (behind the concatenation of a DynamicCache), fa3 and fa3:fp8 (FlashAttention-3, the "
        "package fa3-fwd, on a 16-bit and on an E4M3 cache), sdpa:quanto, sdpa:hqq and sdpa:fp8 (behind a "
        "QuantizedCache of that backend), dma_mxfp:PRESET, dma_mxfp:FILE.toml."
    )
    shown = "sdpa sdpa:flash sdpa:dynamic sdpa:quanto dma_mxfp:kv8 dma_mxfp:kv4"
    options.add(parser, "--cache", "-c", several=True, shown=shown, help=help)
    group = parser.add_argument_group("shapes")
    shown = f"{' '.join(SIZES)}; on a CPU {' '.join(CPU_SIZES)}"
    options.add(group, "--size", metavar="BATCHxKEYS", several=True, shown=shown, help="Sequences and keys of each.")
    options.add(group, "--heads", metavar="QUERY/KV", several=True, default=HEADS, help="Query and kv heads.")
    options.add(group, "--head-dim", type=positive, several=True, default=HEAD_DIMS, help="Head dimensions.")
    add_bench(parser, seconds=0.5, files=("json",))


def run(args: argparse.Namespace) -> int:
    """Time one step of decoding: SDPA on 16-bit caches and dma_mxfp on packed ones.

    Medians of steps in turns, called from Python and, on a CUDA device, replayed as CUDA graphs. A step of dma_mxfp
    stores the new key and attends. The JSON file is written after every shape, so that an interruption keeps what there
    is. Exit code 1 if no implementation ran on some shape, 2 for invalid input.
    """
    options.prepare_files(args)
    check_names(args.cache, "--cache")
    with console.starting():
        from dma_eval.bench.decode import default_names, measure_shape, parse_implementations
        from dma_eval.bench.results import DecodeReport, report_writer
        from dma_eval.bench.shown import decode_tables, failures

    implementations = parse_implementations(args.cache or default_names())
    device, dtype, facts = look(args)
    shapes = make_shapes(args.size or (SIZES if device.type == "cuda" else CPU_SIZES), args.heads, args.head_dim)
    fixed = {"command": console.command_line(), "seed": args.seed, "dtype": args.dtype, "device": facts}
    write = report_writer(DecodeReport, args.json, **fixed)
    results: list[DecodeResult] = []
    for shape in shapes:
        console.print_note(str(shape))
        results += measure_shape(shape, implementations, device, dtype, seconds=args.seconds)
        write(results=results)
    return finish(args, decode_tables(results), failures(results, lambda r: r.shape), results, lambda r: r.shape)


def make_shapes(sizes: Sequence[str], heads: Sequence[str], head_dims: Sequence[int]) -> list[DecodeShape]:
    """Return the shapes to measure: all sizes with the first heads and head dimension, and with one other of either.

    Raises:
        UserError: A value cannot be; the message names the option.
    """
    from dma_eval.bench.results import DecodeShape

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
