"""Decode attention on the Triton backend: up to 16 queries against the packed tiles and the raw band of a cache.

How many keys there are is read on the device, and the grid depends on shapes and capacities alone, so a CUDA graph of a
step can be replayed while the cache fills.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..numerics.formats import TILE, SharedScale, padded_channels
from ..numerics.geometry import LOG2_E, MAX_BAND_TILES
from ..numerics.recipe import Recipe
from ..numerics.transforms import hadamard_size
from ..runtime import chip, replay
from ..runtime.chip import processors
from ..runtime.launch import Launcher, on_device
from ..runtime.lowering import dequantized_dtype
from ..runtime.tuning import select_decode_tiles
from .decode_kernel import combine_kernel, decode_kernel
from .forms import DecodeForms, body_constants, select_forms, storage_kind, storage_tensors, stored_units
from .storage import LayerStorage

MAX_QUERIES = 16
"""Queries of a call; longer chunks are for the prefill kernel."""
_MAX_COLUMNS = 32  # of a program; more would spill registers

_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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

    Query ``i`` of ``T`` stands at the position ``lengths - T + i``. NVFP4's second scale is one for each query, and for
    each raw key, where the rule has one for the head: they differ for blocks 2^14 below the largest.

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
    inputs = (query, sinks, *storage_tensors(storage))
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
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, value_dim = storage.value_tail.shape[1], storage.value_tail.shape[3]
    out = query.new_empty((batch, q_len, q_heads, value_dim)).transpose(1, 2)
    lse = query.new_empty((batch, q_heads, q_len), dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    plan = _plan(
        storage.recipe,
        chip.device_arch(query.device),
        processors(query.device),
        query.dtype,
        (batch, q_heads, q_len, head_dim),
        kv_heads,
        value_dim,
        storage.slots,
        storage.ring // TILE,
        window is not None,
        softcap is not None,
        sinks is not None,
        chip.is_interpreted(),
    )
    forms, rows, splits = plan.forms, plan.rows, plan.splits
    partial = query.new_empty((batch * kv_heads, rows, splits, value_dim), dtype=torch.float32)
    partial_lse = query.new_empty((batch * kv_heads, rows, splits), dtype=torch.float32)
    key_body, value_body = storage.key_body, storage.value_body
    with on_device(query.device):
        plan.attend(
            plan.grid,
            query,
            stored_units(key_body["data"], forms.key, forms.query), key_body.get("scale"), key_body.get("factor"),
            stored_units(value_body["data"], forms.value, forms.pv), value_body.get("scale"), value_body.get("factor"),
            storage.key_tail, storage.value_tail, storage.key_sink, storage.value_sink,
            storage.key_mean, storage.lengths, partial, partial_lse,
            *query.stride(), q_len, new_len, storage.slots, storage.ring // TILE, window or 0,
            (softcap or 0.0) * LOG2_E, scale * LOG2_E, math.pow(hadamard_size(head_dim), -0.5), *plan.band,
        )  # fmt: skip
        plan.combine(
            (batch * kv_heads, q_heads // kv_heads * q_len, 1),
            partial, partial_lse, query, storage.key_mean, sinks, storage.lengths, out, lse,
            *query.stride(), *out.stride()[:3], splits, q_len, new_len, rows, scale * LOG2_E,
        )  # fmt: skip
    return out, lse


@dataclass(frozen=True)
class _Plan:
    """What the calls of one shape have in common.

    Attributes:
        forms: How the body is read.
        attend: The first kernel.
        combine: The second.
        grid: Of the first.
        rows: Columns of a kv head, padded, for which there are partial results.
        splits: Partial results of each.
        band: ``diagonal_tiles``, ``sink_tiles`` and the weight of a high tile.
    """

    forms: DecodeForms
    attend: Launcher
    combine: Launcher
    grid: tuple[int, int, int]
    rows: int
    splits: int
    band: tuple[int, int, int]


@functools.lru_cache(maxsize=256)
def _plan(
    recipe: Recipe,
    arch: int,
    processors: int,
    dtype: torch.dtype,
    query_shape: tuple[int, int, int, int],
    kv_heads: int,
    value_dim: int,
    slots: int,
    ring_tiles: int,
    has_window: bool,
    has_softcap: bool,
    has_sinks: bool,
    is_interpreted: bool,
) -> _Plan:
    batch, q_heads, q_len, head_dim = query_shape
    group = q_heads // kv_heads
    forms = select_forms(recipe, arch)
    block_d, block_dv = padded_channels(head_dim), padded_channels(value_dim)
    block_n = min(_MAX_COLUMNS, max(8, triton.next_power_of_2(group * q_len)))
    blocks = triton.cdiv(group * q_len, block_n)
    sink_tiles = min(recipe.sink_tiles, MAX_BAND_TILES)
    tiles = select_decode_tiles(
        arch,
        max(block_d, block_dv),
        forms.key,
        forms.value,
        columns=block_n,
        programs=batch * kv_heads * blocks,
        tiles=slots,
        high_tiles=sink_tiles + ring_tiles,
        processors=processors,
    )
    constants = {
        **body_constants(recipe, forms, kv_heads, head_dim, value_dim, dtype),
        "GROUP": group,
        "BLOCK_N": block_n,
        "QUERY_FORM": forms.query,
        "PV": forms.pv,
        "KEY_BLOCK": block_d // 2 if forms.key == "fp4" else block_d,
        "LOW_FORMAT": recipe.query_low,
        "HIGH_FORMAT": recipe.high,
        "SHARED": "block" if recipe.shared_scale == SharedScale.BLOCK else "row",
        "ROUNDING": recipe.scale_rounding,
        "HAS_MEAN": recipe.smooth_k,
        "ROTATE": recipe.rotate,
        "HADAMARD_SIZE": hadamard_size(head_dim),
        "HAS_ROWS": q_len > 1,
        "HAS_WINDOW": has_window,
        "HAS_SOFTCAP": has_softcap,
        "LOW_DTYPE": _TRITON_DTYPES[dequantized_dtype(dtype, recipe.query_low, recipe.key_low)],
        "HIGH_DTYPE": _TRITON_DTYPES[dequantized_dtype(dtype, recipe.high, recipe.high)],
        "STEP": tiles.step,
        "HIGH_STEP": tiles.high_step,
        "NUM_STAGES": tiles.num_stages,
        "HIGH_STAGES": tiles.high_stages,
        "IS_INTERPRETED": is_interpreted,
    }
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    if tiles.max_registers is not None:
        options["maxnreg"] = tiles.max_registers
    combined = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "D": head_dim,
        "BLOCK_D": block_d,
        "DV": value_dim,
        "BLOCK_DV": block_dv,
        # All at once, up to what the registers hold.
        "BLOCK_S": min(triton.next_power_of_2(tiles.splits), 8192 // block_dv),
        "HAS_SINKS": has_sinks,
        # Under a softcap the first kernel's logits are whole.
        "IS_SHIFTED": recipe.smooth_k and not has_softcap,
    }
    return _Plan(
        forms=forms,
        attend=_launcher(decode_kernel, tuple(constants.items()), tuple(options.items())),
        combine=_launcher(combine_kernel, tuple(combined.items()), ()),
        grid=(tiles.splits, batch * kv_heads, blocks),
        rows=blocks * block_n,
        splits=tiles.splits,
        band=(min(recipe.diagonal_tiles, MAX_BAND_TILES), sink_tiles, tiles.high_weight),
    )


@functools.cache
def _launcher(kernel: Any, constants: tuple[tuple[str, Any], ...], options: tuple[tuple[str, Any], ...]) -> Launcher:
    """Return the launcher of a kernel, one for all plans that agree in its constants."""
    return Launcher(kernel, dict(constants), **dict(options))
