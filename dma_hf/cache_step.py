"""One update of a cache layer, and its result as Transformers hands it on: dequantised only if something looks at it.

A model passes what ``Cache.update`` returns to its attention function. :class:`CachedStates` is a tensor of the shape
that is expected there, ``[B, Hkv, kv_len, D]``, which stores a single number and knows the cache layer that it stands
for. ``dma_mxfp`` attends to the packed cache itself; any other operation sees the dequantised keys or values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .compact_mask import METADATA, device_only


@dataclass(eq=False)
class Step:
    """New keys and values of a layer, from when they are handed over until they are stored.

    A layer holds those that are not stored yet. They do not know the layer: a cache that goes out of use in the middle
    of a step, as when memory runs out, is then freed at once, not when Python looks for cycles.

    Attributes:
        key: Keys, raw, ``[B, Hkv, T, D]``.
        value: Values, raw, ``[B, Hkv, T, Dv]``.
        kv_len: How many tokens the model's mask speaks of.
        kv_offset: Number of the first of them, padding included.
        is_first: Whether the layer was empty before.
        is_stored: Whether they have been stored.
        dense: All keys and values that the mask speaks of, once something has looked at them.
    """

    key: Tensor
    value: Tensor
    kv_len: int
    kv_offset: int
    is_first: bool
    is_stored: bool = False
    dense: tuple[Tensor, Tensor] | None = None


class CachedStates(Tensor):
    """Keys or values of a cache layer, ``[B, Hkv, kv_len, D]``. Read-only.

    Attributes:
        dma_layer: The layer, a :class:`~dma_hf.cache_layers.DMALayer`.
        dma_step: The update that returned them.
        dma_is_value: Whether they are the values.
    """

    dma_layer: Any
    dma_step: Step
    dma_is_value: bool

    @staticmethod
    def of(layer: Any, step: Step, is_value: bool) -> Tensor:
        """Return the states of an update, in the dtype and on the device of what came."""
        like = step.value if is_value else step.key
        number = torch.zeros((1, 1, 1, 1), dtype=like.dtype, device=like.device)
        shape = like.shape[0], like.shape[1], step.kv_len, like.shape[3]
        states: Tensor = number.expand(shape).as_subclass(CachedStates)
        states.dma_layer = layer  # type: ignore[attr-defined]
        states.dma_step = step  # type: ignore[attr-defined]
        states.dma_is_value = is_value  # type: ignore[attr-defined]
        return states

    def dense(self) -> Tensor:
        """Return them dequantised, a plain tensor."""
        states: tuple[Tensor, Tensor] = self.dma_layer.dense(self.dma_step)
        return states[int(self.dma_is_value)]

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


def update_of(key: Tensor, value: Tensor) -> tuple[Any, Step] | None:
    """Return the layer and the update that keys and values come from, ``None`` if they are plain tensors."""
    step: Step | None = getattr(key, "dma_step", None)
    other: object = getattr(value, "dma_step", None)
    return None if step is None or other is not step else (key.dma_layer, step)  # type: ignore[attr-defined]


_UNCHANGED = frozenset({Tensor.contiguous, Tensor.detach, torch.detach})
