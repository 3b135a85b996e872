"""Time one step of decoding: SDPA, other packages on 16-bit and FP8 caches, and dma_mxfp on packed ones.

    python benchmarks/decode.py --json decode.json
    python benchmarks/decode.py --cache sdpa fa3:fp8 vllm:fp8 dma_mxfp:balanced+int4 --size 1x131072 8x32768
    python benchmarks/decode.py --device cpu --size 2x300 --heads 4/2 --head-dim 64

Times are medians of interleaved steps, called from Python and, on a CUDA device, replayed as CUDA graphs. A step of
dma_mxfp stores the new key and attends. Exit code 1 if nothing ran on some shape, 2 for invalid input.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from dma_eval import console
from dma_eval.bench.attention import ROOM, filled_storage
from dma_eval.bench.results import Shape, finish, record
from dma_eval.bench.timing import FAILURES, Run, look, stored_bytes, time_interleaved
from dma_eval.errors import UserError, one_line
from dma_eval.load.backends import DEFAULT_PRESET, Backend
from dma_eval.load.baselines import quantized_cache
from dma_eval.names import DMA, FORMAT_SUFFIXES, PEER_SUFFIXES
from dma_eval.show.pages import Columns, Table, make_table, of, share
from dma_kernels.cache.api import cached_attention
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.numerics.formats import TILE
from kernel_bench.command import count, make_parser, parse_compared, parse_heads, run
from kernel_bench.peers import STEPS, sdpa
from kernel_bench.results import DecodeReport, DecodeResult
from kernel_bench.timing import captured, copy_bandwidth
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.utils import is_optimum_quanto_available

SIZES, CPU_SIZES = ["1x4096", "1x32768", "1x131072", "8x4096", "8x32768", "64x4096"], ["1x4096"]
PREALLOCATED = ("sdpa", "sdpa:flash")
"""SDPA on preallocated keys and values: the lower bound of a 16-bit cache."""
DYNAMIC = "sdpa:dynamic"
"""SDPA after Transformers' ``DynamicCache`` concatenates the old keys and the new one."""
QUANTIZED = tuple(f"sdpa{suffix}" for suffix in PEER_SUFFIXES)
"""SDPA after Transformers' ``QuantizedCache``, by the suffixes of :data:`dma_eval.load.baselines.QUANTIZED`. Each token
dequantizes the whole cache. HQQ and quanto also quantize it again at every 128th token, which is not timed."""
PEERS = (*PREALLOCATED, DYNAMIC, *STEPS, *QUANTIZED)


@dataclass(frozen=True)
class Step:
    """A step that is timed."""

    run: Run
    cache_bytes: int  # that the cache takes
    read_bytes: int  # stored keys and values that the step attends to, each counted once


def prepare(backend: Backend, shape: Shape, device: torch.device, dtype: torch.dtype) -> Step:
    """Return the step that is timed. A packed cache stores the new key and value, and attends to all."""

    def random(heads: int, tokens: int) -> Tensor:
        return torch.randn(shape.batch, heads, tokens, shape.head_dim, device=device, dtype=dtype)

    query, new, new_value = (random(heads, 1) for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads))
    if backend.config is not None:
        storage, on = filled_storage(backend.config, shape, device, dtype), backend.config.backend
        step = partial(cached_attention, query, new, new_value, storage, backend=on)
        return Step(step, storage.nbytes, read_bytes(storage, shape.length + 1))
    key, value = (random(shape.kv_heads, shape.length) for _ in range(2))
    attend = partial(F.scaled_dot_product_attention, query, enable_gqa=True)
    if backend.label in STEPS:
        run, stored = STEPS[backend.label](query, key, value)
        return Step(run, stored, stored)
    if backend.label in QUANTIZED:
        cache = quantized_cache(LlamaConfig(num_hidden_layers=1), backend.label.removeprefix("sdpa"))
        # The last token is appended separately, so that it is not quantized yet, as in most steps.
        for part in (slice(-1), slice(-1, None)):
            cache.update(key[:, :, part], value[:, :, part], 0)
        layer = cache.layers[0]
        # Every run appends to the same keys: cuDNN prepares each new length on the host, which takes much longer.
        stored = stored_bytes(vars(layer))
        return Step(lambda: attend(*copy(layer).update(new, new_value)), stored, stored)
    stored = key.nbytes + value.nbytes
    if backend.label == DYNAMIC:
        return Step(lambda: attend(torch.cat((key, new), 2), torch.cat((value, new_value), 2)), stored, stored)
    return Step(sdpa(backend.label, query, key, value), stored, stored)


