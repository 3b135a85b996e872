"""What a layer of a :class:`~dma_hf.DMACache` returns for new keys and values.

A model passes the result of ``Cache.update`` to its attention function. Here that result is a :class:`CachedStates`, a
tensor of the expected shape, ``[B, Hkv, kv_len, D]``, that stores a single number and refers to the layer. ``dma_mxfp``
attends to the packed layer itself. Any other operation sees the dequantized keys or values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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


class RepeatedUpdate(NamedTuple):
    """The update of a step's first layer. Those of other layers of the same kind need no further checks.

    ``kind`` is what :func:`kind_of_update` returned. ``states`` have the shapes of the :class:`CachedStates`.
    """

    kind: tuple[Any, ...]
    kv_len: int
    kv_offset: int
    states: tuple[Tensor, Tensor]


def kind_of_update(layer: Any, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """Return what the checks of an update depend on: the layer, its storage, and new keys and values."""
    storage: LayerStorage = layer.storage
    keys, values = storage.key_residual, storage.value_residual
    return (
        *(layer.tokens, layer.window, layer.device, storage.lengths.device),
        *(key.shape, key.dtype, key.device, type(key)),
        *(value.shape, value.dtype, value.device, type(value)),
        *(keys.shape, keys.dtype, values.shape),
    )


Update = tuple[Any, Step]
"""A layer, and an update of it."""


class CachedStates(Deferred):
    """Keys or values of a cache layer, ``[B, Hkv, kv_len, D]``. Read-only.

    Attributes:
        dma_update: The layer, and the update that returned the states.
        dma_is_value: Whether the states are values.
    """

    dma_update: Update
    dma_is_value = False

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
        values.dma_is_value = True
        return keys, values

    def dense(self) -> Tensor:
        """Return the dequantized states as a plain tensor."""
        layer, step = self.dma_update
        states: tuple[Tensor, Tensor] = layer.dense(step)
        return states[int(self.dma_is_value)]


def update_of(key: Tensor, value: Tensor) -> Update | None:
    """Return the layer and the update that keys and values come from, or ``None`` if they are plain tensors."""
    if not (isinstance(key, CachedStates) and isinstance(value, CachedStates)):
        return None
    return key.dma_update if key.dma_update is value.dma_update else None
