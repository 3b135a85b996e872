"""The methods of Transformers that this package wraps, once, at import: those that make caches, run decoding steps and
batch continuously, and the check of an attention's name.

Transformers has no registry of caches. Calls of models that do not run ``dma_mxfp`` are passed on. Only a ``DMACache``
for an encoder-decoder gets a companion for cross-attention first.
``docs/compatibility.md`` lists the alternatives.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from dma_kernels.numerics.formats import TILE
from torch import Tensor
from transformers import (
    Cache,
    ContinuousBatchingConfig,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    StaticCache,
)

from ..cache import DMACache
from ..cache_layers import DMALayer
from ..config import NAME, cache_of, is_dma, is_ours
from ..decoding import DecodingSteps, StaticSteps, decodes_by_graphs
from ..idle_caches import lend, release
from ..masks.geometry import remember
from ..stats import count_eager_decoding
from ..support import built_in_message, expect_other_cache, shares_keys
from .internals import (
    CACHE_ARGUMENT,
    CACHE_ARGUMENTS,
    check_version,
    decoder_attention,
    private_imports,
    takes_attention_names,
)

OPEN = (None, "hybrid")
"""Values of ``cache_implementation`` that name no cache. Old configurations of Gemma have "hybrid"."""

MODES = ("greedy_search", "sample")
"""Generation modes with one query per row and step."""

MAX_CANDIDATES = 128
"""Candidates of speculative decoding. A cache can always remove that many tokens."""

COMPILED_ROOM = 1024
"""The room of a cache for compiled steps is a multiple of this many tokens."""

_of_one_call: weakref.WeakSet[Cache] = weakref.WeakSet()
"""Caches that only their call of ``generate`` sees, on a GPU."""


def wrap_generation() -> None:
    """Make ``generate`` and ``generate_batch`` use the cache of a model's settings, and run steps as CUDA graphs."""
    with private_imports():
        from transformers.generation.utils import DeferredStopCheck
    _wrap(GenerationMixin, "_prepare_cache_for_generation", prepare_cache)
    _wrap(GenerationMixin, "_prepare_position_ids_for_generation", prepare_positions)
    _wrap(GenerationMixin, "_assisted_decoding", assisted_decoding)
    _wrap(GenerationMixin, "_valid_auto_compile_criteria", decodes_by_compiled_call)
    _wrap(PreTrainedModel, "get_compiled_call", compiled_call)
    _wrap(DeferredStopCheck, "is_supported", defers_stop_check)
    _wrap(DeferredStopCheck, "__call__", check_stop)
    _wrap(GenerationMixin, "init_continuous_batching", init_continuous_batching)


def wrap_name_check() -> None:
    """Make models that no name of this package reaches refuse it by name."""
    _wrap(PreTrainedModel, "get_correct_attn_implementation", check_attention)


