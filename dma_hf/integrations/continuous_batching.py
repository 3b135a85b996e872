"""Continuous batching: ``generate_batch`` of a model that runs ``dma_mxfp``.

``generate_batch`` and Transformers' server call ``init_continuous_batching`` of the model, which this package wraps.
The wrapper returns a manager (:mod:`dma_hf.integrations.manager`) that renames the model's attention
(:mod:`dma_hf.integrations.paged_attention`) and uses packed pages if the settings name a cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from transformers import ContinuousBatchingConfig, PreTrainedModel

from ..config import NAME, cache_of, is_dma, is_ours
from .internals import check_version, decoder_attention, private_imports


def init_continuous_batching(
    method: Callable[..., Any], model: PreTrainedModel, *arguments: Any, **options: Any
) -> Any:
    """Call ``init_continuous_batching``, or return a manager of this package for a model that runs ``dma_mxfp``.

    Raises:
        RuntimeError: A kept manager is for other settings.
    """
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
    """Return a manager. The arguments are those of ``init_continuous_batching``.

    Raises:
        UnsupportedTransformersError: This package does not support Transformers' manager.
        ValueError: Packed pages do not support a kind of layer of the model.
    """
    check_version("continuous batching")
    with private_imports():
        from .manager import DMAManager

    settings = generation_config or model.generation_config
    batching = continuous_batching_config or getattr(settings, "continuous_batching_config", None)
    if settings.eos_token_id is None:
        settings = copy.deepcopy(settings)
        settings.eos_token_id = -1  # none, as in Transformers' own method; a composite configuration has no default
    return DMAManager(model, settings, batching or ContinuousBatchingConfig(), workload_hints)
