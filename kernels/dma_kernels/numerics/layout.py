"""Tensor layouts, which launch plans depend on, and what kernels take them as: strides, or TMA descriptors.

TMA is the tensor memory accelerator.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

ALIGNMENT = 16
"""Triton specializes on pointers (in bytes) and integers that are multiples of this."""


class TensorLayout(NamedTuple):
    """Everything about a tensor except its contents and address; decides what is launched."""

    shape: torch.Size
    strides: tuple[int, ...]  # in elements
    dtype: torch.dtype
    device: torch.device
    misalignment: int  # its address modulo ``ALIGNMENT``

    @classmethod
    def of(cls, tensor: Any) -> Self:
        """Return the layout of a tensor."""
        # Hot path, three layouts per call: the constructor of named tuples is Python code.
        fields = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % ALIGNMENT)
        return tuple.__new__(cls, fields)

    @classmethod
    def dense(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        """Return the layout of a new, contiguous tensor."""
        return cls(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype, device, 0)

    @property
    def ndim(self) -> int:
        """Dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel() * self.dtype.itemsize

    def data_ptr(self) -> int:
        """Return a placeholder address with the alignment of the tensor."""
        return self.misalignment

    def stride(self, dim: int | None = None) -> Any:
        """Return the strides or one of them, as a tensor does."""
        return self.strides if dim is None else self.strides[dim]

    def is_contiguous(self) -> bool:
        """Return whether the tensor is contiguous."""
        dense = self.dense(self.shape, self.dtype, self.device)
        pairs = zip(self.shape, self.strides, dense.strides, strict=True)
        return all(size == 1 or stride == expected for size, stride, expected in pairs)


def layout_of(tensor: Any) -> TensorLayout | None:
    """Return the layout of a tensor; ``None`` for a missing one."""
    return None if tensor is None else TensorLayout.of(tensor)


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
