"""``dma-hf bench prefill``: the speed of prefill attention, side by side."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dma_eval import console
from dma_eval.commands import options
from dma_eval.commands.benching import add_bench, finish, heads_of, look, positive
from dma_eval.errors import UserError
from dma_eval.names import check_names

if TYPE_CHECKING:
    from dma_eval.bench.results import PrefillResult, PrefillShape

LENGTHS = [1024 << i for i in range(8)]
CPU_LENGTHS = [256, 1024]
HEAD_DIMS = [128, 64]
HEADS = ["32/8", "32/32"]
MASKS = ["causal", "full"]
EXAMPLES = """
dma-hf bench prefill --json prefill.json --plot prefill.png
dma-hf bench prefill --length 2048 8192 32768 --head-dim 128 --heads 32/8 --mask causal
dma-hf bench prefill --attn sdpa dma_mxfp:balanced dma_mxfp:my.toml --length 16384
dma-hf bench prefill --attn sdpa fa3 fa3:fp8 dma_mxfp:balanced --shape 1x8192:32/8:128 1x16384:32/8:64:full
dma-hf bench prefill --device cpu --length 256 --heads 4/2
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    help = (
        "What to compare; the first is the reference. sdpa (PyTorch's choice), sdpa:flash, sdpa:cudnn, flex "
        "(FlexAttention, compiled), fa3 and fa3:fp8 (FlashAttention-3, the package fa3-fwd; quantising is counted), "
        "sage (SageAttention, the package sageattention), dma_mxfp:PRESET, dma_mxfp:FILE.toml."
    )
    shown = "all, with every preset"
    options.add(parser, "--attn", "-a", metavar="IMPLEMENTATION", several=True, shown=shown, help=help)
    group = parser.add_argument_group("shapes")
    shown = "1024 to 131072; on a CPU 256 and 1024"
    options.add(group, "--length", type=positive, several=True, help="Tokens.", shown=shown)
    options.add(group, "--head-dim", type=positive, several=True, default=HEAD_DIMS, help="Head dimensions.")
    options.add(group, "--heads", metavar="QUERY/KV", several=True, default=HEADS, help="Query and kv heads.")
    options.add(group, "--mask", choices=MASKS, several=True, default=MASKS, help="Masks.")
    help = (
        "Measure all combinations. Otherwise a shape departs from the first value of each option in one option only "
        "(and in its length)."
    )
    options.add(group, "--every-combination", action="store_true", help=help)
    options.add(group, "--batch", type=positive, default=1, help="Sequences.")
    help = "Shapes one by one, in place of all options above; for instance 8x4096:32/8:128 or 1x16384:32/8:128:full."
    options.add(group, "--shape", metavar="BATCHxTOKENS:QUERY/KV:HEAD_DIM[:full]", several=True, help=help)
    add_bench(parser, seconds=1.5, files=("json", "plot"))


def run(args: argparse.Namespace) -> int:
    """Time prefill attention: SDPA, other packages and dma_mxfp on the same inputs, quantisation counted.

    Medians of calls in turns. The error is against fp64 on sampled rows: of normal inputs, and of such with two key
    channels that stand out. The JSON file is written after every shape, so
    that an interruption keeps what there is. Exit code 1 if no implementation ran on some shape, 2 for invalid input.
    The default takes several minutes on an H200; --length, --attn and --seconds shorten it.
    """
    options.prepare_files(args)
    check_names(args.attn)
    with console.starting():
        from dma_eval.bench.prefill import default_names, measure_shape, parse_implementations
        from dma_eval.bench.results import PrefillReport, report_writer
        from dma_eval.bench.shown import failures, plot_prefill, prefill_tables

    implementations = parse_implementations(args.attn or default_names())
    device, dtype, facts = look(args)
    lengths = args.length or (LENGTHS if device.type == "cuda" else CPU_LENGTHS)
    shapes = [shape_of(value) for value in args.shape or ()] or make_shapes(
        lengths, args.head_dim, args.heads, args.mask, args.batch, every_combination=args.every_combination
    )
    fixed = {"command": console.command_line(), "seed": args.seed, "dtype": args.dtype, "device": facts}
    write = report_writer(PrefillReport, args.json, **fixed)
    results: list[PrefillResult] = []
    for shape in shapes:
        console.print_note(str(shape))
        results += measure_shape(shape, implementations, facts, device, dtype, seconds=args.seconds)
        write(results=results)
    if args.plot is not None:
        plot_prefill(results, f"Prefill attention on {facts.name}, {args.dtype}", args.plot)
    return finish(args, prefill_tables(results), failures(results, lambda r: r.shape), results, lambda r: r.shape)


def make_shapes(
    lengths: Sequence[int],
    head_dims: Sequence[int],
    heads: Sequence[str],
    masks: Sequence[str],
    batch: int,
    *,
    every_combination: bool,
) -> list[PrefillShape]:
    """Return the shapes to measure, longest last within each family.

    Raises:
        UserError: Heads that cannot be.
    """
    from dma_eval.bench.results import PrefillShape

    pairs = [heads_of(value) for value in heads]
    families = list(dict.fromkeys(itertools.product(head_dims, pairs, masks)))
    if not every_combination:
        base = families[0]
        families = [f for f in families if sum(a != b for a, b in zip(f, base, strict=True)) <= 1]
    return [
        PrefillShape(
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


def shape_of(value: str) -> PrefillShape:
    """Return the shape that ``BATCHxTOKENS:QUERY/KV:HEAD_DIM[:full]`` names.

    Raises:
        UserError: It is not of this form.
    """
    from dma_eval.bench.results import PrefillShape

    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*):(\d+/\d+):([1-9]\d*)(:full)?", value)
    if found is None:
        raise UserError(
            f"--shape: expected BATCHxTOKENS:QUERY/KV:HEAD_DIM[:full], such as 8x4096:32/8:128, got {value!r}"
        )
    batch, length, heads, head_dim, full = found.groups()
    query_heads, kv_heads = heads_of(heads)
    return PrefillShape(
        length=int(length),
        head_dim=int(head_dim),
        query_heads=query_heads,
        kv_heads=kv_heads,
        is_causal=full is None,
        batch=int(batch),
    )
