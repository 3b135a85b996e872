"""The table of model classes that need special treatment, and the models that ``dma_mxfp`` refuses.

| entry | classes | what is special | what happens |
|---|---|---|---|
| ``CROSS_ATTENTION_NAMES`` | layers with such a name | keys are of another sequence | every key is in high precision |
| ``NEVER_CAUSAL`` | layers | they say they are causal, but mean full attention | they run bidirectional attention |
| ``NEEDS_ADDITIVE_MASK`` | models | they cast the mask to a float or add a bias to it | refused |
| ``ADDS_THE_MASK`` | models | built-in attention adds the mask to its scores | they get an additive mask |
| ``NO_PACKED_CACHE`` | models | attention does not get what a given cache returned | no packed cache |
| Transformers' own rule | models | ``attn_implementation`` does not reach their attention | refused |

Everything else is recognized by attributes of the layer (``is_causal``, ``is_cross_attention``, ``is_decoder``).
``tests/compat/test_model_classes.py`` fails if Transformers gains a class that may need an entry.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType

from transformers import PreTrainedConfig, PreTrainedModel

from ..integrations.internals import takes_attention_names

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


def has_built_in_attention(config: PreTrainedConfig) -> bool:
    """Return whether ``attn_implementation`` does not reach the attention of a model with this configuration.

    Transformers accepts any registered name for models that compute their attention themselves. They would ignore a
    boolean mask or add it to their scores, and return wrong numbers without an error.
    """
    module = sys.modules.get(type(config).__module__.replace(".configuration_", ".modeling_"))
    return module is not None and _has_built_in_attention(module)


@cache
def _has_built_in_attention(module: ModuleType) -> bool:
    own = (value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__)
    model = next((each for each in own if isinstance(each, type) and issubclass(each, PreTrainedModel)), None)
    return model is not None and not takes_attention_names(model)


def has_attention(model: PreTrainedModel) -> bool:
    """Return whether any layer of a model looks up its attention (Mamba has none)."""
    layers = (layer for layer in model.modules() if not isinstance(layer, PreTrainedModel))
    files = {cls.__module__ for layer in layers for cls in type(layer).__mro__}
    return any(hasattr(sys.modules.get(file), "ALL_ATTENTION_FUNCTIONS") for file in files)


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
    if has_built_in_attention(config):
        raise ValueError(
            f"attn_implementation='dma_mxfp' does not reach the attention of {config.model_type}, which such models "
            "compute themselves; load the model with attn_implementation='eager'"
        )
