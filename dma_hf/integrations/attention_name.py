"""The attention implementation in a model's configuration: read and set without Transformers' checks of the name.

``set_attn_implementation`` is public, but it refuses names that are known to continuous batching alone, and it reloads
kernels from the Hub.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from .versions import check_attributes

check_attributes(PreTrainedConfig, ["_attn_implementation"])  # here, because the functions are compiled with the model


def attention_name(config: PreTrainedConfig) -> Any:
    """Return the name of the attention implementation that the layers of a configuration run, or ``None``."""
    return config._attn_implementation


def set_attention_name(config: PreTrainedConfig, name: Any) -> None:
    """Set it, for this configuration and those nested in it."""
    config._attn_implementation = name
