"""One update of a cache layer: new keys and values, and the attention to everything that the layer then holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from dma_kernels import Recipe, attention
from dma_kernels.cache.api import cached_attention, restore
from dma_kernels.numerics.formats import TILE
from torch import Tensor

from .compact_mask import MaskGeometry

if TYPE_CHECKING:
    from .cache_layers import DMALayer

DECODED_AT_ONCE = 16
"""Calls with more queries, prompts above all, may wait for the device to check what they were given."""


class NewStates:
    """New keys and values of a layer, from when they are handed over until they are stored.

    A layer holds those that are not stored yet. They do not know the layer: a cache that goes out of use in the middle
    of a step, as when memory runs out, is then freed at once, not when Python looks for cycles.

    Attributes:
        key: Keys, raw, ``[B, Hkv, T, D]``.
        value: Values, raw, ``[B, Hkv, T, Dv]``.
        kv_offset: Number of the first token that the model's mask speaks of, padding included.
        kv_len: How many tokens it speaks of.
        is_first: Whether the layer was empty before.
        is_stored: Whether they have been stored.
    """

    def __init__(self, layer: DMALayer, key: Tensor, value: Tensor) -> None:
        self.key = key
        self.value = value
        self.kv_len, self.kv_offset = layer.get_mask_sizes(key.shape[2])
        self.is_first = layer.is_empty
        self.is_stored = False


class Step:
    """One update of a layer, and the attention to it.

    Attributes:
        layer: The cache layer.
        new: What the update brought.
    """

    def __init__(self, layer: DMALayer, new: NewStates) -> None:
        self.layer = layer
        self.new = new
        self._dense: tuple[Tensor, Tensor] | None = None

    def attend(
        self,
        query: Tensor,
        geometry: MaskGeometry,
        recipe: Recipe,
        *,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
        backend: str,
    ) -> Tensor:
        """Return the attention of ``[B, Hq, T, D]`` queries to the layer, and store the new keys.

        Raises:
            ValueError: Something of the call is not valid; the new keys are dropped then, and the cache is as it was.
        """
        layer, new = self.layer, self.new
        layer.pending = None  # whatever happens now, it is not pending any more
        storage = layer.storage
        assert storage is not None
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "backend": backend}
        if new.is_first and (not new.is_stored or query.shape[2] > TILE):
            pattern = geometry.pattern
            length = new.key.shape[2]
            if pattern is not None and pattern.shape[3] > 1:
                pattern = pattern[..., :length]
            # What else the mask of a static cache hides is not there yet.
            is_seen = geometry.is_unpadded and length <= geometry.q_len
            out: Tensor = attention(
                query,
                new.key,
                new.value,
                recipe,
                is_causal=geometry.is_causal,
                window=geometry.window,
                q_offset=geometry.kv_offset,
                kv_offset=geometry.kv_offset,
                kv_range=None if is_seen else geometry.kv_range,
                mask=pattern,
                **options,
            )
            if not new.is_stored:
                layer.settle(new, geometry)
                layer.store(new)
            return out
        if new.is_stored and query.shape[2] > TILE:
            raise ValueError(
                f"{query.shape[2]} queries came to keys that another layer has stored already; where layers share keys "
                f"give a prompt as a whole, or in chunks of at most {TILE} tokens"
            )
        if not new.is_stored:
            layer.settle(new, geometry)
            layer.make_room(new.key.shape[2])
        mask = self._mask(geometry)
        out = cached_attention(
            query,
            None if new.is_stored else new.key,
            None if new.is_stored else new.value,
            storage,
            is_causal=geometry.is_causal,
            window=geometry.window or storage.window,
            mask=mask,
            mask_position=None if mask is None else layer.position_of(new),
            **options,
        )
        if not new.is_stored:
            layer.count(new)
        return out

    def dense(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values that the mask speaks of, dequantised, and store the new ones.

        The new ones are as they came, unless they have been stored already.
        """
        if self._dense is not None:
            return self._dense
        new, storage = self.new, self.layer.storage
        assert storage is not None
        keys, values = restore(storage, self.layer.position_of(new), new.kv_len)
        if not new.is_stored:
            index = self.layer.tokens - new.kv_offset + torch.arange(new.key.shape[2], device=new.key.device)
            keys = keys.index_copy(2, index, new.key.detach())
            values = values.index_copy(2, index, new.value.detach())
            self.layer.store(new)
        self._dense = keys, values
        return keys, values

    def _mask(self, geometry: MaskGeometry) -> Tensor | None:
        """Return what the mask hides beyond what positions say, boolean ``[B, H, T, kv_len]``; mostly ``None``."""
        hidden, visible = geometry.pattern, geometry.kv_range
        if visible is None or (hidden is None and self._is_plain(visible)):
            return hidden
        index = torch.arange(self.new.kv_len, device=visible.device)
        seen = ((index >= visible[:, :1]) & (index < visible[:, 1:]))[:, None, None]
        return seen if hidden is None else seen & hidden

    def _is_plain(self, visible: Tensor) -> bool:
        """Return whether a range of visible keys, integer ``[B, 2]``, is all of the row's keys.

        That waits for the device, so all layers of a step share one answer: the mask of the step was made a moment
        before the first of them, and waited too. A static cache does not wait in a step of decoding: the device raises.
        """
        new, layer = self.new, self.layer
        is_static = isinstance(layer.tokens, Tensor)
        known = None if is_static else layer.owner.plain
        if known is not None and known[0] is visible:
            return known[1]
        length = new.key.shape[2]
        start = layer.position_of(new)
        end = layer.tokens + (0 if new.is_stored else length) - new.kv_offset
        is_whole = (visible[:, 0] == (-start).clamp(min=0)) & (visible[:, 1] == end)
        is_whole = (is_whole | (start + end <= 0)).all()
        if torch.compiler.is_compiling() or (is_static and visible.is_cuda and length <= DECODED_AT_ONCE):
            torch._assert_async(is_whole, _CHANGED)
            return True
        is_plain = bool(is_whole)
        layer.owner.plain = visible, is_plain
        return is_plain


_CHANGED = (
    "the attention mask hides keys that it showed before, or shows padding that it hid, which a static cache cannot "
    "follow in a step of decoding; use DMACache(config) without max_cache_len, or keep the mask"
)
