"""Quantize the queries of a call before the attention kernel, which has no registers to spare for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...device.arithmetic import hadamard, program_block
from ...device.operands import prepare_queries, smoothing_bias
from ...device.tiles import Rows, load_in_range
from ...numerics.formats import padded_channels
from ...numerics.recipe import Recipe
from ...numerics.transforms import hadamard_size
from ...runtime.launch import blocks_of_heads, launch_kernel
from ..channel_chunks import dot_chunks, load_chunks, quantize_row_chunks, store_chunks
from ..operands import RAW, TILE_SCALED, OperandFormat, dequantized_dtype

ROWS = 32
"""Queries of a CTA of two warps: fastest of 16 to 128 (H200)."""


@dataclass(frozen=True)
class QuantizedQueries:
    """Queries in the operand formats of high and low tiles."""

    high: Tensor  # queries of high tiles, 16-bit ``[B, Hq, Tq, D]``: the caller's own if high tiles are unquantized
    low: Tensor  # queries of low tiles, 8-bit or 16-bit ``[B, Hq, Tq, D]``, contiguous
    # fp32 ``[2, B, Hq, Tq]``, contiguous. First the scale that converts low scores, before the key descale, to base-2
    # logits. Then the dot product of query and mean key, the bias that smoothing subtracts from the scores.
    descale_and_bias: Tensor


@triton.jit(do_not_specialize=["q_len"])
def quantize_q_kernel(
    q_ptr, mean_ptr, global_scale_ptr, high_ptr, low_ptr, descale_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd, q_len, plane, logit_scale, norm,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    LOW_FORM: tl.constexpr, LOW_FORMAT: tl.constexpr, LOW_SHARED: tl.constexpr, HIGH_FORMAT: tl.constexpr,
    ROUNDING: tl.constexpr, HADAMARD_SIZE: tl.constexpr,
    HAS_HIGH: tl.constexpr, IN_CHUNKS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Write the fields of :class:`QuantizedQueries` for ``ROWS`` queries of one head."""
    if USE_PDL:
        gdc_launch_dependents()
    i_head = tl.program_id(0).to(tl.int64)  # counted over all batch rows
    i_b = i_head // Q_HEADS
    i_h = i_head % Q_HEADS
    rows = program_block() * ROWS + tl.arange(0, ROWS)
    m_row = rows < q_len
    x = Rows(q_ptr + i_b * stride_qb + i_h * stride_qh, stride_qt, stride_qd)
    o_row = i_head * q_len + rows
    i_kv = i_b * KV_HEADS + i_h // (Q_HEADS // KV_HEADS)
    if IN_CHUNKS:  # noqa: SIM108 (a constexpr branch)
        q = load_chunks(x, rows, 0, q_len, D)
    else:
        q = load_in_range(x, rows, 0, q_len, D, BLOCK_D)
    if USE_PDL:
        gdc_wait()
    if mean_ptr is not None:
        mean_ptr += i_kv * D
        bias = dot_chunks(q, mean_ptr, D) if IN_CHUNKS else smoothing_bias(q, mean_ptr, D)
        tl.store(descale_ptr + plane + o_row, bias, mask=m_row)
    if IN_CHUNKS:
        low, descale = quantize_row_chunks(q, LOW_FORM, LOW_FORMAT, ROUNDING == "ceil", HADAMARD_SIZE, norm)
        store_chunks(low_ptr, o_row * D, low, m_row, D)
    else:
        x = hadamard(q.to(tl.float32), HADAMARD_SIZE, norm)
        global_scale = 1.0
        if global_scale_ptr is not None:
            global_scale = tl.load(global_scale_ptr + i_head)
        low, _, descale = prepare_queries(
            x, global_scale, LOW_FORM, LOW_FORMAT, LOW_SHARED, ROUNDING, low_ptr.dtype.element_ty
        )
        o_d = tl.arange(0, BLOCK_D)
        offset = o_row[:, None] * D + o_d[None, :]
        mask = m_row[:, None] & (o_d < D)[None, :]
        tl.store(low_ptr + offset, low, mask=mask)
        if HAS_HIGH:
            high, _, _ = prepare_queries(
                x, global_scale, "dequantized", HIGH_FORMAT, "block", ROUNDING, high_ptr.dtype.element_ty
            )
            tl.store(high_ptr + offset, high, mask=mask)
    tl.store(descale_ptr + o_row, descale * logit_scale, mask=m_row)


def quantize_q(
    query: Tensor,
    mean: Tensor | None,
    query_global_scale: Tensor | None,
    recipe: Recipe,
    low_key: OperandFormat,
    high_key: OperandFormat,
    *,
    logit_scale: float,
    use_pdl: bool,
) -> QuantizedQueries:
    """Quantize queries ``[B, Hq, Tq, D]``, any strides; ``D`` is a multiple of 32.

    ``mean`` and ``query_global_scale`` are those of :class:`~..operands.Operands`. ``low_key`` and ``high_key`` are the
    formats of keys: not packed, and in 16 bits. With ``use_pdl``, CTAs may start before the previous launch has ended.
    Until they wait for it, they read only ``query`` and write nothing. They also let the CTAs of the next launch start.
    """
    batch, heads, q_len, head_dim = query.shape
    descale_and_bias = query.new_empty((2, batch, heads, q_len), dtype=torch.float32)
    low_dtype = low_key.dtype or dequantized_dtype(query.dtype, recipe.query_low, recipe.key_low)
    low = query.new_empty(query.shape, dtype=low_dtype)
    high = query
    if high_key is not RAW:
        high = query.new_empty(query.shape, dtype=dequantized_dtype(query.dtype, recipe.high, recipe.high))
    # 8-bit queries with a scale per row are quantized in chunks, whose number must be a power of two.
    chunks = triton.cdiv(head_dim, 32 if head_dim <= 128 else 64)
    in_chunks = low_key in TILE_SCALED and high is query and chunks & (chunks - 1) == 0
    constants = {
        "Q_HEADS": heads,
        "KV_HEADS": heads if mean is None else mean.shape[1],
        "D": head_dim,
        "BLOCK_D": padded_channels(head_dim),
        "ROWS": ROWS,
        "LOW_FORM": low_key.name,
        "LOW_FORMAT": recipe.query_low,
        "LOW_SHARED": recipe.query_shared_scale,
        "HIGH_FORMAT": recipe.high,
        "ROUNDING": recipe.scale_rounding,
        "HADAMARD_SIZE": hadamard_size(head_dim) if recipe.rotate else 0,
        "HAS_HIGH": high is not query,
        "IN_CHUNKS": in_chunks,
        "USE_PDL": use_pdl,
    }
    num_warps = 2 if in_chunks and head_dim <= 128 else 4
    launch_kernel(
        quantize_q_kernel, constants, blocks_of_heads(batch * heads, triton.cdiv(q_len, ROWS)),
        query, mean, query_global_scale, high, low, descale_and_bias, *query.stride(), q_len,
        descale_and_bias.numel() // 2, logit_scale, math.pow(hadamard_size(head_dim), -0.5),
        num_warps=num_warps, launch_pdl=use_pdl,
    )  # fmt: skip
    return QuantizedQueries(high, low, descale_and_bias)
