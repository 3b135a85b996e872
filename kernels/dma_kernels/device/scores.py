"""Steps of the attention kernels for a block of keys: load, score, mask, online softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arithmetic import IS_INTERPRETED, apply_softcap, dot, permute_keys, round_to_e4m3, to_e4m3
from .tiles import TILE, TILE_SHIFT, Rows


@triton.jit
def storage_row(position, k_start, aligned_start, FORM: tl.constexpr):
    """Return the row of the key at a position: the caller's own keys are unpadded, all others tile-padded."""
    return position - (k_start if FORM == "raw" else aligned_start)


@triton.jit
def load_rows(
    x, first, length, MASK_ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Load ``[BLOCK_N, BLOCK_WIDTH]`` of :class:`~.tiles.Rows`, starting at row ``first``.

    Columns past ``WIDTH`` are zero. With ``MASK_ROWS``, so are rows outside ``0..length``.
    """
    rows = first + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_WIDTH)
    pointers = x.ptr + rows.to(tl.int64)[:, None] * x.stride_t + o_d.to(tl.int64)[None, :] * x.stride_d
    if MASK_ROWS:
        m_row = ((rows >= 0) & (rows < length))[:, None]
        block = tl.load(pointers, mask=m_row & (o_d < WIDTH)[None, :], other=0.0)
    elif WIDTH != BLOCK_WIDTH:
        block = tl.load(pointers, mask=(o_d < WIDTH)[None, :], other=0.0)
    else:
        block = tl.load(pointers)
    return block


@triton.jit
def load_unquantized(
    desc, rows, i_b, i_kv, first, length, MASK_ROWS: tl.constexpr, USE_TMA: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load the caller's own keys or values ``[BLOCK_N, BLOCK_D]``, starting at row ``first`` of a head.

    ``desc`` describes ``[B, Hkv, T, D]`` in blocks of ``[1, 1, BLOCK_N, BLOCK_D]``; ``rows`` are those of the head.
    """
    if USE_TMA:
        x = tl.reshape(desc.load([i_b.to(tl.int32), i_kv.to(tl.int32), first, 0]), [BLOCK_N, BLOCK_D])
    else:
        x = load_rows(rows, first, length, MASK_ROWS, D, BLOCK_D, BLOCK_N)
    return x


@triton.jit
def load_keys(
    desc, base, scale_base, row, first, length, FORM: tl.constexpr, FORMAT: tl.constexpr, MASK_ROWS: tl.constexpr,
    USE_TMA: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load contiguous keys, starting at row ``first`` of a head, which begins at row ``row`` of all keys.

    Returns:
        The keys ``[BLOCK_N, BLOCK_D]`` (E2M1 pairs: half of that) and their block scales ``[BLOCK_N, blocks]`` (unused
        except for ``packed``).
    """
    BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    if FORM == "packed":
        PAIR: tl.constexpr = 1 if FORMAT == "mxfp8" else 2
        WIDTH: tl.constexpr = BLOCKS * BLOCK // PAIR
        rows = Rows(base + row * WIDTH, WIDTH, 1)
        k = load_rows(rows, first, length, MASK_ROWS, WIDTH, BLOCK_D // PAIR, BLOCK_N)
        scale_rows = Rows(scale_base + row * BLOCKS, BLOCKS, 1)
        k_scale = load_rows(scale_rows, first, length, MASK_ROWS, BLOCKS, BLOCK_D // BLOCK, BLOCK_N)
    else:
        if USE_TMA:
            k = desc.load([row.to(tl.int32) + first, 0])
        else:
            STORED: tl.constexpr = D if FORM == "dequantized" else BLOCKS * BLOCK
            rows = Rows(base + row * STORED, STORED, 1)
            k = load_rows(rows, first, length, MASK_ROWS, STORED, BLOCK_D, BLOCK_N)
        k_scale = k
    return k, k_scale


@triton.jit
def load_values(
    desc, rows, row, i_b, i_kv, first, length, FORM: tl.constexpr, MASK_ROWS: tl.constexpr,
    USE_TMA: tl.constexpr, USE_RAW_TMA: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load values ``[BLOCK_N, BLOCK_DV]``, starting at row ``first`` of a head; E4M3 in ``permute_keys`` order.

    For E4M3, ``desc`` and ``rows`` are all values as a matrix, in which the head begins at ``row``. For 16 bits, they
    are as in :func:`load_unquantized`.
    """
    if FORM == "e4m3":
        tile_row = (first >> TILE_SHIFT) * DV
        column = first & (TILE - 1)
        if USE_TMA:
            v = tl.trans(desc.load([row.to(tl.int32) + tile_row, column]))
        else:
            o_d = tl.arange(0, BLOCK_DV)
            pointers = rows.ptr + (row + tile_row + o_d)[:, None] * TILE + (column + tl.arange(0, BLOCK_N))[None, :]
            if DV == BLOCK_DV:
                v = tl.trans(tl.load(pointers))
            else:
                v = tl.trans(tl.load(pointers, mask=(o_d < DV)[:, None], other=0.0))
    else:
        v = load_unquantized(desc, rows, i_b, i_kv, first, length, MASK_ROWS, USE_RAW_TMA, DV, BLOCK_DV, BLOCK_N)
    return v


@triton.jit
def _nvfp4_values(packed, scale):
    """Dequantize packed E2M1 ``[ROWS, D / 2]`` with E4M3 scales ``[ROWS, D / 16]`` to fp32 ``[ROWS, D]``."""
    ROWS: tl.constexpr = packed.shape[0]
    BLOCKS: tl.constexpr = scale.shape[1]
    code = tl.reshape(tl.join(packed & 15, packed >> 4), [ROWS, BLOCKS, 16]).to(tl.int32)
    step = code & 7
    # From 2 up, codes count the exponent and the first mantissa bit of fp32, starting at 1.0.
    large = ((step + 252) << 22).to(tl.float32, bitcast=True)
    magnitude = tl.where(step < 2, step.to(tl.float32) * 0.5, large)
    values = tl.where(code < 8, magnitude, -magnitude) * scale.to(tl.float32)[:, :, None]
    return tl.reshape(values, [ROWS, BLOCKS * 16])


@triton.jit
def score(
    q, q_scale, k, k_scale, FORM: tl.constexpr, Q_FORMAT: tl.constexpr, K_FORMAT: tl.constexpr,
):  # fmt: skip
    """Multiply queries ``[BM, D]`` and keys ``[BN, D]``; fp32 ``[BM, BN]``, int32 for the form ``int8``."""
    if FORM == "packed" and IS_INTERPRETED and K_FORMAT == "nvfp4":
        # The interpreter reads every block scale as E8M0.
        s = dot(_nvfp4_values(q, q_scale), tl.trans(_nvfp4_values(k, k_scale)))
    elif FORM == "packed":
        Q_ELEMENT: tl.constexpr = "e4m3" if Q_FORMAT == "mxfp8" else "e2m1"
        K_ELEMENT: tl.constexpr = "e4m3" if K_FORMAT == "mxfp8" else "e2m1"
        s = tl.dot_scaled(q, q_scale, Q_ELEMENT, tl.trans(k), k_scale, K_ELEMENT)
    elif FORM == "int8":
        s = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
    else:
        s = dot(q, tl.trans(k))
    return s


class Visibility(NamedTuple):
    """Which keys the queries of a head attend to, besides causality."""

    start: Any  # position of the first visible key
    end: Any  # position after the last one
    window: Any  # sliding window, or ``None``
    mask_ptr: Any  # uint8 ``[Tq, Tk]``, or ``None``
    stride_q: Any  # of the mask
    stride_k: Any  # of the mask
    q_start: Any  # position of query 0
    q_end: Any  # position after the last query
    k_start: Any  # position of key 0


@triton.jit
def logits(s, scale, qk_bias, softcap, q_pos, k_pos, visibility, is_masked, IS_CAUSAL: tl.constexpr):
    """Return the base-2 logits of a block: scaled, softcapped and masked scores, fp32 ``[BM, BN]``.

    ``scale`` ``[BM]`` converts scores to base-2 logits. ``qk_bias`` ``[BM]`` is the bias of key smoothing, or
    ``None``. ``softcap`` is in base 2, or ``None``. ``is_masked``: a query may not attend to a key of the block.
    """
    s = s.to(tl.float32) * scale[:, None]
    if qk_bias is not None:
        s += qk_bias[:, None]
    if softcap is not None:
        s = apply_softcap(s, softcap)
    if is_masked:
        is_visible = ((k_pos >= visibility.start) & (k_pos < visibility.end))[None, :]
        distance = q_pos[:, None] - k_pos[None, :]
        if IS_CAUSAL:
            is_visible = is_visible & (distance >= 0)
        if visibility.window is not None:
            if IS_CAUSAL:
                is_visible = is_visible & (distance < visibility.window)
            else:
                is_visible = is_visible & (tl.abs(distance) <= visibility.window)
        if visibility.mask_ptr is not None:
            is_row = (q_pos >= visibility.q_start) & (q_pos < visibility.q_end)
            offset_q = (q_pos - visibility.q_start).to(tl.int64) * visibility.stride_q
            offset_k = (k_pos - visibility.k_start).to(tl.int64) * visibility.stride_k
            allowed = tl.load(
                visibility.mask_ptr + offset_q[:, None] + offset_k[None, :], mask=is_row[:, None] & is_visible, other=0
            )
            is_visible = is_visible & (allowed != 0)
        s = tl.where(is_visible, s, float("-inf"))
    return s


@triton.jit
def attend(acc, m_i, l_i, s, scale, v, IS_SCALED: tl.constexpr, VALUE_FORM: tl.constexpr, IS_PV_FP8: tl.constexpr):
    """Update the online softmax and the output ``[BM, DV]`` with scores ``[BM, BN]`` and values ``[BN, DV]``.

    ``scale`` ``[BM]`` converts scores to base-2 logits; if ``IS_SCALED``, they are logits already. With FP8
    probabilities in low tiles, all probabilities are scaled by 2^8, which fits E4M3's range; those of 16-bit values are
    not rounded to E4M3.
    """
    EXPONENT: tl.constexpr = 8.0 if IS_PV_FP8 else 0.0
    if IS_SCALED:
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.math.exp2(s + (EXPONENT - m_new)[:, None])
    else:
        # Hopper has a three-input maximum for integers: 746 us instead of 809 us at 8K.
        m_new = tl.maximum(m_i, tl.max(s, 1).to(tl.float32) * scale)
        p = tl.math.exp2(s.to(tl.float32) * scale[:, None] + (EXPONENT - m_new)[:, None])
    alpha = tl.math.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, 1)
    if VALUE_FORM == "e4m3":
        # A fresh accumulator per block: Hopper's FP8 MMAs accumulate in fewer bits than fp32.
        acc = acc * alpha[:, None] + dot(to_e4m3(permute_keys(p)), v)
    else:
        if IS_PV_FP8 and VALUE_FORM == "dequantized":
            p = round_to_e4m3(p)
        acc = acc * alpha[:, None] + dot(p.to(v.dtype), v)
    return acc, m_new, l_i
