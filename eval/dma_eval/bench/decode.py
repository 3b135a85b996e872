"""Time a decoding step: SDPA on preallocated and on concatenated keys, and packed caches."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from dma_kernels.cache.api import append, cached_attention
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.numerics.formats import TILE
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.utils import is_optimum_quanto_available

from dma_eval import console
from dma_eval.errors import UserError, one_line
from dma_eval.load.backends import DEFAULT_PRESET, Backend, parse_compared
from dma_eval.load.baselines import quantized_cache
from dma_eval.names import DECODE_PEERS, DMA, FORMAT_SUFFIXES, PEER_SUFFIXES
from dma_hf import DMAConfig

from .peers import FLASH_3, flash_attention_3_step, sdpa
from .results import DecodeResult, DecodeShape
from .timing import FAILURES, Run, captured, stored_bytes, time_interleaved

PREALLOCATED = ("sdpa", "sdpa:flash")
"""SDPA on preallocated keys and values: the lower bound of a 16-bit cache."""
DYNAMIC = "sdpa:dynamic"
"""SDPA after Transformers' ``DynamicCache`` concatenates the old keys and the new one."""
QUANTIZED = tuple(f"sdpa{suffix}" for suffix in PEER_SUFFIXES)
"""SDPA after Transformers' ``QuantizedCache``, by the suffixes of :data:`dma_eval.load.baselines.QUANTIZED`. Each token
dequantizes the whole cache. HQQ and quanto also quantize it again at every 128th token, which is not timed."""
ROOM = 256
"""Spare tokens for the runs, each of which appends one. They count as memory of a packed cache."""
FILLED_AT_ONCE = 8192


@dataclass(frozen=True)
class Step:
    """A step that is timed."""

    run: Run
    cache_bytes: int  # that the cache takes
    read_bytes: int  # stored keys and values that the step attends to, each counted once


def prepare(backend: Backend, shape: DecodeShape, device: torch.device, dtype: torch.dtype) -> Step:
    """Return the step that is timed.

    A packed cache stores the new key and value, and attends to all.

    Raises:
        ImportError: Its package is not installed; the message names it.
    """

    def random(heads: int, tokens: int) -> Tensor:
        return torch.randn(shape.batch, heads, tokens, shape.head_dim, device=device, dtype=dtype)

    query, new, new_value = (random(heads, 1) for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads))
    if backend.config is not None:
        storage, on = filled_storage(backend.config, shape, device, dtype), backend.config.backend
        step = partial(cached_attention, query, new, new_value, storage, backend=on)
        return Step(step, storage.nbytes, read_bytes(storage, shape.length + 1))
    key, value = (random(shape.kv_heads, shape.length) for _ in range(2))
    attend = partial(F.scaled_dot_product_attention, query, enable_gqa=True)
    if backend.label in FLASH_3:
        run, stored = flash_attention_3_step(backend.label, query, key, value)
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


def filled_storage(config: DMAConfig, shape: DecodeShape, device: torch.device, dtype: torch.dtype) -> LayerStorage:
    """Return the cache of a layer that holds ``shape.length`` random keys and values, and has room for more."""
    assert config.cache is not None
    storage = LayerStorage.allocate(
        config.cache,
        diagonal_tiles=config.diagonal_tiles,
        sink_tiles=config.sink_tiles,
        batch=shape.batch,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.head_dim,
        dtype=dtype,
        device=device,
        tiles=-(-(shape.length + ROOM) // TILE),
    )
    for start in range(0, shape.length, FILLED_AT_ONCE):
        tokens = min(FILLED_AT_ONCE, shape.length - start)
        sizes = (2, shape.batch, shape.kv_heads, tokens, shape.head_dim)
        append(storage, *torch.randn(sizes, device=device, dtype=dtype))
    return storage


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


def parse_implementations(names: Sequence[str]) -> list[Backend]:
    """Resolve names as given on the command line; see :func:`dma_eval.load.backends.parse_compared`.

    Raises:
        UserError: A configuration has no cache.
    """
    backends = parse_compared(names, "--cache", DECODE_PEERS)
    for backend in backends:
        if backend.config is not None and backend.config.cache is None:
            raise UserError(f"--cache: {backend.label!r} has no cache; add {' or '.join(FORMAT_SUFFIXES)}")
    return backends


def measure_shape(
    shape: DecodeShape, implementations: Sequence[Backend], device: torch.device, dtype: torch.dtype, *, seconds: float
) -> list[DecodeResult]:
    """Time a step of all implementations on one shape. ``speedup`` is relative to the first.

    The rounds take about ``seconds``, without compilation. ``dtype`` is that of queries and of 16-bit caches.
    """
    console.print_note(str(shape))
    results: dict[str, DecodeResult] = {}
    runs: dict[str, Run] = {}
    for each in implementations:
        result = DecodeResult(shape=shape, label=each.label, config=each.info["config"])
        try:
            step = prepare(each, shape, device, dtype)
            step.run()  # compiles
        except FAILURES as error:
            results[each.label] = replace(result, failure=one_line(error))
            continue
        runs[each.label] = step.run
        results[each.label] = replace(
            result,
            cache_bytes=step.cache_bytes,
            bytes_ratio=step.cache_bytes / shape.cache_bytes(dtype.itemsize),
            read_bytes=step.read_bytes,
        )
    replays, refusals = captured(runs, device)
    # Half the rounds each: a packed cache has spare room for ROOM tokens only.
    limit = min(100, ROOM // 2 - 8)
    plain = time_interleaved(runs, device, seconds=seconds / 2, max_repeats=limit)
    graphs = time_interleaved(replays, device, seconds=seconds / 2, max_repeats=limit) if replays else {}
    best = {label: graphs.get(label, timing).median for label, timing in plain.items()}
    first = best.get(implementations[0].label)
    for label, milliseconds in best.items():
        results[label] = replace(
            results[label],
            milliseconds=plain[label].median,
            graph_milliseconds=graphs[label].median if label in graphs else None,
            graph_failure=refusals.get(label),
            repeats=plain[label].repeats,
            bytes_per_second=1e3 * (results[label].read_bytes or 0) / milliseconds,
            speedup=None if first is None else first / milliseconds,
        )
    return list(results.values())
