"""Attention calls of the layers after the first, which repeat the call of an earlier layer.

In eager mode the host launches kernels more slowly than the GPU runs them, in decoding steps and short prompts. What a
call checks and derives from its arguments is the same in all layers of a forward pass with the same mask. So the first
layer keeps it with the mask, and other layers compare their arguments with those of the first.

Only masks that are causal, perhaps with a sliding window, are kept. Padding and other patterns are read in each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from dma_kernels.api import PreparedAttention
from dma_kernels.cache.api import cache_options, repeat_attention
from torch import Tensor, nn

from .cache_layers import DMALayer
from .cached_states import Step, Update
from .masks.geometry import CompactMask, MaskGeometry
from .stats import Use, count_use
from .support import HARMLESS, OF_GENERATION, Call

_OTHERWISE_COMPARED = HARMLESS | OF_GENERATION | {"s_aux"}
"""Keyword arguments that change no result, and sink logits."""

Compute = Callable[[nn.Module, DMALayer | None, Step | None, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Takes a module, its cache layer and update, queries, keys, values and sink logits. Returns ``[B, T, Hq, Dv]``."""


class RepeatedCall(NamedTuple):
    """A call that other layers may repeat.

    Attributes:
        common: The result of :meth:`LayerCall.common`.
        high_layers: The setting :attr:`dma_hf.DMAConfig.high_layers`.
        compute: Computes a call like it.
        first: The first layer of the forward pass. Its next call begins another one, maybe with other settings.
    """

    common: tuple[Any, ...]
    high_layers: tuple[int, ...]
    compute: Compute
    first: nn.Module


class LayerCall(NamedTuple):
    """Arguments of :func:`dma_hf.attention.dma_attention_forward`, and where keys and values come from."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    update: Update | None
    sliding_window: int | None
    arguments: Mapping[str, Any]

    @property
    def kind(self) -> tuple[int | None, bool]:
        """The kind of layer. A mask keeps one call of each."""
        return self.sliding_window, self.update is None

    def common(self, high_layers: tuple[int, ...]) -> tuple[Any, ...]:
        """Return what repeated calls have in common: the configuration, arguments, and layouts up to strides.

        A cache compares its keys and values itself.
        """
        module, query, key, value, update, _, arguments = self
        is_high = bool(high_layers) and getattr(module, "layer_idx", None) in high_layers
        others = [each for each in arguments.items() if each[0] not in _OTHERWISE_COMPARED]
        sinks = arguments.get("s_aux")
        logits = None if sinks is None else (sinks.shape, sinks.dtype, sinks.device)
        layer = id(module.config), is_high, tuple(arguments), others
        asked = *layer, logits, query.shape, query.dtype, query.device
        if update is not None:
            return *asked, update[1].kv_len
        return *asked, key.shape, key.dtype, key.device, value.shape, value.dtype, value.device


def repeat(asked: LayerCall, mask: CompactMask) -> Tensor | None:
    """Compute a call like that of an earlier layer, ``[B, T, Hq, Dv]``. Returns ``None`` if it is not like one."""
    repeated: RepeatedCall | None = mask.dma_calls.get(asked.kind)
    module, query, key, value, update, *_, arguments = asked
    if repeated is None or repeated.first is module or torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
        return None
    if repeated.common != asked.common(repeated.high_layers):
        return None
    layer = step = None
    if update is not None:
        layer, step = update
        if step.is_stored or not (layer.is_settled or step.is_first):
            return None
        key, value = step.key, step.value
    sinks: Tensor | None = arguments.get("s_aux")
    return repeated.compute(module, layer, step, query, key, value, None if sinks is None else sinks.reshape(-1))


def is_repeatable(mask: Any) -> bool:
    """Return whether layers with this mask may repeat a call: it is causal, and hides nothing else but a window."""
    if type(mask) is not CompactMask or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    geometry: MaskGeometry = mask.dma_geometry
    is_plain = geometry.kv_range is None and geometry.pattern is None and geometry.documents is None
    return geometry.is_causal and is_plain and not geometry.two_sequences


def let_repeat(asked: LayerCall, mask: Any, high_layers: tuple[int, ...], compute: Compute) -> None:
    """Let the next layers with the same mask, see :func:`is_repeatable`, repeat a call."""
    last: RepeatedCall | None = mask.dma_calls.get(asked.kind)
    first = asked.module if last is None else last.first
    mask.dma_calls[asked.kind] = RepeatedCall(asked.common(high_layers), high_layers, compute, first)


def cached_step(call: Call, kernel: str, query: Tensor, window: int | None) -> Compute:
    """Return what computes a decoding step over a cache, as ``kernel`` did for an earlier layer."""
    settings = call.settings
    known = cache_options(query, window=window, scale=call.scaling, softcap=call.softcap, sinks=call.sinks)

    def compute(module: Any, layer: Any, step: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        layer.pending = None
        layer.make_room(key.shape[2])
        options = known._replace(sinks=sinks)
        out = repeat_attention(query, key, value, layer.storage, options, settings.config.backend)
        count_use(module, Use(kernel, settings.name, layer.cache))
        layer.count(step)
        return out.transpose(1, 2).contiguous()

    return compute


def prompt(call: Call, query: Tensor, key: Tensor, value: Tensor, geometry: MaskGeometry) -> Compute | None:
    """Return what computes a call over plain keys, or a prompt, or ``None`` if it must be seen as one operation."""
    settings = call.settings
    prepared = PreparedAttention.of(query, key, value, settings.recipe, **geometry.arguments, **call.options)
    if prepared is None:
        return None
    kernel, plain = prepared.kernel, Use(prepared.kernel, settings.name, "none")

    def compute(module: Any, layer: Any, step: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        if layer is not None:
            layer.pending = None
        out = prepared(query, key, value, sinks)
        count_use(module, plain if layer is None else Use(kernel, settings.name, layer.cache))
        if layer is not None:
            layer.is_settled, layer.is_padded = True, False
            layer.store_later(step)
        return out.transpose(1, 2).contiguous()

    return compute
