"""Caches that wait for the next call of ``generate``.

A CUDA graph holds the addresses of a cache, so a later call can replay it only over the same memory. A model keeps the
layers of one cache. The next call gets them, if a new cache would have the same shapes.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from .cache_layers import DMALayer, Owner, holds_states
from .config import is_ours

_idle: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Owner | None, list[Any]]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # a finalizer may run while the same thread holds it


def lend(model: PreTrainedModel, cache: Cache, batch: int) -> None:
    """Give a new cache the layers of an earlier one of the model, if it has the same kind of layers and shapes.

    ``cache`` must be empty, and ``generate`` must not return it. The model gets the layers back when it is dropped.
    """
    own: Owner | None = getattr(cache, "owner", None)
    with _lock:
        owner, layers = _idle.pop(model, (None, []))
    is_alike = own is None if owner is None else own is not None and owner.matches(own)
    if is_alike and len(layers) == len(cache.layers):
        pairs, kind = zip(layers, cache.layers, strict=True), (batch, model.dtype, model.device)
        if all(_is_cleared(layer, new, *kind) for layer, new in pairs):
            used = [layer for layer in layers if isinstance(layer, DMALayer) and layer.is_initialized]
            if used:
                torch._foreach_zero_([layer.storage.lengths for layer in used])  # one launch for all layers
            cache.layers = layers
            if owner is not None and own is not None:
                owner.expected_tokens = own.expected_tokens
                cache.owner = own = owner
    weakref.finalize(cache, _return, weakref.ref(model), own, cache.layers).atexit = False


def _is_cleared(layer: Any, new: Any, batch: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Remove all tokens of a layer, whose lengths on the device the caller sets to 0.

    Returns whether it is what a new layer becomes with its first keys.
    Layers that hold other states (Mamba, linear attention) never are.
    """
    if type(layer) is not type(new) or getattr(layer, "max_cache_len", None) != getattr(new, "max_cache_len", None):
        return False
    if not isinstance(layer, CacheLayerMixin):
        return not holds_states(layer)
    is_packed = isinstance(layer, DMALayer)
    if not (layer.format == new.format if is_packed else type(layer) is StaticLayer):
        return False
    if layer.is_initialized:
        keys = layer.storage.key_residual if is_packed else layer.keys
        is_writable = torch.is_inference_mode_enabled() or not keys.is_inference()
        if not is_writable or (len(keys), keys.dtype, layer.device) != (batch, dtype, device):
            return False
    remove_tokens = layer.clear if is_packed else layer.reset
    remove_tokens()
    return True


def _return(model: weakref.ref[PreTrainedModel], owner: Owner | None, layers: list[Any]) -> None:
    """Keep layers for the next call, if the model still exists and runs ``dma_mxfp``."""
    found = model()
    if found is not None and is_ours(found):
        with _lock:
            _idle[found] = owner, layers


def release(model: nn.Module) -> None:
    """Free the idle layers and graphs of a model and of the models in it."""
    with _lock:
        for module in model.modules() if _idle else ():
            if isinstance(module, PreTrainedModel):
                _idle.pop(module, None)
