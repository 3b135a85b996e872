"""What ``dma_mxfp`` cannot compute: finding it, saying so, and the counted way out through SDPA."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from dma_kernels.numerics.arguments import MAX_HEAD_DIM, MIN_HEAD_DIM
from torch import Tensor
from transformers import GenerationMixin

from .call import Call
from .dense_mask import read_mask
from .integrations.cache_argument import CACHE_ARGUMENT
from .integrations.output_capturing import is_collecting_attentions

HARMLESS = frozenset(
    {
        # Handed down from the model's forward; they concern other layers, the output or the caches.
        *("position_ids", "cache_position", "use_cache", "past_key_values", "return_dict", "training"),
        *("output_hidden_states", "output_router_logits", "num_items_in_batch", "logits_to_keep"),
        *("labels", "shift_labels"),
        *("input_ids", "inputs_embeds", "token_type_ids", "mm_token_type_ids", "position_embeddings"),
        # Hints for FlashAttention. The packing that they describe is checked for in `find`.
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "deterministic"),
        *("kernel_options", "target_dtype", "implementation"),
    }
)
"""Keyword arguments that models pass to an attention function and that do not change its result."""

OF_GENERATION = frozenset(inspect.signature(GenerationMixin.generate).parameters) | {
    *("tokenizer", "assistant_tokenizer", "generation_mode"),
}
"""Keyword arguments that ``generate`` takes, or what pipelines pass to it. They say how tokens are chosen. ``generate``
hands what it has no use for to the model, which hands it to every layer."""

WAY_OUT = "load the model with attn_implementation='sdpa' or 'eager'"


@dataclass(frozen=True)
class Refusal:
    """A call that the backend cannot compute.

    Attributes:
        option: What is to blame; fallbacks are counted under this name.
        asked: What came.
        way_out: What to do instead.
        sdpa_can: Whether Transformers' SDPA attention computes it.
    """

    option: str
    asked: str
    way_out: str
    sdpa_can: bool = False

    def error(self, may_fall_back: bool = True) -> ValueError:
        """Return the error that says so, and that SDPA may be allowed to compute the call if it can and may."""
        can = self.sdpa_can and may_fall_back
        hint = ", or allow SDPA for such calls with on_unsupported='sdpa'" if can else ""
        return ValueError(f"dma_mxfp attention does not support {self.option}: {self.asked}; {self.way_out}{hint}")


def find(
    call: Call, query: Tensor, value: Tensor, bias: Tensor | None = None, *, is_packed_elsewhere: bool
) -> Refusal | None:
    """Return why a call cannot be computed, or ``None`` if it can.

    Args:
        call: What it asks for.
        query: ``[B, Hq, Tq, D]``.
        value: ``[B, Hkv, Tk, Dv]``.
        bias: A floating-point mask.
        is_packed_elsewhere: Whether the mask already keeps packed sequences apart.
    """
    can = call.softcap is None and call.sinks is None
    refusal = _find_argument(call.others, is_packed_elsewhere)
    if refusal is not None:
        return refusal
    if call.position_bias is not None:
        asked = f"the model adds one of shape {list(call.position_bias.shape)} to its scores"
        return Refusal("position_bias", asked, WAY_OUT, can)
    if call.dropout > 0:
        asked = f"dropout={call.dropout} was asked for"
        return Refusal("dropout", asked, "call model.eval(), or set the attention dropout in the config to 0", can)
    for name, tensor in (("query", query), ("value", value)):
        if not MIN_HEAD_DIM <= tensor.shape[-1] <= MAX_HEAD_DIM:
            asked = f"{name} has {tensor.shape[-1]}, expected {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
            return Refusal("this head_dim", asked, WAY_OUT, can)
    if bias is not None and not read_mask(bias).is_mask:
        asked = f"{list(bias.shape)} {bias.dtype} holds other numbers than 0 and large negative ones"
        return Refusal("an additive bias as attention_mask", asked, WAY_OUT, can)
    return None


def _find_argument(others: Mapping[str, Any], is_packed_elsewhere: bool) -> Refusal | None:
    for name, value in others.items():
        if value is None or name in HARMLESS or name in OF_GENERATION:
            continue
        if name == "output_attentions":
            if value:
                note_missing_weights()
            continue
        if name == "cache":
            asked = f"a paged cache ({type(value).__name__}) was passed, as generate_batch does"
            way_out = "call generate_batch within dma_hf.continuous_batching(model)"
            return Refusal("continuous batching", asked, way_out)
        given = f"Tensor{list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]
        asked = f"{name}={given} was passed and may change the result"
        return Refusal(f"the argument {name!r}", asked, "leave it out, or " + WAY_OUT)
    if _is_collecting_attentions():
        note_missing_weights()
    lengths = others.get("cu_seq_lens_q")
    if isinstance(lengths, Tensor) and lengths.numel() > 2 and not is_packed_elsewhere:
        asked = f"cu_seq_lens_q packs {lengths.numel() - 1} sequences that the mask does not keep apart"
        way_out = "pass position_ids that start again with each sequence, no attention_mask, and use_cache=False"
        return Refusal("packing by cu_seq_lens_q", asked, way_out)
    return None


def _is_collecting_attentions() -> bool:
    """Return whether the model hooks its layers for attention weights; not every model passes the argument down."""
    if torch.compiler.is_compiling():
        return False
    return is_collecting_attentions()


_counts: Counter[str] = Counter()
_lock = threading.Lock()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_missing_weights() -> None:
    """Warn that attention weights are left out; Transformers' SDPA and FlashAttention do likewise."""
    warnings.warn(
        "dma_mxfp attention has no attention weights to return for output_attentions=True, because they are never "
        "materialised; they are left out. Load the model with attn_implementation='eager' to get them.",
        stacklevel=2,  # of this file, so that Python shows it once and not for every layer
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_other_cache(format: str) -> None:
    """Warn that a cache is not the one that the configuration asks for."""
    warnings.warn(
        f"the configuration of this model says cache={format!r}, and its keys came from another cache; generate uses a "
        "DMACache unless it is asked for another, and forward if it is given one: "
        f"{CACHE_ARGUMENT}=dma_hf.DMACache(model.config). configure(model, cache=None) asks for no DMACache.",
        stacklevel=2,
    )


def fallback_counts() -> dict[str, int]:
    """Return how many attention calls have run SDPA instead, for each unsupported option; a compiled call once."""
    with _lock:
        return dict(_counts)


def reset_fallback_counts() -> None:
    """Forget all fallbacks; the next one of each option warns again."""
    with _lock:
        _counts.clear()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_fallback(option: str, asked: str) -> None:
    """Count a fallback, and warn at the first one of its option."""
    with _lock:
        _counts[option] += 1
        is_first = _counts[option] == 1
    if is_first:
        warnings.warn(
            f"dma_mxfp attention does not support {option} ({asked}); such calls run SDPA, as on_unsupported='sdpa' "
            "allows. dma_hf.fallback_counts() tells how many.",
            stacklevel=2,
        )
