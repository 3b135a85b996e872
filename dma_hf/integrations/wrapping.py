"""The methods of Transformers that this package wraps, once, at import. ``docs/compatibility.md`` says why."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from .continuous_batching import init_continuous_batching
from .generate import generate
from .names import check_attention, check_generation_config


def wrap_generation() -> None:
    """Have ``generate`` and ``generate_batch`` use the cache in a model's settings."""
    _wrap(GenerationMixin, "generate", generate)
    _wrap(GenerationMixin, "init_continuous_batching", init_continuous_batching)


def wrap_name_checks() -> None:
    """Have Transformers' checks of ``attn_implementation`` and ``cache_implementation`` give the way out."""
    _wrap(PreTrainedModel, "get_correct_attn_implementation", check_attention)
    _wrap(GenerationConfig, "validate", check_generation_config)


def _wrap(owner: type, name: str, function: Callable[..., Any]) -> None:
    """Have ``function(method, self, ...)`` answer calls of a method, unless it is wrapped already."""
    method = getattr(owner, name)
    if method.__module__ == __name__:
        return

    @functools.wraps(method, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def wrapper(self: Any, *arguments: Any, **options: Any) -> Any:
        return function(method, self, *arguments, **options)

    setattr(owner, name, wrapper)
