"""The name of the attention implementation in a model's configuration, without Transformers' checks.

The public ``set_attn_implementation`` refuses names that only continuous batching knows, and reloads kernels from the
Hub.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def attention_name(config: PreTrainedConfig) -> Any:
    """Return the name of the attention implementation that the layers of a configuration run, or ``None``."""
    return config._attn_implementation


def decoder_attention(model: PreTrainedModel) -> Any:
    """Return the name of the attention implementation that a model's decoder runs."""
    return attention_name(model.config.get_text_config(decoder=True))


def set_attention_name(config: PreTrainedConfig, name: Any) -> None:
    """Set the name in a configuration and those nested in it."""
    config._attn_implementation = name


def takes_attention_names(model: type[PreTrainedModel]) -> bool:
    """Return whether the layers of a model class look up their attention by its name."""
    return bool(model._can_set_attn_implementation())


def distinct_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Return the configurations of a model's modules and those nested in them, each once, outermost first.

    Some parts of a composite model are plain modules with a copy of a configuration (X-CLIP).
    """
    found: dict[int, PreTrainedConfig] = {}
    pending = [getattr(module, "config", None) for module in model.modules()]
    while pending:
        config = pending.pop(0)
        if not isinstance(config, PreTrainedConfig) or id(config) in found:
            continue
        found[id(config)] = config
        pending.extend(getattr(config, name, None) for name in config.sub_configs)
    return list(found.values())


def rename(model: nn.Module, new: Callable[[Any], Any]) -> list[tuple[PreTrainedConfig, Any]]:
    """Rename the attention of a model's parts, and return the old names for :func:`restore_names`."""
    saved = [(config, attention_name(config)) for config in distinct_configs(model)]
    for config, name in saved:  # outermost first, because the setter also writes to nested ones
        set_attention_name(config, new(name))
    return saved


def restore_names(saved: list[tuple[PreTrainedConfig, Any]]) -> None:
    """Undo :func:`rename`."""
    for config, name in saved:
        set_attention_name(config, name)
