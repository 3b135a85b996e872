"""Attention calls of the layers after the first, which repeat the call of an earlier layer.

In eager mode the host launches kernels more slowly than the GPU runs them, in decoding steps and short prompts. What a
call checks and derives from its arguments is the same in all layers of a forward pass with the same mask. So the first
layer keeps it with the mask, and other layers compare their arguments with those of the first.

Only masks that are causal, perhaps with a sliding window, are kept. Padding and other patterns are read in each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from dma_kernels import Recipe
from dma_kernels.api import PreparedAttention
from dma_kernels.cache.api import cache_options, repeat_attention
from torch import Tensor, nn

from .cache_layers import DMALayer
from .cached_states import Step, Update
from .masks.geometry import CompactMask, MaskGeometry
from .stats import Use, count_use
from .support import HARMLESS, OF_GENERATION, Call

Compute = Callable[[nn.Module, DMALayer | None, Step | None, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Takes a module, its cache layer and update, queries, keys, values and sink logits. Returns ``[B, T, Hq, Dv]``."""


@dataclass(frozen=True, eq=False)
class RepeatedCall:
    """A call that other layers may repeat.

    Attributes:
        config: Configuration of the layer's model.
        high_layers: The setting :attr:`dma_hf.DMAConfig.high_layers`.
        is_high: Whether the layer is one of them.
        is_causal: The argument of :func:`dma_hf.attention.dma_attention_forward`.
        kinds: Shape, dtype and device of queries, and of plain keys and values. A cache compares its own.
        kv_len: Keys that the mask covers.
        names: Names of all keyword arguments of the call.
        arguments: Those that may change its result.
        compute: Computes a call like it.
        first: The first layer of the forward pass. Its next call begins another one, maybe with other settings.
    """

    config: Any
    high_layers: tuple[int, ...]
    is_high: bool
    is_causal: bool | None
    kinds: tuple[Any, ...]
    kv_len: int
    names: Set[str]
    arguments: Mapping[str, Any]
    compute: Compute
    first: nn.Module

    def covers(
        self,
        module: nn.Module,
        states: tuple[Tensor, ...],
        kv_len: int,
        is_causal: bool | None,
        arguments: Mapping[str, Any],
    ) -> bool:
        """Return whether the call of another layer has the same arguments, except sink logits of the same shape."""
        if not (
            kv_len == self.kv_len
            and module.config is self.config
            and (not self.high_layers or (getattr(module, "layer_idx", None) in self.high_layers) is self.is_high)
            and is_causal is self.is_causal
            and arguments.keys() == self.names
        ):
            return False
        for state, (shape, dtype, device) in zip(states, self.kinds, strict=True):
            if state.shape != shape or state.dtype != dtype or state.device != device:
                return False
        for name, value in self.arguments.items():
            other = arguments[name]
            if other is not value and not _is_alike(value, other):
                return False
        return True


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _is_alike(known: Any, value: Any) -> bool:
    """Return whether arguments are the same number, or tensors (sink logits) of the same shape."""
    if isinstance(known, Tensor):
        return isinstance(value, Tensor) and _kind(value) == _kind(known)
    return isinstance(value, (int, float)) and bool(value == known)


def repeat(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    update: Update | None,
    mask: CompactMask,
    is_causal: bool | None,
    sliding_window: int | None,
    arguments: Mapping[str, Any],
) -> Tensor | None:
    """Compute a call like that of an earlier layer, ``[B, T, Hq, Dv]``. Returns ``None`` if it is not like one."""
    if torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
        return None
    repeated: RepeatedCall | None = mask.dma_calls.get((sliding_window, update is None))
    if repeated is None or repeated.first is module:
        return None
    layer = step = None
    states: tuple[Tensor, ...] = (query, key, value)
    if update is None:
        kv_len = key.shape[2]
    else:
        layer, step = update
        if step.is_stored or not (layer.is_settled or step.is_first):
            return None
        key, value, kv_len = step.key, step.value, step.kv_len
        states = (query,)
    if not repeated.covers(module, states, kv_len, is_causal, arguments):
        return None
    sinks: Tensor | None = arguments.get("s_aux")
    return repeated.compute(module, layer, step, query, key, value, None if sinks is None else sinks.reshape(-1))


def is_repeatable(mask: Any) -> bool:
    """Return whether layers with this mask may repeat a call: it is causal, and hides nothing else but a window."""
    if type(mask) is not CompactMask or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    geometry: MaskGeometry = mask.dma_geometry
    is_plain = geometry.kv_range is None and geometry.pattern is None and geometry.documents is None
    return geometry.is_causal and is_plain and not geometry.two_sequences


def let_repeat(
    module: nn.Module,
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    update: Update | None,
    mask: Any,
    is_causal: bool | None,
    sliding_window: int | None,
    arguments: Mapping[str, Any],
    compute: Compute,
) -> None:
    """Let the next layers with the same mask, see :func:`is_repeatable`, repeat a call."""
    others = {name: value for name, value in arguments.items() if name not in HARMLESS and name not in OF_GENERATION}
    if any(isinstance(value, Tensor) for name, value in others.items() if name != "s_aux"):
        return
    states, kv_len = ((query, key, value), key.shape[2]) if update is None else ((query,), update[1].kv_len)
    kinds = tuple(map(_kind, states))
    high_layers = call.settings.config.high_layers
    is_high, names = getattr(module, "layer_idx", None) in high_layers, frozenset(arguments)
    kind = sliding_window, update is None
    first = mask.dma_calls[kind].first if kind in mask.dma_calls else module
    mask.dma_calls[kind] = RepeatedCall(
        module.config, high_layers, is_high, is_causal, kinds, kv_len, names, others, compute, first
    )


def cached_step(call: Call, kernel: str, query: Tensor, window: int | None) -> Compute:
    """Return what computes a decoding step over a cache, as ``kernel`` did for an earlier layer."""
    settings = call.settings
    known = cache_options(query, window=window, scale=call.scaling, softcap=call.softcap, sinks=call.sinks)

    def compute(module: Any, layer: Any, step: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        options = known if sinks is None else known._replace(sinks=sinks)
        layer.pending = None
        layer.make_room(key.shape[2])
        out = repeat_attention(query, key, value, layer.storage, options, settings.config.backend)
        count_use(module, Use(kernel, settings.name, layer.cache))
        layer.count(step)
        return out.transpose(1, 2).contiguous()

    return compute


def prompt(call: Call, query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, **options: Any) -> Compute | None:
    """Return what computes a call over plain keys, or a prompt, or ``None`` if it must be seen as one operation."""
    settings = call.settings
    prepared = PreparedAttention.of(query, key, value, recipe, **options, **call.options)
    if prepared is None:
        return None

    def compute(module: Any, layer: Any, step: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        if layer is not None:
            layer.pending = None
        out = prepared(query, key, value, sinks)
        count_use(module, Use(prepared.kernel, settings.name, "none" if layer is None else layer.cache))
        if layer is not None:
            layer.is_settled, layer.is_padded = True, False
            layer.store_later(step)
        return out.transpose(1, 2).contiguous()

    return compute
