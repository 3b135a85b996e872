"""Time prefill attention: SDPA, other packages and dma_mxfp, interleaved on the same inputs.

    python benchmarks/prefill.py --json prefill.json
    python benchmarks/prefill.py --attn sdpa fa3 fa3:fp8 dma_mxfp:balanced --shape 1x8192:32/8:128 1x16384:32/8:64:full
    python benchmarks/prefill.py --inputs HuggingFaceTB/SmolLM2-135M --data book.txt --length 8192 --layers 14
    python benchmarks/prefill.py --device cpu --shape 1x256:4/2:64 --attn sdpa dma_mxfp:balanced

Inputs are random normal numbers, or with --inputs those of a real model. Only real attention has tiles that a
skip_threshold can skip. Times are medians of interleaved calls. A CUDA device also
times isolated calls, at the clock that the power limit allows. Errors are relative to fp64 on sampled rows. Random
inputs are also measured with two outlier key channels. Exit code 1 if nothing ran on some shape, 2 for invalid input.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from dma_eval import console
from dma_eval.bench.results import finish, record
from dma_eval.bench.timing import FAILURES, look, time_interleaved
from dma_eval.errors import UserError, one_line
from dma_eval.load.backends import Backend
from dma_eval.names import DMA
from dma_eval.show.pages import MISSING, Columns, Table, make_table, number, of
from dma_kernels import attention, attention_with_lse
from kernel_bench.capture import model_inputs
from kernel_bench.command import count, make_parser, parse_compared, parse_heads, run
from kernel_bench.inputs import Inputs, exact_rows, random_inputs, with_outlying_channels
from kernel_bench.peers import CUDNN, PEERS, SDPA, Prepared
from kernel_bench.results import PrefillReport, PrefillResult, PrefillShape
from kernel_bench.timing import captured, extra_memory, time_isolated
from torch import Tensor

import dma_hf

SHAPES = [
    *(f"1x{1024 << i}:32/8:128" for i in range(8)),
    *("1x16384:32/8:64", "1x16384:32/32:128", "1x16384:32/8:128:full"),
]
CPU_SHAPES = ["1x256:4/2:64", "1x1024:4/2:64"]
SAMPLED_ROWS = 64
GRAPH_LIMIT = 2.0
"""Milliseconds. Longer calls hide their launches, and are not timed as CUDA graphs."""


def prepare(backend: Backend, inputs: Inputs) -> Prepared:
    """Return the call that is timed."""
    config = backend.config
    if config is None:
        return PEERS[backend.label](inputs)
    return Prepared(partial(attention, *inputs.tensors, config.recipe, **inputs.options, backend=config.backend))


def default_names(device: torch.device) -> list[str]:
    """Everything that a device runs without other packages; the first is what others are compared with."""
    names = [*SDPA, *(f"{DMA}:{preset}" for preset in dma_hf.PRESETS)]
    return [name for name in names if device.type == "cuda" or name != CUDNN]


def measure_shape(
    shape: PrefillShape, implementations: Sequence[Backend], device: torch.device, dtype: torch.dtype, *, seconds: float
) -> list[PrefillResult]:
    """Time all implementations on random inputs of one shape and dtype; see :func:`measure_layers`.

    Errors are measured a second time on inputs with outlier key channels.
    """
    try:
        inputs = random_inputs(shape, device, dtype)
        harder = with_outlying_channels(inputs)
    except RuntimeError as error:
        raise UserError(f"--shape: cannot make inputs of {shape}: {one_line(error)}") from error
    return measure_layers(shape, [inputs], implementations, seconds=seconds, harder=harder)


def measure_layers(
    shape: PrefillShape,
    layers: Sequence[Inputs],
    implementations: Sequence[Backend],
    *,
    seconds: float,
    harder: Inputs | None = None,
) -> list[PrefillResult]:
    """Time all implementations on the layers of one shape, and sum over the layers.

    ``speedup`` is relative to the first implementation. The interleaved rounds take about ``seconds``, without
    compilation, and then each isolated implementation as long again.
    """
    console.print_note(str(shape))
    device = layers[0].query.device
    rows = torch.randperm(shape.length)[:SAMPLED_ROWS].sort().values.to(device)
    exact = [exact_rows(inputs, rows) for inputs in layers]
    harder_exact = None if harder is None else exact_rows(harder, rows)

    def error(call: Prepared, expected: Tensor) -> float:
        return float((call.read(call.run())[:, :, rows].double() - expected).norm() / expected.norm())

    def examine(implementation: Backend) -> tuple[list[Prepared], dict[str, Any]]:
        """Return the calls, and what is measured of them besides times, by the names of the result's fields."""
        found: dict[str, Any] = {}
        if harder is not None and harder_exact is not None:
            found["error_with_outliers"] = error(prepare(implementation, harder), harder_exact)
        calls = [prepare(implementation, inputs) for inputs in layers]
        errors = [error(call, each) for call, each in zip(calls, exact, strict=True)]
        found |= {"error": sum(errors) / len(errors), "input_bytes": sum(x.nbytes for x in layers[0].tensors)}
        found["extra_bytes"] = extra_memory(calls[0].run, device)  # not the first of its kind, which compiles
        return calls, found | _skipped_shares(implementation, layers)

    prepared: dict[str, list[Prepared]] = {}
    found: dict[str, dict[str, Any]] = {}
    for each in implementations:
        try:
            prepared[each.label], found[each.label] = examine(each)
        except FAILURES as failure:
            found[each.label] = {"failure": one_line(failure)}
    times = _time_calls(prepared, device, seconds)
    first = times.get(implementations[0].label, {}).get("milliseconds")
    for label, timed in times.items():
        found[label] |= timed | {"tflops": len(layers) * shape.flops / timed["milliseconds"] / 1e9}
        found[label]["speedup"] = first and first / timed["milliseconds"]
    return [
        PrefillResult(shape=shape, label=each.label, config=each.info["config"], **found[each.label])
        for each in implementations
    ]