def read_bytes(storage: LayerStorage, keys: int) -> int:
    """Return the stored bytes that the queries of the last of ``keys`` keys attend to, in all rows.

    They are the quantized tiles between sink and band, and the 16-bit keys and values of the others.
    """
    own = (keys - 1) // TILE
    sink = min(storage.sink_len, keys)
    band = max(sink, (own - storage.diagonal_tiles) * TILE)  # its first position
    layout, itemsize = storage.page_layout, storage.key_residual.itemsize
    unquantized = (sink + keys - band) * (layout.head_dim + layout.value_dim) * itemsize
    return len(storage.lengths) * storage.kv_pages.shape[1] * ((band - sink) // TILE * layout.nbytes + unquantized)


def default_names() -> list[str]:
    """Everything that is compared by default and is installed; the first is what others are compared with."""
    quantized = QUANTIZED[:1] if is_optimum_quanto_available() else ()
    return [*PREALLOCATED, DYNAMIC, *quantized, *(f"{DMA}:{DEFAULT_PRESET}{suffix}" for suffix in FORMAT_SUFFIXES)]


def measure_shape(
    shape: Shape, implementations: Sequence[Backend], device: torch.device, dtype: torch.dtype, *, seconds: float
) -> list[DecodeResult]:
    """Time a step of all implementations on one shape. ``speedup`` is relative to the first.

    The rounds take about ``seconds``, without compilation. ``dtype`` is that of queries and of 16-bit caches.
    """
    console.print_note(str(shape))
    found: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    for each in implementations:
        try:
            step = prepare(each, shape, device, dtype)
            step.run()  # compiles
        except FAILURES as error:
            found[each.label] = {"failure": one_line(error)}
            continue
        runs[each.label] = step.run
        ratio = step.cache_bytes / shape.cache_bytes(dtype.itemsize)
        found[each.label] = {"cache_bytes": step.cache_bytes, "bytes_ratio": ratio, "read_bytes": step.read_bytes}
    replays, refusals = captured(runs, device)
    # Half the rounds each: a packed cache has spare room for ROOM tokens only.
    limit = min(100, ROOM // 2 - 8)
    plain = time_interleaved(runs, device, seconds=seconds / 2, max_repeats=limit)
    graphs = time_interleaved(replays, device, seconds=seconds / 2, max_repeats=limit) if replays else {}
    best = {label: graphs.get(label, timing).median for label, timing in plain.items()}
    first = best.get(implementations[0].label)
    for label, milliseconds in best.items():
        found[label] |= {
            "milliseconds": plain[label].median,
            "graph_milliseconds": graphs[label].median if label in graphs else None,
            "graph_failure": refusals.get(label),
            "repeats": plain[label].repeats,
            "bytes_per_second": 1e3 * found[label]["read_bytes"] / milliseconds,
            "speedup": first and first / milliseconds,
        }
    return [
        DecodeResult(shape=shape, label=each.label, config=each.info["config"], **found[each.label])
        for each in implementations
    ]


def tables(results: Sequence[DecodeResult], copy_bytes_per_second: float | None) -> list[Table]:
    """Return a table for each family of shapes, with shares of the device's copy bandwidth if it was measured."""
    columns: Columns = {
        "cache": lambda r: r.label,
        "batch": lambda r: str(r.shape.batch),
        "keys": lambda r: f"{r.shape.length:,}",
        "us": of("milliseconds", ".1f", factor=1e3),
        "as graph": of("graph_milliseconds", ".1f", factor=1e3),
        "GB/s": of("bytes_per_second", ",.1f", factor=1e-9),
        "of copy": lambda r: share(
            r.bytes_per_second / copy_bytes_per_second if r.bytes_per_second and copy_bytes_per_second else None, ".0f"
        ),
        "of 16 bit": of("bytes_ratio", ".3f"),
        "speed": of("speedup", ".2f", "x"),
    }
    families = dict.fromkeys(result.shape.family for result in results)
    return [make_table(columns, [r for r in results if r.shape.family == family], family) for family in families]


def parse_size(value: str) -> tuple[int, int]:
    """Return sequences and keys of each of ``BATCHxKEYS``, or raise a ``UserError``."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", value)
    if found is None:
        raise UserError(f"--size: expected BATCHxKEYS, such as 8x32768, got {value!r}")
    return int(found[1]), int(found[2])


def shapes_of(args: argparse.Namespace, device: torch.device) -> list[Shape]:
    """Return all combinations of heads, head dimensions and sizes."""
    heads = [parse_heads(value, "--heads") for value in args.heads]
    sizes = [parse_size(value) for value in args.size or (SIZES if device.type == "cuda" else CPU_SIZES)]
    return [
        Shape(length=length, batch=batch, head_dim=head_dim, query_heads=query_heads, kv_heads=kv_heads)
        for (query_heads, kv_heads), head_dim, (batch, length) in product(heads, args.head_dim, sizes)
    ]


def make_options() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", seconds=0.5)
    parser.add_argument(
        "-c", "--cache", nargs="+", default=[], metavar="NAME", help="what to compare, the reference first; default: "
        f"all that are installed except fa3 and vllm. Peers: {', '.join(PEERS)}. This package: dma_mxfp:PRESET+CACHE, "
        "dma_mxfp:FILE.toml+CACHE",
    )  # fmt: skip
    parser.add_argument("--size", nargs="+", default=[], metavar="BATCHxKEYS", help="sequences and keys of each")
    parser.add_argument("--heads", nargs="+", default=["32/8"], metavar="QUERY/KV")
    parser.add_argument("--head-dim", nargs="+", type=count, default=[128])
    return parser


def main(args: argparse.Namespace) -> int:
    device, dtype, facts = look(args)
    backends = parse_compared(args.cache or default_names(), "--cache", PEERS, caches=True)
    shapes = shapes_of(args, device)
    found = (measure_shape(shape, backends, device, dtype, seconds=args.seconds) for shape in shapes)
    copied = copy_bandwidth(device) if device.type == "cuda" else None
    report = DecodeReport(**facts, copy_bytes_per_second=copied, results=[])
    record(args.json, report, report.results, chain.from_iterable(found))
    return finish(args.json, report, "", tables(report.results, copied), report.results)


if __name__ == "__main__":
    run(main, make_options())
