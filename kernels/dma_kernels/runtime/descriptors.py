"""What of a tensor the copy engine of Hopper and later chips can be told."""

from __future__ import annotations

from torch import Tensor


def is_describable(tensor: Tensor) -> bool:
    """Whether a descriptor can describe ``[B, H, T, D]``: channels side by side, all else at multiples of 16 bytes."""
    unit = 16 // tensor.element_size()
    *outer, channels = tensor.stride()
    sizes = tensor.shape
    return (
        channels == 1
        and tensor.numel() > 0
        and tensor.data_ptr() % 16 == 0
        and all(size == 1 or (stride > 0 and stride % unit == 0) for size, stride in zip(sizes, outer, strict=False))
    )


def head_strides(tensor: Tensor) -> list[int]:
    """Return the strides of ``[B, H, T, D]`` as a descriptor takes them.

    The stride of a single row or head is never used; the descriptor still checks it.
    """
    unit = 16 // tensor.element_size()
    return [*(max(stride, unit) // unit * unit for stride in tensor.stride()[:3]), 1]
