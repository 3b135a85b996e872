"""What a layer of a :class:`~dma_hf.DMACache` returns for new keys and values.

A model passes the result of ``Cache.update`` to its attention function. Here that result is a :class:`CachedStates`, a
tensor of the expected shape, ``[B, Hkv, kv_len, D]``, that stores a single number and refers to the layer. ``dma_mxfp``
attends to the packed layer itself. Any other operation sees the dequantized keys or values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from dma_kernels.cache.storage import LayerStorage
from torch import Tensor

from .deferred import Deferred


@dataclass(eq=False)
class Step:
    """New keys and values of a layer, between ``update`` and storing them.

    It has no reference to the layer, so a cache that is dropped in the middle of a step (out of memory) is freed at
    once, without a garbage collection.

    Attributes:
        key: Keys in 16 bits, ``[B, Hkv, T, D]``.
        value: Values in 16 bits, ``[B, Hkv, T, Dv]``.
        kv_len: Number of tokens that the model's mask covers.
        kv_offset: Index of the first of them, padding included.
        is_first: Whether the layer was empty before.
        is_stored: Whether the tokens have been stored.
        dense: All keys and values that the mask covers, dequantized, if an operation has needed them.
    """

    key: Tensor
    value: Tensor
    kv_len: int
    kv_offset: int
    is_first: bool
    is_stored: bool = False
    dense: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, eq=False)
class RepeatedUpdate:
    """The update of a step's first layer. Those of the other layers with the same shapes need no further checks.

    Attributes:
        tokens: Tokens in the layer before the update.
        key: Shape, dtype and device of the new keys.
        value: The same of the new values.
        stored: Shapes, dtype and device of the storage.
        window: Window of the layer.
        kv_len: See :class:`Step`.
        kv_offset: See :class:`Step`.
        states: Tensors with the shapes of the :class:`CachedStates`.
    """

    tokens: int
    key: tuple[Any, ...]
    value: tuple[Any, ...]
    stored: tuple[Any, ...]
    window: int | None
    kv_len: int
    kv_offset: int
    states: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, layer: Any, new: Step, states: tuple[Tensor, Tensor]) -> RepeatedUpdate:
        """Return the update ``new`` of a layer."""
        numbers = (layer.window, new.kv_len, new.kv_offset)
        return cls(layer.tokens, _kind(new.key), _kind(new.value), _kinds(layer.storage), *numbers, states)

    def covers(self, layer: Any, key: Tensor, value: Tensor) -> bool:
        """Return whether the update of another layer, with the keys ``key``, is like this one."""
        if not (layer.is_initialized and layer.tokens == self.tokens and layer.window == self.window):
            return False
        storage: LayerStorage = layer.storage  # calls of `_kind` would take longer than the comparison
        keys, values = storage.key_residual, storage.value_residual
        return (
            layer.device == key.device
            and (key.shape, key.dtype, key.device, type(key)) == self.key
            and (value.shape, value.dtype, value.device, type(value)) == self.value
            and (keys.shape, values.shape, keys.dtype, storage.lengths.device) == self.stored
        )


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, type(tensor)


def _kinds(storage: LayerStorage) -> tuple[Any, ...]:
    return storage.key_residual.shape, storage.value_residual.shape, storage.key_residual.dtype, storage.lengths.device


class CachedStates(Deferred):
    """Keys or values of a cache layer, ``[B, Hkv, kv_len, D]``. Read-only.

    Attributes:
        dma_update: The layer, and the update that returned the states.
        dma_is_value: Whether the states are values.
    """

    dma_update: tuple[Any, Step]
    dma_is_value: bool

    @staticmethod
    def like(tensor: Tensor, kv_len: int) -> Tensor:
        """Return a tensor with the shape, dtype and device of states, of which no element is ever read."""
        batch, heads, _, channels = tensor.shape
        number = torch.empty((1, 1, 1, 1), dtype=tensor.dtype, device=tensor.device)
        return number.expand(batch, heads, kv_len, channels)

    @staticmethod
    def of(layer: Any, step: Step, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of an update, with the shapes of :meth:`like`."""
        keys: Any = key.as_subclass(CachedStates)
        values: Any = value.as_subclass(CachedStates)
        keys.dma_update = values.dma_update = layer, step
        keys.dma_is_value, values.dma_is_value = False, True
        return keys, values

    def dense(self) -> Tensor:
        """Return the dequantized states as a plain tensor."""
        layer, step = self.dma_update
        states: tuple[Tensor, Tensor] = layer.dense(step)
        return states[int(self.dma_is_value)]


def update_of(key: Tensor, value: Tensor) -> tuple[Any, Step] | None:
    """Return the layer and the update that keys and values come from, or ``None`` if they are plain tensors."""
    update: tuple[Any, Step] | None = getattr(key, "dma_update", None)
    return update if update is not None and getattr(value, "dma_update", None) is update else None
