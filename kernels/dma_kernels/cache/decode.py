"""Decode attention on the Triton backend: up to 16 queries against the packed tiles and the raw band of a cache.

How many keys there are is read on the device, and the grid depends on shapes and capacities alone, so a CUDA graph of a
step can be replayed while the cache fills.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..numerics.formats import TILE
from ..numerics.geometry import LOG2_E, MAX_BAND_TILES
from ..runtime import chip, replay
from ..runtime.chip import processors
from ..runtime.launch import Launcher, on_device
from ..runtime.tuning import select_decode_tiles
from .append import record_constants, storage_kind
from .codes import Record
from .decode_kernel import combine_kernel, decode_kernel
from .storage import LayerStorage

MAX_QUERIES = 16
"""Queries of a call; longer chunks are for the prefill kernel."""
_MAX_COLUMNS = 32  # of a program; more would spill registers


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
        storage: The cache, on the device of ``query``; its body must be contiguous.
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
    inputs = (query, sinks, *storage.tensors().values())
    options = (scale, window, softcap, return_lse)
    call = replay.call_of(
        "decode", replay.tensor_kind(query), replay.tensor_kind(sinks), *storage_kind(storage), *options
    )

    def run() -> tuple[Tensor, ...]:
        results = launch_decode(query, storage, scale=scale, window=window, softcap=softcap, sinks=sinks)
        return results if return_lse else results[:1]

    return call.run(inputs, run)


def launch_decode(
    query: Tensor,
    storage: LayerStorage,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    new_len: int = 0,
) -> tuple[Tensor, Tensor]:
    """Launch both kernels.

    Args:
        query: As for :func:`decode_attention`.
        storage: Likewise.
        scale: Likewise.
        window: Likewise.
        softcap: Likewise.
        sinks: Likewise.
        new_len: Keys that the launch before this one stores, and ``lengths`` does not count yet; it does afterwards.

    Returns:
        Output and logarithms of :func:`decode_attention`.
    """
    batch, q_heads, q_len, _ = query.shape
    kv_heads, value_dim = storage.value_tail.shape[1], storage.value_tail.shape[3]
    out = query.new_empty((batch, q_len, q_heads, value_dim)).transpose(1, 2)
    lse = query.new_empty((batch, q_heads, q_len), dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    plan = _plan(
        storage.record,
        chip.device_arch(query.device),
        processors(query.device),
        query.shape,
        kv_heads,
        (storage.slots, storage.ring // TILE, storage.key_sink.shape[2] // TILE),
        (window is not None, softcap is not None, sinks is not None),
        chip.is_interpreted(),
    )
    rows, splits = plan.rows, plan.splits
    partial = query.new_empty((batch * kv_heads, rows, splits, value_dim), dtype=torch.float32)
    partial_lse = query.new_empty((batch * kv_heads, rows, splits), dtype=torch.float32)
    sink_tiles = min(storage.key_sink.shape[2] // TILE, MAX_BAND_TILES)
    with on_device(query.device):
        plan.attend(
            plan.grid,
            query, storage.body.view(torch.int32), storage.pages, storage.key_tail, storage.value_tail,
            storage.key_sink, storage.value_sink, storage.lengths, partial, partial_lse,
            *query.stride(), q_len, new_len, storage.slots, storage.ring // TILE, window or 0,
            (softcap or 0.0) * LOG2_E, scale * LOG2_E, min(storage.diagonal_tiles, MAX_BAND_TILES), sink_tiles,
            plan.high_weight,
        )  # fmt: skip
        plan.combine(
            (batch * kv_heads, q_heads // kv_heads * q_len, 1),
            partial, partial_lse, sinks, storage.lengths, out, lse, *out.stride()[:3], splits, q_len, new_len, rows,
        )  # fmt: skip
    return out, lse


@dataclass(frozen=True)
class _Plan:
    """What the calls of one shape have in common.

    Attributes:
        attend: The first kernel.
        combine: The second.
        grid: Of the first.
        rows: Columns of a kv head, padded, for which there are partial results.
        splits: Partial results of each.
        high_weight: How many coded tiles a raw one counts for.
    """

    attend: Launcher
    combine: Launcher
    grid: tuple[int, int, int]
    rows: int
    splits: int
    high_weight: int


@functools.lru_cache(maxsize=256)
def _plan(
    record: Record,
    arch: int,
    processors: int,
    query_shape: tuple[int, int, int, int],
    kv_heads: int,
    tiles: tuple[int, int, int],
    has: tuple[bool, bool, bool],
    is_interpreted: bool,
) -> _Plan:
    """Return the plan of a call; ``tiles`` of body, tail and sinks, ``has`` a window, a softcap and sink logits."""
    batch, q_heads, q_len, _ = query_shape
    group = q_heads // kv_heads
    block_n = min(_MAX_COLUMNS, max(8, triton.next_power_of_2(group * q_len)))
    blocks = triton.cdiv(group * q_len, block_n)
    constants = record_constants(record, kv_heads)
    widest = max(constants["BLOCK_D"], constants["BLOCK_DV"])
    sizes = select_decode_tiles(
        arch, widest, programs=batch * kv_heads * blocks, tiles=sum(tiles), processors=processors
    )
    attend = {
        **constants,
        "GROUP": group,
        "BLOCK_N": block_n,
        "HAS_WINDOW": has[0],
        "HAS_SOFTCAP": has[1],
        "STEP": sizes.step,
        "NUM_STAGES": sizes.num_stages,
        "IS_INTERPRETED": is_interpreted,
    }
    combine = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "DV": record.value_dim,
        "BLOCK_DV": constants["BLOCK_DV"],
        # All at once, up to what the registers hold.
        "BLOCK_S": min(triton.next_power_of_2(sizes.splits), 8192 // constants["BLOCK_DV"]),
        "HAS_SINKS": has[2],
    }
    return _Plan(
        attend=Launcher(decode_kernel, attend, num_warps=sizes.num_warps),
        combine=Launcher(combine_kernel, combine),
        grid=(batch * kv_heads, sizes.splits, blocks),
        rows=blocks * block_n,
        splits=sizes.splits,
        high_weight=sizes.high_weight,
    )
