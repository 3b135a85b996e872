"""The keys or values of a cache as Transformers hands them on, dequantised only if something looks at them.

A model passes what ``Cache.update`` returns to its attention function. :class:`CachedStates` is a tensor of the shape
that is expected there, ``[B, Hkv, kv_len, D]``, which stores a single number and knows the cache layer that it stands
for. ``dma_mxfp`` attends to the packed cache itself; any other operation sees the dequantised keys or values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .compact_mask import METADATA, device_only

if TYPE_CHECKING:
    from .cache_step import Step

STEP = "dma_step"
"""Attribute under which keys and values carry the :class:`~dma_hf.cache_step.Step` that they belong to."""


class CachedStates(Tensor):
    """Keys or values of a cache layer, ``[B, Hkv, kv_len, D]``. Read-only.

    Attributes:
        dma_step: The update that returned them.
        dma_is_value: Whether they are the values.
    """

    dma_step: Step
    dma_is_value: bool

    @staticmethod
    def of(step: Step, like: Tensor, kv_len: int, is_value: bool) -> Tensor:
        """Return states of ``kv_len`` tokens with the other dimensions, the dtype and the device of ``like``."""
        number = torch.zeros((1, 1, 1, 1), dtype=like.dtype, device=like.device)
        states: Tensor = number.expand(like.shape[0], like.shape[1], kv_len, like.shape[3]).as_subclass(CachedStates)
        states.dma_step = step  # type: ignore[attr-defined]
        states.dma_is_value = is_value  # type: ignore[attr-defined]
        return states

    def dense(self) -> Tensor:
        """Return them dequantised, a plain tensor."""
        return self.dma_step.dense()[int(self.dma_is_value)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what concerns the states as a whole, and compute everything else on dequantised ones."""
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _UNCHANGED:
            return args[0]
        if func is Tensor.to and device_only(args[1:], kwargs) == args[0].device:
            return args[0]
        args, kwargs = tree_map_only(CachedStates, CachedStates.dense, (args, kwargs))
        return func(*args, **kwargs)


def step_of(key: Tensor, value: Tensor) -> Step | None:
    """Return the update that keys and values come from, ``None`` if they are plain tensors."""
    step: Step | None = getattr(key, STEP, None)
    return step if step is not None and getattr(value, STEP, None) is step else None


_UNCHANGED = frozenset({Tensor.contiguous, Tensor.detach, torch.detach})
