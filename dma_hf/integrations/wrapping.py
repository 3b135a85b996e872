"""The methods of Transformers that this package wraps, once, at import. ``docs/compatibility.md`` says why."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from .attention_tables import check_attention
from .continuous_batching import init_continuous_batching
from .generate import assisted_decoding, compiled_call, decodes_by_compiled_call, prepare_cache


def wrap_generation() -> None:
    """Make ``generate`` and ``generate_batch`` use the cache of a model's settings, and run steps as CUDA graphs."""
    _wrap(GenerationMixin, "_prepare_cache_for_generation", prepare_cache)
    _wrap(GenerationMixin, "_assisted_decoding", assisted_decoding)
    _wrap(GenerationMixin, "_valid_auto_compile_criteria", decodes_by_compiled_call)
    _wrap(PreTrainedModel, "get_compiled_call", compiled_call)
    _wrap(GenerationMixin, "init_continuous_batching", init_continuous_batching)


def wrap_name_check() -> None:
    """Make models that no name of this package reaches refuse it by name."""
    _wrap(PreTrainedModel, "get_correct_attn_implementation", check_attention)


def _wrap(owner: type, name: str, function: Callable[..., Any]) -> None:
    """Wrap a method, unless it is wrapped already: ``function(method, self, ...)`` answers its calls."""
    method = getattr(owner, name)
    if method.__module__ == __name__:
        return

    @functools.wraps(method, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def wrapper(self: Any, *arguments: Any, **options: Any) -> Any:
        return function(method, self, *arguments, **options)

    setattr(owner, name, wrapper)