def _wrap(owner: type, name: str, function: Callable[..., Any]) -> None:
    """Wrap a method, unless it is wrapped already: ``function(method, self, ...)`` answers its calls.

    The copy of this package in a Hub kernel may have wrapped it since.
    """
    method = getattr(owner, name)
    if inspect.unwrap(method, stop=lambda each: each.__module__ == __name__).__module__ == __name__:
        return

    @functools.wraps(method, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def wrapper(self: Any, *arguments: Any, **options: Any) -> Any:
        return function(method, self, *arguments, **options)

    setattr(owner, name, wrapper)


# ---- caches of ``generate``, and its decoding steps


def prepare_cache(
    method: Callable[..., Any],
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> Any:
    """Make the cache of a call of ``generate``: a ``DMACache`` if the settings name one, and the call no other.

    A ``DMACache`` given to an encoder-decoder is for its self-attention, whichever attention implementation runs.
    A ``DMACache`` with ``use_cache=False`` is refused: each step would read all tokens again, which the cache has.
    """
    given = (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
    cache = _cache_in(model_kwargs)
    if isinstance(cache, DMACache):
        model_kwargs[CACHE_ARGUMENT] = cache = _with_cross_attention(model, cache)
    packed = packed_cache(cache)
    if packed is not None:  # it may have been made with a copy of the configuration, or loaded from a file
        packed.owner.config = model.config.get_text_config(decoder=True)
    if not is_ours(model):
        return method(model, *given)
    is_configured = cache_of(model) is not None
    is_open = generation_config.use_cache is not False and generation_config.cache_implementation in OPEN
    may_be_new = cache is None and is_configured and is_open
    new = _new_cache(model, generation_config, max_cache_length) if may_be_new else None
    packed = packed if new is None else packed_cache(new)
    if is_configured:
        expect_other_cache(model, packed is None)
    if packed is not None:
        if generation_config.use_cache is False:
            raise ValueError(
                "generate got a DMACache, but use_cache is False; leave one of them out, or pass "
                "use_cache=True if the generation configuration has False"
            )
        packed.owner.expected_tokens = max_cache_length
        _check_candidates("prompt_lookup_num_tokens", generation_config.prompt_lookup_num_tokens)
        is_later_turn = packed.get_seq_length() > 0 and model_kwargs.get("inputs_embeds") is None
        if is_later_turn and shares_keys(packed.owner.config) and generation_config.prefill_chunk_size is None:
            generation_config.prefill_chunk_size = TILE
        if generation_mode.value not in MODES:
            count_eager_decoding(model, f"the generation mode is {generation_mode.value}")
        elif model.config.is_encoder_decoder:
            count_eager_decoding(model, "the model is an encoder-decoder")
        elif generation_config.disable_compile:
            count_eager_decoding(model, "disable_compile is set")
        elif generation_config.compile_config is not None and decodes_by_graphs(packed):
            count_eager_decoding(model, "compile_config needs a cache of fixed size, but the given one grows")
    if new is None:
        result = method(model, *given)
        made = _cache_in(model_kwargs)
        if cache is None and type(made) is StaticCache:
            _lend(model, made, generation_config, generation_mode, batch_size)
        return result
    model_kwargs[CACHE_ARGUMENT] = new
    if generation_config.is_assistant:  # Transformers rolls back its cache
        new.activate_past_recording()
    elif isinstance(new, DMACache):
        _lend(model, new, generation_config, generation_mode, batch_size)
    return None


def _lend(model: PreTrainedModel, cache: Cache, config: GenerationConfig, mode: Any, batch_size: int) -> None:
    """Let a new cache have the memory of the last one, if its steps may be CUDA graphs and the call keeps it.

    If not, that memory is freed.
    """
    is_of_one_call = not (config.return_dict_in_generate or config.is_assistant or cache.offloading)
    if is_of_one_call and not config.disable_compile and mode.value in MODES and _is_on_gpu(model):
        lend(model, cache, batch_size * max(config.num_beams or 1, config.num_return_sequences or 1))
        _of_one_call.add(cache)
    else:
        release(model)


def _new_cache(model: PreTrainedModel, config: GenerationConfig, max_cache_length: int) -> Cache | None:
    """Return a ``DMACache``, or ``None`` if none of the model's layers can use one (Mamba)."""
    is_compiled = config.compile_config is not None and not config.disable_compile
    # A compiled step is for one size, so calls of similar lengths share it.
    room = -(-max_cache_length // COMPILED_ROOM) * COMPILED_ROOM
    cache = DMACache(model.config, max_cache_len=room if is_compiled else None)
    if not any(isinstance(layer, DMALayer) for layer in cache.layers):
        return None
    return _with_cross_attention(model, cache)


def _with_cross_attention(model: PreTrainedModel, cache: DMACache) -> Cache:
    """Join a cache for self-attention with one of Transformers' for cross-attention, if the model has an encoder."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(cache, DynamicCache(config=model.config))
    return cache


def _check_candidates(name: str, count: int | None) -> None:
    """Raise a ``ValueError`` for more candidates than the cache can remove."""
    if count is not None and count > MAX_CANDIDATES:
        raise ValueError(
            f"{name} must be at most {MAX_CANDIDATES} with a DMACache, which cannot remove more tokens; got {count}"
        )


def packed_cache(cache: Any) -> DMACache | None:
    """Return the ``DMACache`` that a cache is or contains, if any."""
    cache = getattr(cache, "self_attention_cache", cache)
    return cache if isinstance(cache, DMACache) else None


def _cache_in(model_kwargs: Mapping[str, Any]) -> Any:
    return next((model_kwargs[name] for name in CACHE_ARGUMENTS if model_kwargs.get(name) is not None), None)


def _is_on_gpu(model: PreTrainedModel) -> bool:
    return bool(model.device.type == "cuda")


def prepare_positions(
    method: Callable[..., Tensor], model: PreTrainedModel, inputs: Tensor, model_kwargs: Mapping[str, Any]
) -> Tensor:
    """Return the positions that ``generate`` makes itself. They do not restart, so no layer waits to read them."""
    positions = method(model, inputs, model_kwargs)
    if is_ours(model):
        remember(positions, None)  # what reading them would find
    return positions


def assisted_decoding(method: Callable[..., Any], model: PreTrainedModel, input_ids: Tensor, **options: Any) -> Any:
    """Run speculative decoding. The cache learns which tokens of the first call are candidates, not the prompt."""
    packed = packed_cache(_cache_in(options)) if is_ours(model) else None
    if packed is None:
        return method(model, input_ids, **options)
    is_own_assistant = options["generation_config"].assistant_early_exit is not None
    own = getattr(model if is_own_assistant else options.get("assistant_model"), "generation_config", None)
    _check_candidates("num_assistant_tokens", getattr(own, "num_assistant_tokens", None))
    embeddings = options.get("inputs_embeds")
    packed.owner.prompt_length = max(input_ids.shape[1], 0 if embeddings is None else embeddings.shape[1])
    try:
        return method(model, input_ids, **options)
    finally:
        packed.owner.prompt_length = None


def decodes_by_compiled_call(
    method: Callable[..., Any],
    model: PreTrainedModel,
    model_kwargs: dict[str, Any],
    generation_config: GenerationConfig,
) -> bool:
    """Return whether decoding steps call what ``get_compiled_call`` returns: also over a growing ``DMACache``."""
    if generation_config.compile_config is None and decodes_by_graphs(_cache_in(model_kwargs)) and is_ours(model):
        return not generation_config.disable_compile and _is_on_gpu(model)
    return bool(method(model, model_kwargs, generation_config))


def compiled_call(method: Callable[..., Any], model: PreTrainedModel, compile_config: Any) -> Any:
    """Return what runs decoding steps: CUDA graphs, of the compiled model if the cache has a fixed size."""
    if not (is_ours(model) and _is_on_gpu(model)):
        return method(model, compile_config)
    return DecodingSteps(model, StaticSteps(model, functools.partial(method, model), compile_config))


def defers_stop_check(method: Callable[..., bool], device: Any, cache: Any, *arguments: Any, **options: Any) -> bool:
    """Return whether ``generate`` may see one step late that all rows have ended.

    So the host launches a step while the GPU runs the last one. The step after the end is dropped.
    """
    return cache in _of_one_call or method(device, cache, *arguments, **options)


def check_stop(method: Callable[..., bool], check: Any, unfinished: Tensor, tokens: Tensor, length: int) -> bool:
    """Return whether ``generate`` stops. A streamer gets the first token at once, and later ones a step later."""
    if check.is_first_step and check.streamer is not None and tokens.device.type != "mps":
        check.streamer.put(tokens.cpu())
        check.streamer = _AfterFirst(check.streamer)
    return method(check, unfinished, tokens, length)


class _AfterFirst:
    """Passes all tokens but the first to a streamer."""

    def __init__(self, streamer: Any) -> None:
        self.streamer, self.is_first = streamer, True

    def put(self, tokens: Tensor) -> None:
        if not self.is_first:
            self.streamer.put(tokens)
        self.is_first = False


# ---- managers of continuous batching (:mod:`dma_hf.integrations.manager`)


def init_continuous_batching(
    method: Callable[..., Any], model: PreTrainedModel, *arguments: Any, **options: Any
) -> Any:
    """Return the manager of a model. For one that runs ``dma_mxfp`` it is of this package."""
    kept = getattr(model, "_cached_continuous_batching_manager", None)
    if kept is not None:
        _check_kept(kept, model)
    elif is_ours(model):
        return _make_manager(model, *arguments, **options)
    return method(model, *arguments, **options)


def _check_kept(kept: Any, model: PreTrainedModel) -> None:
    """Raise if the kept manager of a model is for another attention or cache than the model runs now."""
    name, cache = decoder_attention(model), cache_of(model)
    is_own = hasattr(kept, "cache_format")
    if is_own != is_dma(name) or (is_own and kept.cache_format != cache):
        made_for = f"{NAME} with cache={kept.cache_format!r}" if is_own else "another attention"
        raise RuntimeError(
            f"the kept manager is for {made_for}, but the model runs {name!r} with cache={cache!r}; call "
            "model.destroy_cached_continuous_batching_manager() first"
        )


def _make_manager(
    model: PreTrainedModel,
    generation_config: Any = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
) -> Any:
    """Return a manager. The arguments are those of ``init_continuous_batching``."""
    check_version("continuous batching")
    with private_imports():
        from .manager import DMAManager

    settings = generation_config or model.generation_config
    batching = continuous_batching_config or getattr(settings, "continuous_batching_config", None)
    if settings.eos_token_id is None:
        settings = copy.deepcopy(settings)
        settings.eos_token_id = -1  # none, as in Transformers' own method; a composite configuration has no default
    return DMAManager(model, settings, batching or ContinuousBatchingConfig(), workload_hints)


# ---- names of attention implementations


def check_attention(method: Callable[..., Any], model: PreTrainedModel, *arguments: Any, **options: Any) -> Any:
    """Refuse a model that looks up its attention layers by name (Falcon, SAM). It would raise a ``KeyError``.

    Warn of one that computes its attention itself. Composite models are left out, because other parts of them may run
    ``dma_mxfp`` (GOT-OCR2).
    """
    name = method(model, *arguments, **options)
    table, layers = _table_of(model) if is_dma(name) else ("", {})
    if table:
        other = "sdpa" if "sdpa" in layers else "eager"
        is_part = model.config.base_config_key  # of a composite model, such as a vision encoder
        hint = ", or name dma_mxfp for the language model alone: {'text_config': 'dma_mxfp'}" if is_part else ""
        raise ValueError(
            f"attn_implementation={name!r} does not reach {type(model).__name__}, which chooses its layers from "
            f"{table}; load the model with attn_implementation={other!r}{hint}"
        )
    is_composite = model.config.sub_configs or model.config.base_config_key
    if is_dma(name) and not is_composite and not takes_attention_names(type(model)):
        warnings.warn(built_in_message(model.config), stacklevel=2)
    return name


def _table_of(model: PreTrainedModel) -> tuple[str, dict[str, type]]:
    """Return a model's table of attention layers and its name, which begins as that of its configuration, if any."""
    prefix = type(model.config).__name__.removesuffix("Config").upper()
    for name, table in vars(sys.modules[type(model).__module__]).items():
        if isinstance(table, dict) and "eager" in table and name.replace("_", "").startswith(prefix):
            return name, table
    return "", {}
