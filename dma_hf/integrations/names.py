"""Errors for names of this package that Transformers refuses. Its own messages list its own names only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, GenerationConfig, PreTrainedModel

from ..config import NAME, check_cache_name, is_dma, preset_of, split_name

CACHE_IMPLEMENTATION = "dma"
"""The value of ``generate(cache_implementation=...)`` for a :class:`~dma_hf.DMACache`."""


def check_attention(
    method: Callable[..., Any], model: PreTrainedModel, requested: Any, *arguments: Any, **options: Any
) -> Any:
    """Call ``get_correct_attn_implementation``, whose error then says which names this package adds.

    Raises:
        ValueError: There is no such name; or the model looks its layers up in a table without the names of this
            package, which would end in a ``KeyError``.
    """
    try:
        found = method(model, requested, *arguments, **options)
    except ValueError as error:
        name = str(requested)
        if name in AttentionInterface():  # a valid name, but not for this model
            raise
        if split_name(name)[0] == NAME:
            _check_suffix(name)
        raise ValueError(
            f"{error} dma_hf adds '{NAME}[:PRESET][+CACHE]', for example '{NAME}:balanced+int4'."
        ) from None
    table = _table_of(model)
    if table is not None and is_dma(found):
        raise ValueError(
            f"attn_implementation={found!r} does not reach {type(model).__name__}, which chooses its layers from "
            f"{table}; load the model with attn_implementation='sdpa', or name dma_mxfp for the language model "
            "alone: {'text_config': 'dma_mxfp'}"
        )
    return found


def _table_of(model: PreTrainedModel) -> str | None:
    """Return the name of the table from which a model looks up its attention layers, by its configuration's name."""
    prefix = type(model.config).__name__.removesuffix("Config").upper()
    for name, table in vars(sys.modules[type(model).__module__]).items():
        if isinstance(table, dict) and "eager" in table and name.replace("_", "").startswith(prefix):
            return name
    return None


def _check_suffix(name: str) -> None:
    """Raise the error for an unknown preset or cache in the name of an attention implementation."""
    suffix = name.removeprefix(NAME)
    try:
        if suffix.startswith(":"):
            preset_of(suffix[1:], "; dma_hf.configure(model, ...) also takes TOML files")
        else:
            check_cache_name(suffix[1:])
    except ValueError as error:
        raise ValueError(f"attn_implementation={name!r}: {error}") from None


def check_generation_config(
    method: Callable[..., Any], config: GenerationConfig, *arguments: Any, **options: Any
) -> Any:
    """Call ``GenerationConfig.validate``, but refuse a cache that only an argument of ``generate`` can name.

    Accepting it would let ``generation_config.json`` name a cache that fails to load without this package.
    """
    if config.cache_implementation == CACHE_IMPLEMENTATION:
        raise ValueError(
            f"cache_implementation={CACHE_IMPLEMENTATION!r} is an argument of generate for models that run "
            "dma_mxfp, and not a field of GenerationConfig; call model.generate(..., cache_implementation='dma'), "
            "or set the cache of the model: dma_hf.configure(model, cache='int4')"
        )
    return method(config, *arguments, **options)
