"""Decode attention on the Triton backend: up to 16 queries against the packed tiles and the raw band of a cache.

Two launches: one attends (:mod:`.decode_kernel`), and one combines parts and stores new keys (:mod:`.decode_end`). How
many keys there are is read on the device, and grids depend on shapes and capacities alone, so a CUDA graph of a step
can be replayed while the cache fills.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ..numerics.formats import TILE, padded_channels
from ..numerics.geometry import LOG2_E
from ..runtime import chip, replay
from ..runtime.chip import processors, starts_early
from ..runtime.launch import Launcher, on_device
from ..runtime.reports import report
from ..runtime.tuning import select_decode_tiles
from .append import append_tokens, storage_kind, where_stored
from .codes import VALUE_GROUP, Record
from .decode_end import launch_end
from .decode_kernel import decode_kernel
from .decode_operands import COLUMNS
from .storage import LayerStorage

MAX_QUERIES = 16
"""Queries of a call; longer chunks are for the prefill kernel."""


def decode_attention(
    query: Tensor,
    storage: LayerStorage,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, ...]:
    """Attend causally to a cache whose last keys are those of the queries.

    Query ``i`` of ``T`` stands at the position ``lengths - T + i``.

    Args:
        query: bf16 or fp16 ``[B, Hq, T, D]``, ``T <= 16``, any strides, in the dtype of the cache.
        storage: The cache, on the device of ``query``.
        scale: Factor of the scores.
        window: Sliding window; at most that of the storage, if that has one.
        softcap: Caps scores: ``softcap * tanh(score / softcap)``, after ``scale``.
        sinks: One logit per query head, ``[Hq]``.
        return_lse: Whether the logarithms of the softmax denominators are wanted.

    Returns:
        Output ``[B, Hq, T, Dv]`` in the dtype of ``query``, 0 in rows that see no key, laid out so that
        ``.transpose(1, 2)`` is contiguous; and, if they are wanted, the natural logarithms of the softmax denominators,
        fp32 ``[B, Hq, T]``.

    Raises:
        ValueError: ``query`` has more than 16 positions.
    """
    if query.shape[2] > MAX_QUERIES:
        raise ValueError(
            f"query must have at most {MAX_QUERIES} positions, got {query.shape[2]}; use the prefill kernel"
        )
    inputs = (query, sinks, storage.raw_rows, *storage.tensors().values())
    options = (scale, window, softcap, return_lse)
    call = replay.call_of(
        "decode", replay.tensor_kind(query), replay.tensor_kind(sinks), *storage_kind(storage), *options
    )

    def run() -> tuple[Tensor, ...]:
        results = _launch(query, None, None, storage, scale=scale, window=window, softcap=softcap, sinks=sinks)
        return results if return_lse else results[:1]

    return call.run(inputs, run)


def decode_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    storage: LayerStorage,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store the keys and values of the queries, and attend; no host synchronisation.

    It does what :func:`~dma_kernels.cache.append.append_tokens` and :func:`decode_attention` do one after the other.

    Args:
        query: As for :func:`decode_attention`.
        key: Raw ``[B, Hkv, T, D]``, any strides.
        value: Raw ``[B, Hkv, T, Dv]``.
        storage: The cache; its body must have room for the tiles that are completed, its tail for the new tokens.
        scale: As for :func:`decode_attention`.
        window: Likewise.
        softcap: Likewise.
        sinks: Likewise.

    Returns:
        Output ``[B, Hq, T, Dv]`` in the dtype of ``query``.
    """
    new_len = key.shape[2]
    # Without a band, a tile that the new keys complete is low for the queries after it, and read from its codes.
    if query.numel() == 0 or key.numel() == 0 or (new_len > 1 and storage.diagonal_tiles == 0):
        append_tokens(storage, key, value)
        return decode_attention(query, storage, scale=scale, window=window, softcap=softcap, sinks=sinks)[0]
    kinds = (replay.tensor_kind(query), replay.tensor_kind(key), replay.tensor_kind(value), replay.tensor_kind(sinks))
    call = replay.call_of("step", *kinds, *storage_kind(storage), scale, window, softcap)

    def run() -> tuple[Tensor]:
        return _launch(query, key, value, storage, scale=scale, window=window, softcap=softcap, sinks=sinks)[:1]

    (out,) = call.run((query, key, value, sinks, storage.raw_rows, *storage.tensors().values()), run)
    storage.count_appended(new_len)
    return out


