"""The queries of a call, quantised ahead of :mod:`dma_kernels.prefill.hopper`, whose warps have no registers for it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device.arithmetic import program_block
from ..device.queries import load_queries, prepare_queries, rotate_queries, smoothing_shift
from ..numerics.formats import SharedScale, padded_channels
from ..numerics.geometry import LOG2_E
from ..numerics.recipe import Recipe
from ..numerics.transforms import hadamard_size
from ..runtime.launch import Launcher, blocks_of_heads
from ..runtime.lowering import Form, dequantized_dtype

ROWS = 32
"""Queries of a program. As MXINT8 8K queries of 32 heads of 128 take 37 us on an H200 (28 if not rotated); with
64 and 8 warps 42.5, with 16 and 4 warps 40."""

_DTYPES = {Form.INT8: torch.int8, Form.E4M3: torch.float8_e4m3fn, Form.E5M2: torch.float8_e5m2}


@dataclass(frozen=True)
class StagedQueries:
    """Queries in the forms that tiles read.

    Attributes:
        high: Of high tiles, 16-bit ``[B, Hq, Tq, D]``: the caller's own, where these are what high tiles read.
        low: Of low tiles, 8-bit or 16-bit ``[B, Hq, Tq, D]``, contiguous.
        rows: fp32 ``[2, B, Hq, Tq]``, contiguous: what one unit of a low score is worth, but for the key's factor, as a
            base-2 logit; and the product of query and mean key, which smoothing takes from every score.
    """

    high: Tensor
    low: Tensor
    rows: Tensor


@triton.jit(do_not_specialize=["q_len"])
def stage_queries_kernel(
    q_ptr, mean_ptr, factor_ptr, high_ptr, low_ptr, rows_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd, q_len, plane, logit_scale, norm,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    LOW_FORM: tl.constexpr, LOW_FORMAT: tl.constexpr, LOW_SHARED: tl.constexpr, HIGH_FORMAT: tl.constexpr,
    ROUNDING: tl.constexpr, ROTATE: tl.constexpr, HADAMARD_SIZE: tl.constexpr, HAS_MEAN: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_HIGH: tl.constexpr,
):  # fmt: skip
    """Write what :class:`StagedQueries` holds for ``ROWS`` queries of one head."""
    i_head = tl.program_id(0).to(tl.int64)  # counted over all batch rows
    i_b = i_head // Q_HEADS
    i_h = i_head % Q_HEADS
    rows = program_block() * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    m_row = rows < q_len
    q = load_queries(q_ptr + i_b * stride_qb + i_h * stride_qh, rows, stride_qt, stride_qd, q_len, D, BLOCK_D)
    x = q.to(tl.float32)
    if ROTATE:
        x = rotate_queries(q, norm, HADAMARD_SIZE)
    head_scale = 1.0
    if HAS_FACTOR:
        head_scale = tl.load(factor_ptr + i_head)
    low, _, factor = prepare_queries(
        x, head_scale, LOW_FORM, LOW_FORMAT, LOW_SHARED, ROUNDING, low_ptr.dtype.element_ty
    )
    offset = (i_head * q_len + rows)[:, None] * D + o_d[None, :]
    mask = m_row[:, None] & (o_d < D)[None, :]
    tl.store(low_ptr + offset, low, mask=mask)
    tl.store(rows_ptr + i_head * q_len + rows, factor * logit_scale, mask=m_row)
    if HAS_MEAN:
        i_kv = i_b * KV_HEADS + i_h // (Q_HEADS // KV_HEADS)
        tl.store(rows_ptr + plane + i_head * q_len + rows, smoothing_shift(q, mean_ptr + i_kv * D, D), mask=m_row)
    if HAS_HIGH:
        high, _, _ = prepare_queries(
            x, head_scale, "dequantized", HIGH_FORMAT, "block", ROUNDING, high_ptr.dtype.element_ty
        )
        tl.store(high_ptr + offset, high, mask=mask)


def stage_queries(
    query: Tensor,
    mean: Tensor | None,
    query_factor: Tensor | None,
    recipe: Recipe,
    low_form: Form,
    high_form: Form,
    *,
    scale: float,
) -> StagedQueries:
    """Quantise queries.

    Args:
        query: 16-bit ``[B, Hq, Tq, D]``, any strides; ``D`` is a multiple of 32.
        mean: What was subtracted from keys, fp32 ``[B, Hkv, D]``.
        query_factor: NVFP4's scale of the transformed queries of each head, fp32 ``[B, Hq]``, if they are in NVFP4.
        recipe: The precisions.
        low_form: Of the keys of low tiles: ``int8``, ``e4m3``, ``e5m2`` or ``dequantized``.
        high_form: Of the keys of high tiles: ``raw`` or ``dequantized``.
        scale: Of the scores.
    """
    batch, heads, q_len, head_dim = query.shape
    rows = query.new_empty((2, batch, heads, q_len), dtype=torch.float32)
    low_dtype = _DTYPES.get(low_form) or dequantized_dtype(query.dtype, recipe.query_low, recipe.key_low)
    low = query.new_empty(query.shape, dtype=low_dtype)
    high = query
    if high_form is not Form.RAW:
        high = query.new_empty(query.shape, dtype=dequantized_dtype(query.dtype, recipe.high, recipe.high))
    kv_heads = heads if mean is None else mean.shape[1]
    launch = _queries_launcher(
        heads, kv_heads, head_dim, recipe, low_form, mean is not None, query_factor is not None, high is not query,
    )  # fmt: skip
    launch(
        blocks_of_heads(batch * heads, triton.cdiv(q_len, ROWS)),
        query, mean, query_factor, high, low, rows, *query.stride(), q_len, rows[0].numel(),
        scale * LOG2_E, math.pow(hadamard_size(head_dim), -0.5),
    )  # fmt: skip
    return StagedQueries(high, low, rows)


@functools.lru_cache(maxsize=256)
def _queries_launcher(
    heads: int,
    kv_heads: int,
    head_dim: int,
    recipe: Recipe,
    low_form: Form,
    has_mean: bool,
    has_factor: bool,
    has_high: bool,
) -> Launcher:
    shared = SharedScale.BLOCK if recipe.shared_scale == SharedScale.BLOCK else SharedScale.ROW
    constants = {
        "Q_HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": head_dim,
        "BLOCK_D": padded_channels(head_dim),
        "ROWS": ROWS,
        "LOW_FORM": str(low_form),
        "LOW_FORMAT": recipe.query_low,
        "LOW_SHARED": str(shared),
        "HIGH_FORMAT": recipe.high,
        "ROUNDING": recipe.scale_rounding,
        "ROTATE": recipe.rotate,
        "HADAMARD_SIZE": hadamard_size(head_dim),
        "HAS_MEAN": has_mean,
        "HAS_FACTOR": has_factor,
        "HAS_HIGH": has_high,
    }
    return Launcher(stage_queries_kernel, constants, num_warps=4)
