"""Transforms of queries and keys that reduce quantization errors. In exact arithmetic they do not change the result.

Both are defined to the bit, so that kernels can be compared with them. The Hadamard butterflies run in fp32, from the
smallest stride to the largest. The mean key is rounded to bfloat16, which hides the order of summation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .call import check_floating, check_kind
from .formats import TILE


def hadamard_size(head_dim: int) -> int:
    """Return the order of the Hadamard blocks for a head dimension: its largest power-of-two divisor.

    A head dimension of 96 is rotated by three blocks of order 32, one of 128 by a single block.
    """
    return head_dim & -head_dim


def hadamard_transform(x: Tensor) -> Tensor:
    """Multiply the last dimension by the (block-diagonal) Sylvester-Hadamard matrix, whose entries are 1, -1 and 0.

    Returns fp32 (fp64 for fp64). Applied twice, it multiplies by :func:`hadamard_size`.
    """
    head_dim = x.shape[-1]
    size = hadamard_size(head_dim)
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    stride = 1
    while stride < size:
        pairs = y.reshape(*x.shape[:-1], head_dim // (2 * stride), 2, stride)
        even, odd = pairs.unbind(-2)
        y = torch.stack((even + odd, even - odd), dim=-2)
        stride *= 2
    return y.reshape(x.shape)


def hadamard_rotate(x: Tensor) -> Tensor:
    """Multiply the last dimension by the orthonormal (block-diagonal) Sylvester-Hadamard matrix.

    Returns fp32 (fp64 for fp64). The matrix is symmetric, so the transform is its own inverse.

    Raises:
        TypeError: ``x`` is not a floating-point tensor.
        ValueError: ``x`` has no channels.
    """
    check_floating("x", x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must be [..., head_dim], got shape {list(x.shape)}")
    return hadamard_transform(x) * math.pow(hadamard_size(x.shape[-1]), -0.5)


def key_mean(key: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the mean of the first tile of each batch row and kv head, which ``smooth_k`` subtracts.

    The softmax does not depend on it, so any vector near the keys works. The first tile is known before the first low
    tile exists. So the mean does not depend on the length, and decoding and prefill quantize the same numbers.

    Args:
        key: ``[B, H, T, D]``.
        visible: Visible keys, boolean ``[B, T]``; all by default. The first 128 of them are averaged.

    Returns:
        fp32 (fp64 for fp64) ``[B, H, 1, D]``, rounded to bfloat16; 0 in rows without visible keys.

    Raises:
        TypeError: ``key`` is not a floating-point tensor, or ``visible`` is not a tensor.
        ValueError: ``key`` does not have four dimensions, or ``visible`` is not boolean ``[B, T]`` on its device.
    """
    check_floating("key", key)
    if key.ndim != 4:
        raise ValueError(f"key must be [batch, heads, tokens, head_dim], got shape {list(key.shape)}")
    if visible is not None:
        check_kind("visible", visible, key, "key")
        expected = (key.shape[0], key.shape[2])
        if visible.dtype != torch.bool or visible.shape != expected:
            raise ValueError(f"visible must be boolean {list(expected)}, got {visible.dtype} {list(visible.shape)}")
    dtype = torch.promote_types(key.dtype, torch.float32)
    if visible is None:
        first = key[:, :, :TILE].to(dtype)
        mean = first.sum(-2, keepdim=True) / max(first.shape[-2], 1)
    else:
        counted = first_tile(visible)[:, None, :, None]
        total = key.to(dtype).masked_fill(~counted, 0.0).sum(-2, keepdim=True)
        mean = total / counted.sum(-2, keepdim=True).clamp(min=1)
    return mean.to(torch.bfloat16).to(dtype)


def first_tile(visible: Tensor) -> Tensor:
    """Return which of the visible tokens, boolean ``[B, T]``, are the first 128 of their row."""
    return visible & (visible.cumsum(-1) <= TILE)
