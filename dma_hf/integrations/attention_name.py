"""The attention implementation in a model's configuration: read and set without Transformers' checks of the name.

``set_attn_implementation`` is public, but it refuses names that are known to continuous batching alone, and it reloads
kernels from the Hub.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from .versions import check_attributes

check_attributes(PreTrainedConfig, ["_attn_implementation"])  # here, because the functions are compiled with the model


def attention_name(config: PreTrainedConfig) -> Any:
    """Return the name of the attention implementation that the layers of a configuration run, or ``None``."""
    return config._attn_implementation


def set_attention_name(config: PreTrainedConfig, name: Any) -> None:
    """Set it, for this configuration and those nested in it."""
    config._attn_implementation = name


def distinct_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Return the configurations that the modules of a model read, and those nested in them, each once, outermost first.

    Not only models have one: some parts of a composite model are plain modules with a copy (X-CLIP).
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
    """Give the attention of a model's parts other names; return what they were called, for :func:`restore_names`."""
    saved = [(config, attention_name(config)) for config in distinct_configs(model)]
    for config, name in saved:  # outermost first: the setter writes to nested ones too
        set_attention_name(config, new(name))
    return saved


def restore_names(saved: list[tuple[PreTrainedConfig, Any]]) -> None:
    """Take back :func:`rename`."""
    for config, name in saved:
        set_attention_name(config, name)