def _time_calls(prepared: dict[str, list[Prepared]], device: torch.device, seconds: float) -> dict[str, dict[str, Any]]:
    """Return what was timed of each implementation, by the names of the result's fields.

    Implementations are interleaved layer by layer. An isolated run is all layers, one after the other.
    """
    layers = max(map(len, prepared.values()), default=0)
    runs = {(label, layer): calls[layer].run for layer in range(layers) for label, calls in prepared.items()}
    timings = time_interleaved(runs, device, seconds=seconds)
    found: dict[str, dict[str, Any]] = {}
    for label in prepared:
        taken = [timings[label, layer] for layer in range(layers)]
        found[label] = {
            "milliseconds": sum(each.median for each in taken),
            "milliseconds_fast": sum(each.fast for each in taken),
            "milliseconds_slow": sum(each.slow for each in taken),
            "repeats": taken[0].repeats,
        }
    if device.type != "cuda":
        return found
    short = [label for label, calls in prepared.items() if found[label]["milliseconds"] < len(calls) * GRAPH_LIMIT]
    replays, refusals = captured({place: run for place, run in runs.items() if place[0] in short}, device)
    for (label, _), reason in refusals.items():
        found[label]["graph_failure"] = reason
    replays = {place: run for place, run in replays.items() if "graph_failure" not in found[place[0]]}
    graph_timings = time_interleaved(replays, device, seconds=seconds / 2)
    for label, times in found.items():
        places = [(label, layer) for layer in range(layers)]
        if places[0] in replays:
            times["graph_milliseconds"] = sum(graph_timings[place].median for place in places)
        chain = [replays.get(place, runs[place]) for place in places]
        times["sustained_milliseconds"] = time_isolated(
            chain, device, seconds=seconds, milliseconds=times["milliseconds"]
        )
    return found


def _skipped_shares(implementation: Backend, layers: Sequence[Inputs]) -> dict[str, Any]:
    """Return the share of low tiles that the recipe's threshold skips, over all layers."""
    config = implementation.config
    if config is None or config.recipe.skip_threshold is None or math.isinf(config.recipe.skip_threshold):
        return {}
    first = layers[0].query
    tile_counts = torch.zeros(first.shape[1], 2, dtype=torch.int64, device=first.device)
    for inputs in layers:
        options = inputs.options | {"backend": config.backend, "tile_counts": tile_counts}
        attention_with_lse(*inputs.tensors, config.recipe, **options)
    skipped, seen = tile_counts.sum(0).tolist()
    return {"skipped_share": skipped / max(seen, 1)}


