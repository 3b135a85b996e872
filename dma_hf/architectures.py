"""Model classes that need special treatment."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType

from torch import nn
from transformers import PreTrainedConfig

CROSS_ATTENTION_NAMES = ("CrossAttention", "MergedAttention")
"""Class names of layers whose keys are of another sequence, or (T5Gemma 2) of two sequences in a row."""

NEVER_CAUSAL = ("BridgeTowerSelfAttention",)
"""Class names of layers that call themselves causal, whose model makes no mask for them and means full attention."""

NEEDS_ADDITIVE_MASK = ("deepseek_v4",)
"""Models that join a bias to the mask and convert it to the mask's dtype, which turns it round if that is boolean."""

ADDS_THE_MASK = ("gemma4_audio",)
"""Models whose attention is built in and adds the mask to its scores: eager attention, whatever is asked for."""


def built_in_attention(config_module: str) -> str | None:
    """Return the name of an attention class that ``attn_implementation`` does not reach, if a model has such.

    Transformers accepts any registered name for models that compute their attention themselves, and they would add a
    boolean mask, or none at all, to their scores: a wrong number instead of an error.

    Args:
        config_module: Where the model's configuration class is defined; the modelling code beside it is looked at, if
            it is loaded.
    """
    module = sys.modules.get(config_module.replace(".configuration_", ".modeling_"))
    return None if module is None else _built_in_attention(module)


def lacks_attention(config_module: str) -> bool:
    """Return whether a model has no attention at all (Mamba); arguments as of :func:`built_in_attention`."""
    module = sys.modules.get(config_module.replace(".configuration_", ".modeling_"))
    if module is None or module.__name__ == config_module or "ALL_ATTENTION_FUNCTIONS" in vars(module):
        return False
    layers = (name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, nn.Module))
    return not any("Attention" in name for name in layers)


@cache
def _built_in_attention(module: ModuleType) -> str | None:
    if "ALL_ATTENTION_FUNCTIONS" in vars(module):
        return None
    for name, value in vars(module).items():
        is_layer = "Attention" in name and isinstance(value, type) and issubclass(value, nn.Module)
        if is_layer and value.__module__ == module.__name__:
            return name
    return None


def refuse_model(config: PreTrainedConfig) -> None:
    """Refuse the models that would compute something else with this mask, without an error of their own.

    Raises:
        ValueError: The attention is built in, see :func:`built_in_attention`, or needs an additive mask.
    """
    if config.model_type in NEEDS_ADDITIVE_MASK:
        raise ValueError(
            f"attn_implementation='dma_mxfp' has a boolean mask, and {config.model_type} needs an additive one; "
            "load it with attn_implementation='eager'"
        )
    name = built_in_attention(type(config).__module__)
    if name is not None:
        raise ValueError(
            f"attn_implementation='dma_mxfp' does not reach {name}: models with {type(config).__name__} compute their "
            "attention themselves; load them with attn_implementation='eager'"
        )
