"""``DMACache``: the packed KV cache, for ``generate`` and ``forward``."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.numerics.call import is_int
from transformers import Cache, DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .cache_layers import DMALayer, DMAStaticLayer, Owner, holds_states, lasting
from .config import cache_format_of, settings_of
from .support import WITHOUT_PACKED_CACHE, cross_attention_layers, refuse_packed_cache

DEFAULT_FORMAT = "int8"
"""The format of a cache if neither the caller nor the model names one. It is almost lossless."""


# A DynamicCache, because EncoderDecoderCache crops and repeats no other class.
class DMACache(DynamicCache):  # type: ignore[misc]
    """A KV cache that keeps sink tiles and the band in 16 bits, and all tiles between them in low precision.

    Keys and values are quantized once, in tiles of 128 tokens::

        model.generate(**inputs, cache=DMACache(model.config, "int4"))

    Layers that run ``dma_mxfp`` compute a prompt with the model's recipe. Every later step attends to the packed keys
    and values. With any other attention implementation the cache returns dequantized keys and values. Layers that hold
    other states (Mamba, linear attention, an indexer) are those of Transformers. So are layers that hold the keys of an
    image for cross-attention (Mllama), which stay in 16 bits.

    Args:
        config: The model's configuration. In ``forward``, layers ask it whether they run ``dma_mxfp``: pass
            ``model.config``, not a copy.
        cache: Format: ``int8`` or ``int4``, or a sequence with one for each layer. The default is the ``cache`` of the
            model's settings, or else ``int8``.
        max_cache_len: Size in tokens of a static cache, for ``torch.compile`` and CUDA graphs. ``None`` grows.
        offloading: Whether layers are stored on the CPU until they are needed.
        offload_only_non_sliding: Whether layers with a sliding window, which are small, stay on the GPU.

    Raises:
        TypeError: ``config`` is not a model's configuration.
        ValueError: There is no such format, there are more or fewer formats than layers, or ``max_cache_len`` is below
            1; or the model cannot use a packed cache (multi-head latent attention).
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        cache: str | Sequence[str] | None = None,
        *,
        max_cache_len: int | None = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be a model's configuration (model.config), got {type(config).__name__}")
        if max_cache_len is not None and not (is_int(max_cache_len) and max_cache_len >= 1):
            raise ValueError(f"max_cache_len must be an integer of at least 1, got {max_cache_len!r}")
        refuse_packed_cache(config)
        decoder = config.get_text_config(decoder=True)
        settings = settings_of(decoder)
        cache = settings.config.cache or DEFAULT_FORMAT if cache is None else cache
        if max_cache_len is None:
            upstream = _growing_layers(config, decoder)
        else:
            upstream = StaticCache(config, max_cache_len).layers
        given = tuple(cache) if isinstance(cache, list | tuple) else str(cache)
        names = given if isinstance(given, tuple) else (given,) * len(upstream)
        if len(names) != len(upstream):
            raise ValueError(
                f"cache must name one format, or one for each of the model's {len(upstream)} layers; got {len(names)}"
            )
        for name in dict.fromkeys(names):
            cache_format_of(decoder, name)
        owner = Owner(decoder, given, settings.recipe.diagonal_tiles, settings.recipe.sink_tiles)
        layers = [_own_layer(layer, owner, name, max_cache_len) for layer, name in zip(upstream, names, strict=True)]
        for index in cross_attention_layers(decoder):
            layers[index] = DynamicLayer()
        for layer in [layer for layer in layers if isinstance(layer, DMALayer)][1:]:
            layer.checks_steps = False
        Cache.__init__(self, layers=layers, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding)
        self.owner = owner

    @property
    def format(self) -> str | tuple[str, ...]:
        """The format of packed keys and values, ``int8`` or ``int4``; or that of each layer."""
        return self.owner.cache

    @property
    def _kind(self) -> dict[str, Any]:
        """What a saved state must have in common with this cache."""
        owner = self.owner
        formats = [layer.format for layer in self.layers if isinstance(layer, DMALayer)]
        format = formats[0] if len(set(formats)) == 1 else formats
        return {"format": format, "diagonal_tiles": owner.diagonal_tiles, "sink_tiles": owner.sink_tiles}

    @property
    def nbytes(self) -> int:
        """Bytes of the layers with packed keys and values."""
        layers = [layer for layer in self.layers if isinstance(layer, DMALayer) and layer.is_initialized]
        for layer in layers:
            layer.flush()
        return sum(layer.storage.nbytes for layer in layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Add new keys and values of a layer; arguments and result are those of Transformers' caches.

        Raises:
            ValueError: The cache has no such layer.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"the cache has {len(self.layers)} layers, but the model updates layer {layer_idx}; make the cache "
                "with the configuration of this model: DMACache(model.config)"
            )
        if self.offloading:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens.

        Up to 129 tokens can always be removed. More can be removed only if the keys before the new end are still stored
        in 16 bits, as in short prompts. If it fails, the cache does not change.

        Raises:
            TypeError: ``tokens_to_remove`` is not an integer.
            ValueError: It is positive, or its magnitude exceeds the number of tokens.
            RuntimeError: Keys just before the new end are stored as codes only.
        """
        count = -operator.index(tokens_to_remove)  # assisted decoding may pass a tensor
        if count < 0:  # earlier versions of Transformers took the length to keep
            raise ValueError(f"tokens_to_remove must be 0 or negative, got {-count}; crop(-3) removes three tokens")
        for layer in self.layers:
            if isinstance(layer, DMALayer):
                layer.flush()
                layer.check_crop(count)
        super().crop(-count)

    def state_dict(self) -> dict[str, Any]:
        """Return the contents for ``torch.save``: plain values, and tensors that share memory with the cache.

        Raises:
            TypeError: A layer is one of Transformers' (Mamba, linear attention).
        """
        self._finish_copies()
        layers: list[dict[str, Any] | None] = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, DMALayer):
                layer.flush()
                layers.append(_layer_state(layer))
            elif not holds_states(layer):
                layers.append(None)
            else:
                raise TypeError(
                    f"layer {index} is a {type(layer).__name__} of Transformers, which has no state_dict; use "
                    "torch.save(cache, ...)"
                )
        return {"kind": self._kind, "layers": layers}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device | str | None = None) -> None:
        """Load a copy of what :meth:`state_dict` returned, on ``device`` if given. If it fails, nothing changes.

        Raises:
            TypeError: ``state`` is not a mapping.
            ValueError: The format or the layers differ from those of this cache.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be what state_dict() returned, got {type(state).__name__}")
        if state.get("kind") != self._kind:
            raise ValueError(f"state must have {self._kind}, got {state.get('kind')}")
        kinds = [None if layer is None else (layer["window"], layer["max_cache_len"]) for layer in state["layers"]]
        own = [(each.window, each.max_cache_len) if isinstance(each, DMALayer) else None for each in self.layers]
        if kinds != own:
            raise ValueError(f"state must have layers with (window, max_cache_len) {own}, got {kinds}")
        self._finish_copies()
        with lasting():
            for layer, saved in zip(self.layers, state["layers"], strict=True):
                if saved is not None:
                    _load_layer(layer, saved, device)

    def _finish_copies(self) -> None:
        """Wait for layers that are being copied to or from the CPU."""
        if self.offloading:
            for device in {layer.device for layer in self.layers if getattr(layer, "device", None) is not None}:
                torch.cuda.synchronize(device)