def parse_shape(value: str) -> PrefillShape:
    """Return the shape that ``BATCHxTOKENS:QUERY/KV:HEAD_DIM[:full]`` names, or raise a ``UserError``."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*):(\d+/\d+):([1-9]\d*)(:full)?", value)
    if found is None:
        raise UserError(
            f"--shape: expected BATCHxTOKENS:QUERY/KV:HEAD_DIM[:full], such as 8x4096:32/8:128, got {value!r}"
        )
    query_heads, kv_heads = parse_heads(found[3], "--shape")
    return PrefillShape(
        length=int(found[2]),
        head_dim=int(found[4]),
        query_heads=query_heads,
        kv_heads=kv_heads,
        is_causal=found[5] is None,
        batch=int(found[1]),
    )


def tables(results: Sequence[PrefillResult]) -> list[Table]:
    """Return a table for each family of shapes."""
    columns: Columns = {
        "implementation": lambda r: r.label,
        "tokens": lambda r: f"{r.shape.length:,}",
        "ms": of("milliseconds", ".3f"),
        "as graph": of("graph_milliseconds", ".3f"),
        "isolated": of("sustained_milliseconds", ".3f"),
        "TFLOP/s": lambda r: number(r.tflops, ",.0f" if (r.tflops or 0) >= 10 else ".3f"),
        "speed": of("speedup", ".2f", "x"),
        "error": of("error", ".4f"),
        "key outliers": of("error_with_outliers", ".4f"),
        "skipped": of("skipped_share", ".1f", " %", factor=100.0),
        "extra memory": lambda r: MISSING if r.extra_bytes is None else f"{r.extra_bytes / r.input_bytes:.2f} of QKV",
    }
    families = dict.fromkeys(result.shape.family for result in results)
    return [make_table(columns, [r for r in results if r.shape.family == family], family) for family in families]


def make_options() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", seconds=1.5)
    parser.add_argument(
        "-a", "--attn", nargs="+", default=[], metavar="NAME", help="what to compare, the reference first; default: "
        f"all that need no other package. Peers: {', '.join(PEERS)}. This package: dma_mxfp:PRESET, dma_mxfp:FILE.toml",
    )  # fmt: skip
    parser.add_argument(
        "--shape", nargs="+", default=[], metavar="BATCHxTOKENS:QUERY/KV:HEAD_DIM[:full]", help="shapes of random "
        "inputs, causal unless they end in :full; default: 1,024 to 131,072 tokens and three others",
    )  # fmt: skip
    parser.add_argument("--inputs", metavar="MODEL", help="Hub name, folder or GGUF file of a model that reads --data")
    parser.add_argument("-d", "--data", metavar="FILE|DATASET", help="the text; each sequence is another window of it")
    parser.add_argument("--length", nargs="+", type=count, default=[], metavar="TOKENS", help="tokens of a window")
    parser.add_argument("--batch", type=count, default=1, help="windows of the text")
    parser.add_argument("--layers", type=count, help="time so many of the model's layers, evenly spaced; default: all")
    parser.add_argument("--yarn", type=float, help="extend the model's positions by this factor")
    return parser


def main(args: argparse.Namespace) -> int:
    device, dtype, facts = look(args)
    backends = parse_compared(args.attn or default_names(device), "--attn", tuple(PEERS), caches=False)
    if args.inputs is not None:
        found = (measure_layers(*each, backends, seconds=args.seconds) for each in model_inputs(args))
    else:
        shapes = [parse_shape(value) for value in args.shape or (SHAPES if device.type == "cuda" else CPU_SHAPES)]
        found = (measure_shape(shape, backends, device, dtype, seconds=args.seconds) for shape in shapes)
    report = PrefillReport(**facts, results=[])
    record(args.json, report, report.results, chain.from_iterable(found))
    title = f"Prefill attention on {report.device.name}, {args.dtype}"
    return finish(args.json, report, title, tables(report.results), report.results)


if __name__ == "__main__":
    run(main, make_options())
