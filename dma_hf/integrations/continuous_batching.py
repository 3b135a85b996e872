"""Continuous batching: ``generate_batch`` of a model that runs ``dma_mxfp``.

``generate_batch`` and Transformers' server call ``init_continuous_batching`` of the model, which this package wraps.
The wrapper returns a manager (:mod:`dma_hf.integrations.manager`) that renames the model's attention
(:mod:`dma_hf.integrations.paged_attention`) and uses packed pages if the settings name a cache. Transformers 5.17 has
another paged cache: its pages hold 16 bits, and :func:`continuous_batching` renames the attention.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from transformers import ContinuousBatchingConfig, PreTrainedModel

from ..config import NAME, PAGED_NAME, cache_of, is_dma, is_ours
from .attention_name import decoder_attention
from .paged_attention import enter_batching, leave_batching
from .versions import check_version, private_imports


def init_continuous_batching(
    method: Callable[..., Any], model: PreTrainedModel, *arguments: Any, **options: Any
) -> Any:
    """Call ``init_continuous_batching``, or return a manager of this package for a model that runs ``dma_mxfp``.

    Raises:
        RuntimeError: Transformers is too old for the settings of the model, or a kept manager is for other settings.
    """
    kept = getattr(model, "_cached_continuous_batching_manager", None)
    if kept is not None and has_sectors():
        _check_kept(kept, model)
    if not is_ours(model):
        return method(model, *arguments, **options)
    _refuse_what_is_newer(model)
    if kept is not None or not has_sectors():
        return method(model, *arguments, **options)
    return _make_manager(model, *arguments, **options)


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
        from .manager import DMAManager  # 5.17 cannot import it

    settings = generation_config or model.generation_config
    batching = continuous_batching_config or getattr(settings, "continuous_batching_config", None)
    if settings.eos_token_id is None:
        settings = copy.deepcopy(settings)
        settings.eos_token_id = -1  # Transformers' managers take it as none
    return DMAManager(model, settings, batching or ContinuousBatchingConfig(), workload_hints)


def has_sectors() -> bool:
    """Return whether the paged cache of Transformers has sectors that allocators share, as in 5.18 and later."""
    spec = "transformers.generation.continuous_batching.cache_allocators"
    return importlib.util.find_spec(spec) is not None


def _refuse_what_is_newer(model: PreTrainedModel) -> None:
    """Raise if the installed Transformers is too old to batch a model with its settings."""
    if has_sectors():
        return
    cache = cache_of(model)
    if cache is not None:
        raise RuntimeError(
            f"packed pages (cache={cache!r}) need Transformers 5.18 or later, got {transformers.__version__}; update "
            "it, or call dma_hf.configure(model, cache=None) for 16-bit pages"
        )
    if not str(decoder_attention(model)).startswith(PAGED_NAME):
        raise RuntimeError(
            f"generate_batch needs `with dma_hf.continuous_batching(model):` on Transformers before 5.18, got "
            f"{transformers.__version__}"
        )


@contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[None]:
    """Allow continuous batching of a model that runs ``dma_mxfp`` within a ``with`` block::

        with dma_hf.continuous_batching(model):
            outputs = model.generate_batch(prompts, generation_config=settings)

    Only Transformers 5.17 needs it. There pages hold 16 bits. On a GPU pass
    ``continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=False)``, because the lengths of the requests
    are read on the host. Blocks may overlap.

    Raises:
        ValueError: The model does not run ``dma_mxfp``.
        RuntimeError: The settings name packed pages, and Transformers is too old for them.
    """
    name = decoder_attention(model)
    if not is_dma(name):
        raise ValueError(
            f"{type(model).__name__} runs attention {name!r}; continuous_batching is for models with "
            "attn_implementation='dma_mxfp'"
        )
    enter_batching(model)
    try:
        _refuse_what_is_newer(model)
        yield
    finally:
        leave_batching(model)
