"""``generate`` with a ``DMACache``.

Transformers has no registry of caches, and no hook that runs when a model is loaded. So this package wraps
``GenerationMixin.generate`` once, at import. The wrapper adds a cache to calls of models that run ``dma_mxfp`` and
whose settings name a cache. It passes on all other calls unchanged. ``docs/compatibility.md`` lists the alternatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from dma_kernels.numerics.formats import TILE
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel

from ..architectures import shares_keys
from ..cache import DMACache
from ..cache_layers import DMALayer
from ..config import cache_of, is_ours
from .cache_argument import CACHE_ARGUMENT, CACHE_ARGUMENTS
from .names import CACHE_IMPLEMENTATION

OPEN = (None, "hybrid")
"""Values that name no cache. Transformers ignores "hybrid", which old configurations of Gemma have."""

SPECULATION = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
"""Fields of a generation configuration that turn on speculative decoding, apart from an assistant model."""


def generate(method: Callable[..., Any], model: PreTrainedModel, *arguments: Any, **options: Any) -> Any:
    """Call ``generate`` with the cache in the model's settings."""
    if is_ours(model):
        options = _with_cache(model, arguments, options)
    return method(model, *arguments, **options)


def _with_cache(model: PreTrainedModel, arguments: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call of ``generate``, with a ``DMACache`` if the model's settings name one.

    Another cache in the call has priority. ``cache_implementation="dma"`` in the call overrides the generation
    configuration.

    Raises:
        ValueError: The call asks for a ``DMACache``, and ``use_cache`` is false. Each step would read all tokens again,
            although the cache has them. Or speculation asks for more candidates than the cache can remove.
    """
    asked = functools.partial(_asked, model, arguments, options)
    wanted = options.get("cache_implementation") == CACHE_IMPLEMENTATION
    if wanted:
        options["cache_implementation"] = None
    elif cache_of(model) is not None:
        wanted = asked("use_cache") is not False and asked("cache_implementation") in OPEN
    cache: Cache | None = next((options[name] for name in CACHE_ARGUMENTS if options.get(name) is not None), None)
    if wanted and cache is None:
        cache = DMACache(model.config)
        if not any(isinstance(layer, DMALayer) for layer in cache.layers):  # Mamba has another cache argument
            return options
        if model.config.is_encoder_decoder:
            cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
        if asked("is_assistant"):  # Transformers rolls back its cache
            cache.activate_past_recording()
        options = {name: value for name, value in options.items() if name not in CACHE_ARGUMENTS}
        options[CACHE_ARGUMENT] = cache
    packed = getattr(cache, "self_attention_cache", cache)
    if isinstance(packed, DMACache):
        if asked("use_cache") is False:
            raise ValueError(
                "generate got a DMACache, but use_cache is False; leave one of them out, or pass "
                "use_cache=True if the generation configuration has False"
            )
        assistant = options.get("assistant_model")
        is_speculative = assistant is not None or any(asked(name) for name in SPECULATION)
        if is_speculative:
            _check_candidates("prompt_lookup_num_tokens", asked("prompt_lookup_num_tokens"))
            own = getattr(assistant, "generation_config", None)
            _check_candidates("num_assistant_tokens", getattr(own, "num_assistant_tokens", None))
        if shares_keys(packed.owner.config) and packed.get_seq_length() and options.get("inputs_embeds") is None:
            options.setdefault("prefill_chunk_size", asked("prefill_chunk_size") or TILE)
        packed.owner.prompt_length = _prompt_length(model, arguments, options) if is_speculative else None
    return options


def _check_candidates(name: str, count: int | None) -> None:
    """Raise if a step may have more candidates than a packed cache can remove again."""
    if count is not None and count > TILE:
        raise ValueError(
            f"{name} must be at most {TILE} with a packed cache, got {count}; the cache cannot remove as many rejected "
            "tokens"
        )


def _prompt_length(model: PreTrainedModel, arguments: Sequence[Any], options: dict[str, Any]) -> int | None:
    """Return how many tokens are passed to the decoder."""
    if model.config.is_encoder_decoder:
        names = ["decoder_input_ids", "decoder_inputs_embeds"]
        found = [options.get(name) for name in names]
    else:
        found = [*arguments[:1], *(options.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
    lengths = [tensor.shape[1] for tensor in found if isinstance(tensor, Tensor)]
    return max(lengths, default=1 if model.config.is_encoder_decoder else None)


def _asked(model: PreTrainedModel, arguments: Sequence[Any], options: dict[str, Any], name: str) -> Any:
    """Return an option of ``generate``: from the call, the configuration in the call, or the model's."""
    if name in options:
        return options[name]
    given = [options.get("generation_config"), *arguments[1:2], model.generation_config]
    values = (getattr(config, name, None) for config in given)
    return next((value for value in values if value is not None), None)
