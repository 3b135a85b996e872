"""Transforms of queries and keys that real arithmetic does not see and quantisation profits from.

Both are defined to the bit, so that a fused kernel can be held against them: the Hadamard butterflies run from the
smallest stride to the largest in fp32, and the mean key is rounded to bfloat16, which hides the order of its sum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hadamard_size(head_dim: int) -> int:
    """Return the order of the Hadamard blocks for a head dimension: its largest power-of-two divisor.

    A head dimension of 96 is rotated by three blocks of order 32, one of 128 by a single block.
    """
    return head_dim & -head_dim


def hadamard_rotate(x: Tensor) -> Tensor:
    """Multiply the last dimension by the orthonormal (block-diagonal) Sylvester-Hadamard matrix.

    Args:
        x: ``[..., D]``, floating point.

    Returns:
        fp32 (fp64 for fp64) ``[..., D]``. The matrix is symmetric, so the transform is its own inverse.
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
    return y.reshape(x.shape) * math.pow(size, -0.5)


def key_mean(key: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the mean key of each batch row and kv head, the vector that ``smooth_k`` subtracts.

    Args:
        key: ``[B, H, T, D]``.
        visible: Boolean ``[B, T]``, the keys to average over; all where it is ``None``.

    Returns:
        fp32 (fp64 for fp64) ``[B, H, 1, D]`` whose values are bfloat16 numbers; 0 where no key is visible.
    """
    key = key.to(torch.promote_types(key.dtype, torch.float32))
    if visible is None:
        mean = key.sum(-2, keepdim=True) / max(key.shape[-2], 1)
    else:
        weight = visible[:, None, :, None]
        mean = key.masked_fill(~weight, 0.0).sum(-2, keepdim=True) / weight.sum(-2, keepdim=True).clamp(min=1)
    return mean.to(torch.bfloat16).to(key.dtype)
