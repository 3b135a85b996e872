"""Keyword arguments of an attention call: read in one place, and refused where ``dma_mxfp`` does not support them."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from dma_kernels.numerics.arguments import MAX_HEAD_DIM, MIN_HEAD_DIM
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from ..config import Settings, settings_of
from ..integrations.internals import CACHE_ARGUMENT, is_collecting_attentions


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
        settings = settings_of(module.config, module)
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
        *("output_hidden_states", "output_router_logits", "num_items_in_batch", "logits_to_keep"),
        *("labels", "shift_labels"),
        *("input_ids", "inputs_embeds", "token_type_ids", "mm_token_type_ids", "position_embeddings"),
        # Hints for FlashAttention, and positions. `dma_hf.masks.documents` reads the packed rows that they describe.
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

    ``bias`` is the mask, if it has other values than zeros and large negative numbers.
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
        asked = f"{bias.dtype} {list(bias.shape)} has values other than 0 and large negative numbers"
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


_with_other_cache: weakref.WeakValueDictionary[int, PreTrainedConfig] = weakref.WeakValueDictionary()
"""By their ids, the configurations of models whose last call of ``generate`` requested another cache than theirs."""


def expect_other_cache(model: PreTrainedModel, is_expected: bool) -> None:
    """Note whether a call of ``generate`` asks for another cache. Then no layer of the decoder warns of it."""
    for config in (model.config, getattr(model.get_decoder(), "config", model.config)):
        if is_expected:
            _with_other_cache[id(config)] = config
        else:
            _with_other_cache.pop(id(config), None)


def note_other_cache(module: nn.Module, format: str) -> None:
    """Warn that keys come from another cache than the one in the configuration, unless ``generate`` requested it."""
    if not torch.compiler.is_compiling() and id(module.config) not in _with_other_cache:
        warnings.warn(
            f"the configuration of this model says cache={format!r}, but its keys came from another cache, or were "
            "changed by the layer. Prefix tuning has a cache of its own. In forward, pass "
            f"{CACHE_ARGUMENT}=dma_hf.DMACache(model.config). dma_hf.configure(model, cache=None) removes the setting.",
            stacklevel=2,
        )
