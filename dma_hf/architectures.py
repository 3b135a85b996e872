"""The table of model classes that need special treatment, and the models that ``dma_mxfp`` refuses.

| entry | classes | what is special | what happens |
|---|---|---|---|
| ``CROSS_ATTENTION_NAMES`` | layers with such a name | keys are of another sequence | every key is in high precision |
| ``NEVER_CAUSAL`` | layers | they say they are causal, but mean full attention | they run bidirectional attention |
| ``NEEDS_ADDITIVE_MASK`` | models | they cast the mask to a float or add a bias to it | refused |
| ``ADDS_THE_MASK`` | models | built-in attention adds the mask to its scores | they get an additive mask |
| ``NO_PACKED_CACHE`` | models | attention does not get what a given cache returned | no packed cache |
| no ``ALL_ATTENTION_FUNCTIONS`` | modules | all attention is built in | refused |

Everything else is recognized by attributes of the layer (``is_causal``, ``is_cross_attention``, ``is_decoder``).
``tests/compat/test_model_classes.py`` fails if Transformers gains a class that may need an entry.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType

from torch import nn
from transformers import PreTrainedConfig

CROSS_ATTENTION_NAMES = ("CrossAttention", "MergedAttention")
"""Parts of class names of layers whose keys are of another sequence, or (T5Gemma 2) of two concatenated ones."""

NEVER_CAUSAL = ("BridgeTowerSelfAttention",)
"""Class names of layers with ``is_causal=True`` whose model passes no mask and means full attention."""

NEEDS_ADDITIVE_MASK = ("deepseek_v4",)
"""Model types that join a bias to the mask. The cast to the mask's dtype inverts the bias if the mask is boolean."""

ADDS_THE_MASK = ("gemma4_audio",)
"""Model types whose built-in attention adds the mask to its scores, whichever implementation is chosen."""


NO_PACKED_CACHE = {
    "diffllama": "attends twice in a layer, to halves of the values",
    "evolla": "takes no cache in generate",
    "jetmoe": "repeats keys and values for its experts before attention",
    "minimax": "has a cache class of its own",
    "t5gemma2_decoder": "joins cached keys and values with those of the encoder before attention",
}
"""Model types whose attention does not get what a given cache returned. Neither does multi-head latent attention."""


def refuse_packed_cache(config: PreTrainedConfig) -> None:
    """Refuse a packed cache for a model whose attention does not get what the cache returned.

    The model would dequantize all keys in every step, and the decode kernel would never run.

    Args:
        config: The model's configuration.

    Raises:
        ValueError: It is such a model.
    """
    decoder = config.get_text_config(decoder=True)
    why = NO_PACKED_CACHE.get(decoder.model_type)
    if getattr(decoder, "kv_lora_rank", None):
        why = "caches latents, from which it computes keys and values in every step (multi-head latent attention)"
    if why is not None:
        raise ValueError(f"{decoder.model_type} cannot use a packed cache, because it {why}; {WITHOUT_PACKED_CACHE}")


def shares_keys(config: PreTrainedConfig) -> bool:
    """Return whether some layers of a decoder attend to the keys of another layer (Gemma 3n)."""
    modes = getattr(config, "kv_sharing_modes", None) or ()
    return any(mode.startswith("reuse") for mode in modes) or bool(getattr(config, "num_kv_shared_layers", 0))


WITHOUT_PACKED_CACHE = "set cache=None for Transformers' 16-bit cache: dma_hf.configure(model, cache=None)"
"""The way out for a model that cannot use a packed cache."""


def built_in_attention(config_module: str) -> str | None:
    """Return the name of an attention class that ``attn_implementation`` does not reach, or ``None``.

    Transformers accepts any registered name for models that compute their attention themselves. They would ignore a
    boolean mask or add it to their scores, and return wrong numbers without an error.

    Args:
        config_module: Name of the module that defines the model's configuration class. The modelling module beside it
            is searched, if it is loaded.
    """
    module = sys.modules.get(config_module.replace(".configuration_", ".modeling_"))
    return None if module is None else _built_in_attention(module)


def lacks_attention(config_module: str) -> bool:
    """Return whether a model has no attention (Mamba). The argument is that of :func:`built_in_attention`."""
    module = sys.modules.get(config_module.replace(".configuration_", ".modeling_"))
    if module is None or module.__name__ == config_module or "ALL_ATTENTION_FUNCTIONS" in vars(module):
        return False
    layers = (name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, nn.Module))
    return not any("Attention" in name for name in layers)


@cache
def _built_in_attention(module: ModuleType) -> str | None:
    if "ALL_ATTENTION_FUNCTIONS" in vars(module):
        return None
    # The rule of Transformers' `set_attn_implementation`. A class that inherits from another attention uses its choice.
    for name, value in vars(module).items():
        is_layer = "Attention" in name and isinstance(value, type) and nn.Module in value.__bases__
        if is_layer and value.__module__ == module.__name__:
            return name
    return None


def refuse_model(config: PreTrainedConfig) -> None:
    """Refuse a model that would compute something else with the masks of ``dma_mxfp``, without an error of its own.

    Raises:
        ValueError: Its attention is built in, or it needs an additive mask.
    """
    if config.model_type in NEEDS_ADDITIVE_MASK:
        raise ValueError(
            f"attn_implementation='dma_mxfp' makes boolean masks, and {config.model_type} needs additive ones; "
            "load the model with attn_implementation='eager'"
        )
    name = built_in_attention(type(config).__module__)
    if name is not None:
        raise ValueError(
            f"attn_implementation='dma_mxfp' does not reach {name}: models with {type(config).__name__} compute their "
            "attention themselves; load the model with attn_implementation='eager'"
        )
