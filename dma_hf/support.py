"""What ``dma_mxfp`` supports: model classes that need special treatment, and keyword arguments of attention calls.

The first constants list the exceptions. Everything else is recognized by attributes of the layer (``is_causal``,
``is_cross_attention``, ``is_decoder``). ``tests/compat/test_model_classes.py`` fails if Transformers gains a class that
may need an entry.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from dma_kernels.numerics.call import MAX_HEAD_DIM, MIN_HEAD_DIM
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel

from .config import Settings, settings_of
from .integrations.internals import CACHE_ARGUMENT, is_collecting_attentions, takes_attention_names

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


def cross_attention_layers(config: PreTrainedConfig) -> list[int]:
    """Return which layers of a decoder have cross-attention in place of self-attention (Mllama).

    They store the keys of images once, and read them from the cache in every decoding step.
    """
    layers = getattr(config, "cross_attention_layers", None) or ()
    return [index for index in layers if index < config.num_hidden_layers]


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
    """Refuse a model whose attention is built in, or that needs an additive mask: it would compute something else."""
    if config.model_type in NEEDS_ADDITIVE_MASK:
        raise ValueError(
            f"attn_implementation='dma_mxfp' makes boolean masks, and {config.model_type} needs additive ones; "
            "load the model with attn_implementation='eager'"
        )
    if has_built_in_attention(config):
        raise ValueError(built_in_message(config))


def built_in_message(config: PreTrainedConfig) -> str:
    """Return what a model with built-in attention is refused with."""
    return (
        f"attn_implementation='dma_mxfp' does not reach the attention of {config.model_type}, which such models "
        "compute themselves; load the model with attn_implementation='eager'"
    )


# ---- keyword arguments of attention calls: read in one place, and refused where they are not supported


@dataclass(frozen=True, eq=False)
class Call:
    """Keyword arguments of an attention call, without the mask.

    Attributes:
        settings: Settings of the layer.
        scaling: Factor of the scores. The default is ``D ** -0.5``.
        dropout: Dropout probability. Only 0 is supported.
        softcap: Cap of the scores. 0 means none, as in FlashAttention.
        sinks: Sink logits, ``[Hq]``. Transformers calls them ``s_aux``.
        position_bias: Bias of the scores. Only ``None`` is supported.
        others: All other arguments. Those that do not change the result are ignored.
    """

    settings: Settings
    scaling: float | None
    dropout: float
    softcap: float | None
    sinks: Tensor | None
    position_bias: Tensor | None
    others: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **others: Any,
    ) -> Call:
        """Read the keyword arguments that Transformers passes to the attention function of a layer."""
        sinks = None if s_aux is None else s_aux.reshape(-1)
        config: Any = module.config
        if config.model_type in GETS_GENERATION_OPTIONS:
            options = GenerationConfig().to_dict().keys() - {"output_attentions"}
            others = {name: value for name, value in others.items() if name not in options}
        settings = settings_of(config, module)
        return cls(settings, scaling, dropout, softcap or None, sinks, position_bias, others)

    @property
    def options(self) -> dict[str, Any]:
        """The corresponding arguments of :func:`dma_kernels.attention`."""
        backend = self.settings.config.backend
        return {"scale": self.scaling, "softcap": self.softcap, "sinks": self.sinks, "backend": backend}


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast casts a tensor to for SDPA, or ``None`` if it leaves the tensor unchanged."""
    kind = tensor.device.type
    if kind == "meta" or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


HARMLESS = frozenset(
    {
        # Passed down from the model's forward. They concern other layers, the output or the caches.
        *("cache_position", "use_cache", "past_key_values", "return_dict", "training"),
        *("output_hidden_states", "output_router_logits", "logits_to_keep"),
        # Arguments of the loss. Those in the second line are of Liger's.
        *("labels", "shift_labels", "num_items_in_batch", "ignore_index"),
        *("accum_dtype", "label_smoothing", "return_predicted_tokens", "return_token_accuracy", "use_token_scaling"),
        *("input_ids", "inputs_embeds", "token_type_ids", "mm_token_type_ids", "position_embeddings"),
        # Hints for FlashAttention, and positions. `masks.layer_geometry` reads the packed rows that they describe.
        "position_ids",
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "deterministic"),
        *("kernel_options", "target_dtype", "implementation"),
    }
)
"""Keyword arguments that models pass to an attention function, but that do not change its result."""

OF_GENERATION = frozenset(inspect.signature(GenerationMixin.generate).parameters) | {
    *("tokenizer", "assistant_tokenizer", "generation_mode"),
}
"""Keyword arguments of ``generate``, and those that pipelines add. They control how tokens are chosen. ``generate``
passes the ones that it does not use to the model, which passes them to every layer."""

