"""A warning if 4 bits cannot represent the queries and keys of a model.

A layer is checked once for each recipe and choice of high layers. The check needs a prompt of at least 128 tokens that
runs eagerly without gradients, also in continuous batching.
"""

from __future__ import annotations

import warnings
import weakref

import torch
from dma_kernels import BLOCK_FORMATS, Recipe
from dma_kernels.numerics.formats import E2M1, TILE
from dma_kernels.reference.operands import logit_error
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .config import EVERY_TILE
from .masks.geometry import has_no_values
from .support import Call

LARGEST_ERROR = 4.0
"""RMS error of a head's logits, in nats, that triggers the warning.

Of ``paper`` it is at most 2.0 in SmolLM2-135M and Gemma 3 270M, 18 in Qwen2.5-Coder-0.5B and 106 in the 1.5B model,
whose KL is .066, .053, .29 and 1.1. Of ``fp4`` it is at most 1.3, with a KL below .015. Without ``high_layers`` it is
15 in the 0.5B model, with a KL of .48. WikiText-2, fp32, CPU.
"""
FOUR_BITS = frozenset(name for name, format in BLOCK_FORMATS.items() if format.element is E2M1)

Choice = tuple[Recipe, tuple[int, ...]]
"""A recipe and ``high_layers``."""

_checked: weakref.WeakKeyDictionary[nn.Module, Choice] = weakref.WeakKeyDictionary()
_warned: list[tuple[weakref.ref[PreTrainedConfig], Choice]] = []


def check_first_prompt(
    module: nn.Module, call: Call, query: Tensor, key: Tensor, kv_range: Tensor | None = None
) -> bool:
    """Warn if 4 bits cannot represent a layer's queries and keys, once for each model and recipe.

    The check reads the first 128 keys, ``[B, Hkv, Tk, D]``, of the longest row, and its last 128 queries,
    ``[B, Hq, Tq, D]``. Key 0 is the first token. It waits for the device. Returns whether this call was checked.
    """
    if has_no_values(query) or torch.is_grad_enabled() or type(query) is not Tensor:
        return False
    if min(query.shape[2], key.shape[2]) < TILE:
        return False
    recipe = call.settings.recipe
    if key.shape[2] <= recipe.exact_until:  # no low tile
        return False
    choice = recipe, call.settings.config.high_layers
    if not (recipe.query_low in FOUR_BITS or recipe.key_low in FOUR_BITS) or recipe.diagonal_tiles == EVERY_TILE:
        return False
    if _checked.get(module) == choice:
        return False
    row, first = 0, 0
    if kv_range is not None:
        row = int(kv_range.diff().argmax())
        first = int(kv_range[row, 0])
    keys, queries = key[row : row + 1, :, first : first + TILE], query[row : row + 1, :, -TILE:]
    if keys.shape[2] < TILE:
        return False
    scale = query.shape[3] ** -0.5 if call.scaling is None else call.scaling
    error = float(logit_error(queries, keys, recipe, scale).max())
    _checked[module] = choice
    if error > LARGEST_ERROR and not any(config() is module.config and other == choice for config, other in _warned):
        _warned.append((weakref.ref(module.config), choice))
        name = "this recipe" if call.settings.name == "custom" else f"the preset {call.settings.name!r}"
        warnings.warn(
            f"{name} cannot represent the keys of this model in 4 bits, so its output is wrong: attention logits of "
            f"layer {getattr(module, 'layer_idx', 0)} are off by {error:.1f} nats (RMS of a head). A few key channels "
            "are far larger than the others. Use the preset 'balanced', or add the layer to high_layers. `dma-hf "
            "equalize` makes the channels alike, which lowers the error",
            stacklevel=3,
        )
    return True
