"""Layouts of tensors: what a call may be planned by."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, Self

import torch

ALIGNMENT = 16
"""Triton compiles other code for pointers (in bytes) and integers that this divides."""


class TensorLayout(NamedTuple):
    """All of a tensor that decides what is launched: everything except its contents and its address."""

    shape: torch.Size
    strides: tuple[int, ...]  # in elements
    dtype: torch.dtype
    device: torch.device
    misalignment: int  # its address modulo ``ALIGNMENT``

    @classmethod
    def of(cls, tensor: Any) -> Self:
        """Return the layout of a tensor."""
        # Without the constructor of named tuples, which is Python: every call makes three layouts.
        fields = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % ALIGNMENT)
        return tuple.__new__(cls, fields)

    @classmethod
    def dense(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        """Return the layout of a new tensor."""
        return cls(torch.Size(shape), dense_strides(shape), dtype, device, 0)

    @property
    def ndim(self) -> int:
        """Dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def stride(self) -> tuple[int, ...]:
        """Return the strides, as a tensor does."""
        return self.strides

    def is_contiguous(self) -> bool:
        """Return whether the elements lie next to each other in order."""
        pairs = zip(self.shape, self.strides, dense_strides(self.shape), strict=True)
        return all(size == 1 or stride == dense for size, stride, dense in pairs)


def layout_of(tensor: Any) -> TensorLayout | None:
    """Return the layout of a tensor that may be missing."""
    return None if tensor is None else TensorLayout.of(tensor)


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