GETS_GENERATION_OPTIONS = ("kosmos_2_vision_model",)
"""Model types of encoders to which ``generate`` passes all its options, such as ``max_new_tokens``."""

WAY_OUT = "load the model with attn_implementation='sdpa' or 'eager'"


@dataclass(frozen=True)
class Refusal:
    """A call that the backend cannot compute.

    Attributes:
        option: The unsupported option. Fallbacks are counted by this name.
        asked: What the call passed.
        way_out: What to do instead.
        sdpa_can: Whether Transformers' SDPA attention supports it.
    """

    option: str
    asked: str
    way_out: str
    sdpa_can: bool = False

    def error(self, may_fall_back: bool = True) -> ValueError:
        """Return the error. It suggests ``on_unsupported="sdpa"`` if SDPA can and may compute the call."""
        can = self.sdpa_can and may_fall_back
        hint = ", or allow SDPA for such calls with on_unsupported='sdpa'" if can else ""
        return ValueError(f"dma_mxfp attention does not support {self.option}: {self.asked}; {self.way_out}{hint}")


def find_unsupported(call: Call, query: Tensor, value: Tensor, bias: Tensor | None = None) -> Refusal | None:
    """Return why a call cannot be computed, or ``None`` if it can.

    ``bias`` is the mask, if it has other values than zeros and large negative numbers, or requires a gradient.
    """
    can = call.softcap is None and call.sinks is None
    refusal = _find_argument(call.others)
    if refusal is not None:
        return refusal
    if call.position_bias is not None:
        asked = f"the model passed one of shape {list(call.position_bias.shape)}"
        return Refusal("position_bias", asked, WAY_OUT, can)
    if call.dropout > 0:
        asked = f"got dropout={call.dropout}, expected 0"
        return Refusal("dropout", asked, "call model.eval(), or set the attention dropout in the config to 0", can)
    for name, tensor in (("query", query), ("value", value)):
        if not MIN_HEAD_DIM <= tensor.shape[-1] <= MAX_HEAD_DIM:
            asked = f"{name} has {tensor.shape[-1]}, expected {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
            return Refusal("this head_dim", asked, WAY_OUT, can)
    if bias is not None:
        what = "requires a gradient" if bias.requires_grad else "has values other than 0 and large negative numbers"
        asked = f"{bias.dtype} {list(bias.shape)} {what}"
        return Refusal("an additive bias as attention_mask", asked, WAY_OUT, can)
    return None


def _find_argument(others: Mapping[str, Any]) -> Refusal | None:
    for name, value in others.items():
        if value is None or name in HARMLESS or name in OF_GENERATION:
            continue
        if name == "output_attentions":
            if value:
                note_missing_weights()
            continue
        given = f"Tensor{list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]
        asked = f"got {name}={given}, which may change the result"
        return Refusal(f"the argument {name!r}", asked, "leave it out, or " + WAY_OUT)
    if not torch.compiler.is_compiling() and is_collecting_attentions():  # not every model passes output_attentions
        note_missing_weights()
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_missing_weights() -> None:
    """Warn that attention weights are left out, as with Transformers' SDPA and FlashAttention."""
    warnings.warn(
        "dma_mxfp attention returns no attention weights for output_attentions=True, because it never materializes "
        "them. Load the model with attn_implementation='eager' to get them.",
        stacklevel=2,  # in this file, so that Python shows it once and not for every layer
    )


class _OtherCaches(threading.local):
    """By their ids, configurations of models whose last ``generate`` in this thread requested another cache."""

    def __init__(self) -> None:
        self.configs: weakref.WeakValueDictionary[int, PreTrainedConfig] = weakref.WeakValueDictionary()


_other_caches = _OtherCaches()


def expect_other_cache(model: PreTrainedModel, is_expected: bool) -> None:
    """Note whether a call of ``generate`` asks for another cache. Then no layer of the decoder warns of it.

    Calls in other threads may ask for other caches of the same model.
    """
    for config in (model.config, getattr(model.get_decoder(), "config", model.config)):
        if is_expected:
            _other_caches.configs[id(config)] = config
        else:
            _other_caches.configs.pop(id(config), None)


def note_other_cache(module: nn.Module, format: str) -> None:
    """Warn that a decoding step reads another cache than the configured one, unless ``generate`` asked for it."""
    if not torch.compiler.is_compiling() and id(module.config) not in _other_caches.configs:
        warnings.warn(
            f"the configuration of this model says cache={format!r}, but the keys of a decoding step came from another "
            f"cache, or were changed by the layer. In forward, pass {CACHE_ARGUMENT}=dma_hf.DMACache(model.config). "
            "dma_hf.configure(model, cache=None) removes the setting.",
            stacklevel=2,
        )
