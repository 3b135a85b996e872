"""Tensor layouts, which launch plans depend on."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, Self

import torch

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
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        return cls(torch.Size(shape), tuple(reversed(strides)), dtype, device, 0)

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
