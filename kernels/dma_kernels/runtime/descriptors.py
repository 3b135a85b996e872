"""Tensor arguments of kernels: pointers with strides, or descriptors of the tensor memory accelerator (TMA)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


def is_describable(tensor: Any) -> bool:
    """Whether TMA can load ``[B, H, T, D]``, a tensor or its layout.

    Channels are contiguous; the address and the other strides are multiples of 16 bytes.
    """
    unit = 16 // tensor.dtype.itemsize
    *outer, channels = tensor.stride()
    return (
        channels == 1
        and tensor.numel() > 0
        and tensor.data_ptr() % 16 == 0
        and all(
            size == 1 or (stride > 0 and stride % unit == 0) for size, stride in zip(tensor.shape, outer, strict=False)
        )
    )


def head_blocks(tensor: Any, rows: int, columns: int) -> tuple[list[int], list[int], list[int]]:
    """Return the shape, strides and block shape of a descriptor that loads rows of a head of ``[B, H, T, D]``."""
    unit = 16 // tensor.dtype.itemsize
    # The stride of a single row or head is never used; the descriptor still checks it.
    strides = [*(max(stride, unit) // unit * unit for stride in tensor.stride()[:3]), 1]
    return list(tensor.shape), strides, [1, 1, rows, columns]


def matrix_blocks(tensor: Any, rows: int, columns: int) -> tuple[list[int], list[int], list[int]]:
    """Return the same for a contiguous tensor as a matrix of its last dimension, with 16-byte aligned rows."""
    width = tensor.shape[-1]
    return [tensor.numel() // width, width], [width, 1], [rows, columns]


def broadcast_strides(tensor: Any) -> list[int]:
    """Return strides that are 0 in dimensions of size 1."""
    return [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


class Strided(NamedTuple):
    """A tensor ``[B, H, T, D]`` and its strides in elements; ``ptr`` is ``None`` for a missing tensor."""

    ptr: Any
    stride_b: int
    stride_h: int
    stride_t: int
    stride_d: int

    @classmethod
    def of(cls, tensor: Tensor | None) -> Strided:
        """Return the argument for a tensor."""
        return cls(None, 0, 0, 0, 0) if tensor is None else cls(tensor, *tensor.stride())