_last: tuple[weakref.ref[PreTrainedConfig], dict[str, Any], list[CacheLayerMixin]] | None = None
"""The last decoder's configuration, its fields then, and the layers that :func:`_growing_layers` made for it."""


def _growing_layers(config: PreTrainedConfig, decoder: PreTrainedConfig) -> list[CacheLayerMixin]:
    """Return the empty layers of Transformers' growing cache.

    Making them takes up to a millisecond, so they are remembered. Those of hybrid models, which hold states, are not.
    """
    global _last
    last = _last  # another thread may replace it
    if last is not None:
        known, fields, kept = last
        if known() is decoder and fields == vars(decoder):
            return kept
    layers: list[CacheLayerMixin] = DynamicCache(config=config).layers
    if all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        values = vars(decoder).items()
        fields = {name: copy(value) if isinstance(value, list | dict) else value for name, value in values}
        _last = weakref.ref(decoder), fields, layers
    return layers


def _own_layer(layer: Any, owner: Owner, cache: str, max_cache_len: Any) -> Any:
    """Return the layer that replaces one of Transformers, or that layer if it holds no keys. Others are refused."""
    if type(layer) is DynamicLayer:
        return DMALayer(owner, cache)
    if type(layer) is DynamicSlidingWindowLayer:
        return DMALayer(owner, cache, layer.sliding_window)
    if type(layer) is StaticLayer:
        return DMAStaticLayer(owner, cache, max_cache_len)
    if type(layer) is StaticSlidingWindowLayer:
        return DMAStaticLayer(owner, cache, max_cache_len, window=layer.max_cache_len)
    if isinstance(layer, CacheLayerMixin):
        raise ValueError(
            f"{owner.config.model_type} cannot use a packed cache, because its layers also hold other states "
            f"({type(layer).__name__}); {WITHOUT_PACKED_CACHE}"
        )
    return layer


def _layer_state(layer: DMALayer) -> dict[str, Any]:
    state: dict[str, Any] = {"window": layer.window, "max_cache_len": layer.max_cache_len}
    if layer.is_initialized:
        state |= {"tokens": int(layer.tokens), "settled": layer.is_settled, "rolled_back": layer.storage.rolled_back}
        state["tensors"] = layer.storage.tensors()
    return state


def _load_layer(layer: DMALayer, state: dict[str, Any], device: torch.device | str | None) -> None:
    if layer.is_initialized and layer.max_cache_len is not None:  # a static layer keeps its device
        device = layer.storage.lengths.device
    saved = state.get("tensors", {})  # they may be those of the layer itself
    tensors = {name: tensor.to(device or tensor.device, copy=True) for name, tensor in saved.items()}
    layer.reset()
    if not tensors:
        return
    storage = LayerStorage.from_tensors(layer.format, layer.window, tensors, state["rolled_back"])
    if layer.is_initialized:
        layer.hold(storage)
        layer.tokens.fill_(state["tokens"])
    else:
        layer.storage, layer.device, layer.is_initialized = storage, storage.lengths.device, True
        is_static = layer.max_cache_len is not None
        layer.tokens = torch.tensor(state["tokens"], device=layer.device) if is_static else state["tokens"]
    layer.is_empty, layer.is_settled = state["tokens"] == 0, state["settled"]
    layer.is_padded = bool((storage.lengths < state["tokens"]).any())
