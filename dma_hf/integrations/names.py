"""Errors for names of this package that Transformers refuses. Its own messages list its own names only."""

from __future__ import annotations

import functools
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..config import IMPLEMENTATIONS, NAME, check_cache_name, preset_of, split_name

CACHE_IMPLEMENTATION = "dma"
"""The value of ``generate(cache_implementation=...)`` for a :class:`~dma_hf.DMACache`."""


def wrap_name_checks() -> None:
    """Have Transformers' checks of ``attn_implementation`` and ``cache_implementation`` give the way out."""
    _wrap_attention_check()
    _wrap_cache_check()


def _wrap_attention_check() -> None:
    original = PreTrainedModel.get_correct_attn_implementation
    if original.__module__ == __name__:
        return

    @functools.wraps(original, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: Any, *arguments: Any, **options: Any
    ) -> Any:
        asked = str(requested_attention)
        if split_name(asked)[0] == NAME and asked not in IMPLEMENTATIONS:
            try:
                _check_suffix(asked.removeprefix(NAME))
            except ValueError as error:
                raise ValueError(f"attn_implementation={asked!r}: {error}") from None
        return original(self, requested_attention, *arguments, **options)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def _wrap_cache_check() -> None:
    original = GenerationConfig.validate
    if original.__module__ == __name__:
        return

    @functools.wraps(original, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def validate(self: GenerationConfig, *arguments: Any, **options: Any) -> Any:
        if self.cache_implementation == CACHE_IMPLEMENTATION:
            # Accepting it would let generation_config.json name a cache that fails to load without this package.
            raise ValueError(
                f"cache_implementation={CACHE_IMPLEMENTATION!r} is an argument of generate for models that run "
                "dma_mxfp, and not a field of GenerationConfig; call model.generate(..., cache_implementation='dma'), "
                "or set the cache of the model: dma_hf.configure(model, cache='int4')"
            )
        return original(self, *arguments, **options)

    GenerationConfig.validate = validate


def _check_suffix(suffix: str) -> None:
    """Raise the error for a suffix of ``dma_mxfp`` that is not registered."""
    if suffix.startswith(":"):
        preset_of(suffix[1:], "; dma_hf.configure(model, ...) also takes TOML files")
    check_cache_name(suffix[1:])
