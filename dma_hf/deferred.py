"""Tensors whose values are computed only if an operation needs them: attention masks, and cached keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

METADATA = frozenset(
    {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")}
    | {getattr(Tensor, name).__get__ for name in ("is_leaf", "grad_fn", "_base", "is_nested", "is_sparse", "is_meta")}
    | {getattr(Tensor, name).__get__ for name in ("is_quantized", "is_cuda", "is_cpu", "is_sparse_csr", "_version")}
    | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous}
    | {Tensor.is_floating_point, Tensor.is_complex, Tensor._is_view, Tensor.get_device, Tensor.__len__}
)
"""Operations that a tensor subclass answers without its values."""
_UNCHANGED = frozenset({Tensor.contiguous, Tensor.detach, torch.detach})


class Deferred(Tensor):
    """A read-only tensor with a shape, a dtype and a device, which stores a single element."""

    def dense(self) -> Tensor:
        """Return a plain tensor with the values."""
        raise NotImplementedError

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation that a subclass computes without the values, or ``NotImplemented``."""
        return NotImplemented

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer queries of metadata, and compute everything else on the values."""
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _UNCHANGED:
            return args[0]
        if func is Tensor.to and device_only(args[1:], kwargs) == args[0].device:
            return args[0]
        answer = cls.answer(func, args, kwargs)
        if answer is not NotImplemented:
            return answer
        args, kwargs = tree_map_only(Deferred, lambda tensor: tensor.dense(), (args, kwargs))
        return func(*args, **kwargs)


def device_only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device in these arguments of ``Tensor.to``, or ``None`` if they change anything else."""
    device = args[0] if args else kwargs.get("device")
    others = [*args[1:], *(value for key, value in kwargs.items() if key not in ("device", "non_blocking"))]
    if isinstance(device, (str, int, torch.device)) and all(value is None for value in others):
        return torch.device(device)
    return None