def _launch(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    storage: LayerStorage,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return output and logarithms of :func:`decode_attention`; new keys and values, if there are any, are stored."""
    batch, q_heads, q_len, _ = query.shape
    kv_heads, value_dim = storage.value_tail.shape[1], storage.value_tail.shape[3]
    out = query.new_empty((batch, q_len, q_heads, value_dim)).transpose(1, 2)
    lse = query.new_empty((batch, q_heads, q_len), dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    report("decode")
    plan = _plan(
        storage.record,
        chip.device_arch(query.device),
        processors(query.device),
        query.shape,
        kv_heads,
        storage.slots + (storage.ring + storage.key_sink.shape[2]) // TILE,
        window is not None,
        softcap is not None,
        starts_early(query.device),
    )
    blocks = triton.cdiv(q_heads // kv_heads * q_len, COLUMNS)
    entries = (plan.programs + batch * kv_heads) * blocks * COLUMNS  # a part for each head that a program touches
    heads = query.new_empty((batch, kv_heads, 3), dtype=torch.int32)
    partial = query.new_empty((entries, value_dim), dtype=torch.float32)
    partial_lse = query.new_empty(entries, dtype=torch.float32)
    strides = (0,) * 8 if key is None or value is None else (*key.stride(), *value.stride())
    *raw, body, pages, raw_rows = where_stored(storage)
    with on_device(query.device):
        plan.launcher(
            (plan.programs, 1, 1),
            query, key, value, body, pages, *raw, storage.lengths, raw_rows, heads, partial, partial_lse,
            *query.stride(), *strides, *storage.strides,
            batch, q_len, storage.slots, storage.ring // TILE, window or 0, (softcap or 0.0) * LOG2_E, scale * LOG2_E,
            storage.diagonal_tiles, storage.key_sink.shape[2] // TILE,
        )  # fmt: skip
        launch_end(storage, key, value, strides, (heads, partial, partial_lse), sinks, out, lse)
    return out, lse


@dataclass(frozen=True)
class _Plan:
    """What the calls of one shape have in common.

    Attributes:
        launcher: Of the kernel that attends.
        programs: Of its grid.
    """

    launcher: Launcher
    programs: int


@functools.lru_cache(maxsize=256)
def _plan(
    record: Record,
    arch: int,
    processors: int,
    query_shape: tuple[int, int, int, int],
    kv_heads: int,
    tiles: int,
    has_window: bool,
    has_softcap: bool,
    is_early: bool,
) -> _Plan:
    """Return the plan of a call; ``tiles`` there are at most."""
    batch, q_heads, q_len, _ = query_shape
    group = q_heads // kv_heads
    block_d, block_dv = padded_channels(record.head_dim), max(VALUE_GROUP, padded_channels(record.value_dim))
    sizes = select_decode_tiles(
        arch, block_d, block_dv, record.format.bits, heads=batch * kv_heads, tiles=tiles, processors=processors
    )
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "D": record.head_dim,
        "DV": record.value_dim,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "BITS": record.format.bits,
        "KEY_HADAMARD": record.key_hadamard,
        "VALUE_HADAMARD": record.value_hadamard,
        "LOW_COLUMNS": 4 if group * q_len <= 4 else COLUMNS,
        "W": sizes.warps,
        "BUFFERS": sizes.buffers,
        "HAS_WINDOW": has_window,
        "HAS_SOFTCAP": has_softcap,
        "LETS_START": is_early,
    }
    return _Plan(
        launcher=_decode_launcher(tuple(constants.items()), sizes.warps),
        programs=sizes.programs,
    )


@functools.cache
def _decode_launcher(constants: tuple[tuple[str, Any], ...], warps: int) -> Launcher:
    """Return the launcher of the kernel, one for all plans that agree in its constants."""
    return Launcher(decode_kernel, dict(constants), num_warps=warps)
