"""Quantize queries, keys and values to E4M3 in two launches, as a fused kernel in front of FP8 attention would do.

The first launch finds the largest magnitudes, the second scales and converts. FlashAttention-3 and cuDNN ship no
quantizer of their own.
"""

# Triton functions are a language of their own.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from dma_kernels.device.arithmetic import to_e4m3
from dma_kernels.numerics.formats import E4M3_MAX
from torch import Tensor

BLOCK_ROWS = 64
WARPS = 4
RESTORED = 4096
"""Elements that one program dequantizes."""


@dataclass(frozen=True)
class Fp8Operands:
    """E4M3 operands with their scales."""

    query: Tensor  # E4M3 [B, T, Hq, D]
    key: Tensor  # E4M3 [B, T, Hkv, D]
    value: Tensor  # E4M3 [B, T, Hkv, D]
    descales: Tensor  # factors of query, key and value, fp32 [3, B, Hkv], or [3, 1, 1] for one scale per tensor
    scales: Tensor  # the reciprocals
    key_value: Tensor | None = None  # E4M3 [B, T, 2, Hkv, D], of which key and value are views, if they are packed


@triton.jit
def _select(p_q, p_k, p_v, i_head, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr):
    """Map a head of the launch to its tensor: pointer, heads, head, index of the tensor, and kv head."""
    group: tl.constexpr = Q_HEADS // KV_HEADS
    p_x, heads, head, which, kv_head = p_q, Q_HEADS, i_head, 0, i_head // group
    if i_head >= Q_HEADS + KV_HEADS:
        p_x, heads, which = p_v, KV_HEADS, 2
        head = i_head - Q_HEADS - KV_HEADS
        kv_head = head
    elif i_head >= Q_HEADS:
        p_x, heads, which = p_k, KV_HEADS, 1
        head = i_head - Q_HEADS
        kv_head = head
    return p_x, heads, head, which, kv_head


@triton.jit
def _quantize_kernel(
    p_q, p_k, p_v, p_q_codes, p_k_codes, p_v_codes, p_largest, p_descales, p_scales, tokens,
    stride_which, stride_batch, stride_head, CONVERT: tl.constexpr, LARGEST_CODE: tl.constexpr, Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Find the largest magnitude of each scale, or, with ``CONVERT``, scale and convert by it.

    With ``PACKED`` the codes of a token's keys precede those of its values.
    """
    i_batch = tl.program_id(2).to(tl.int64)
    p_x, heads, head, which, kv_head = _select(p_q, p_k, p_v, tl.program_id(1), Q_HEADS, KV_HEADS)
    o_scale = which * stride_which + i_batch * stride_batch + kv_head * stride_head
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_channel = tl.arange(0, BLOCK_D)
    offsets = ((i_batch * tokens + o_row)[:, None] * heads + head) * HEAD_DIM + o_channel[None]
    m_x = (o_row < tokens)[:, None] & (o_channel < HEAD_DIM)[None]
    x = tl.load(p_x + offsets, mask=m_x, other=0.0).to(tl.float32)  # [ROWS, BLOCK_D]
    if CONVERT:
        p_codes, _, _, _, _ = _select(p_q_codes, p_k_codes, p_v_codes, tl.program_id(1), Q_HEADS, KV_HEADS)
        largest = tl.maximum(tl.load(p_largest + o_scale), 1e-30)
        if tl.program_id(0) == 0:
            tl.store(p_descales + o_scale, largest / LARGEST_CODE)
            tl.store(p_scales + o_scale, LARGEST_CODE / largest)
        x = tl.minimum(tl.maximum(x * (LARGEST_CODE / largest), -LARGEST_CODE), LARGEST_CODE)
        if PACKED:
            pitch = tl.where(which == 0, Q_HEADS, 2 * KV_HEADS)
            offsets = ((i_batch * tokens + o_row)[:, None] * pitch + head) * HEAD_DIM + o_channel[None]
        tl.store(p_codes + offsets, to_e4m3(x), mask=m_x)
    else:
        tl.atomic_max(p_largest + o_scale, tl.max(tl.max(tl.abs(x), 1), 0), sem="relaxed")


@triton.jit
def _restore_kernel(p_codes, p_descale, p_out, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_x = offsets < numel
    x = tl.load(p_codes + offsets, mask=m_x, other=0.0).to(tl.float32) * tl.load(p_descale)  # [BLOCK]
    tl.store(p_out + offsets, x.to(p_out.dtype.element_ty), mask=m_x)


def dequantize_fp8(codes: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return contiguous E4M3 codes times one scale."""
    out = torch.empty_like(codes, dtype=dtype)
    grid = (triton.cdiv(codes.numel(), RESTORED),)
    _restore_kernel[grid](codes, descale, out, codes.numel(), BLOCK=RESTORED, num_warps=WARPS)
    return out


def quantize_fp8(query: Tensor, key: Tensor, value: Tensor, *, per_head: bool, pack_kv: bool = False) -> Fp8Operands:
    """Quantize to E4M3 so that the largest magnitude of each scale becomes 448.

    Args:
        query: bf16 or fp16 ``[B, T, Hq, D]``, contiguous.
        key: ``[B, T, Hkv, D]``, likewise.
        value: ``[B, T, Hkv, D]``, likewise.
        per_head: Give every batch row and kv head a scale of its own, which its query heads share. Otherwise a tensor
            has one scale.
        pack_kv: Store the keys and values of a token side by side.

    Raises:
        ValueError: Queries and keys differ in their number of tokens.
    """
    batch, tokens, q_heads, head_dim = query.shape
    if key.shape[1] != tokens:
        raise ValueError(f"query and key must have as many tokens, got {tokens} and {key.shape[1]}")
    kv_heads = key.shape[2]
    largest = torch.zeros((3, batch, kv_heads) if per_head else (3, 1, 1), dtype=torch.float32, device=query.device)
    descales, scales = torch.empty_like(largest), torch.empty_like(largest)
    packed = key.new_empty((batch, tokens, 2, kv_heads, head_dim), dtype=torch.float8_e4m3fn) if pack_kv else None
    q_codes = torch.empty_like(query, dtype=torch.float8_e4m3fn)
    if packed is None:
        k_codes, v_codes = (torch.empty_like(x, dtype=torch.float8_e4m3fn) for x in (key, value))
    else:
        k_codes, v_codes = packed.unbind(2)
    strides = largest.stride() if per_head else (1, 0, 0)
    sizes = {"Q_HEADS": q_heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "LARGEST_CODE": E4M3_MAX}
    sizes |= {"BLOCK_D": triton.next_power_of_2(head_dim), "ROWS": BLOCK_ROWS, "PACKED": pack_kv}
    grid = (triton.cdiv(tokens, BLOCK_ROWS), q_heads + 2 * kv_heads, batch)
    tensors = (query, key, value, q_codes, k_codes, v_codes, largest, descales, scales)
    for converts in (False, True):
        _quantize_kernel[grid](*tensors, tokens, *strides, CONVERT=converts, **sizes, num_warps=WARPS)
    return Fp8Operands(q_codes, k_codes, v_codes, descales, scales, packed)
