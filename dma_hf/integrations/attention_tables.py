"""Errors for names of attention implementations: mistyped ones, and models whose table of layers lacks them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, PreTrainedModel

from ..config import NAME, check_cache_name, is_dma, preset_of, split_name


def check_attention(
    method: Callable[..., Any], model: PreTrainedModel, requested: Any, *arguments: Any, **options: Any
) -> Any:
    """Call ``get_correct_attn_implementation``, and refuse a model whose constructor would raise a ``KeyError``.

    Raises:
        ValueError: The name is unknown, and the message says which names this package adds. Or the model looks up its
            attention layers by the name of the implementation (Falcon, SAM).
    """
    try:
        name = method(model, requested, *arguments, **options)
    except ValueError as error:
        if str(requested) in AttentionInterface():  # a valid name, but not for this model
            raise
        if split_name(str(requested))[0] == NAME:
            _check_suffix(str(requested))
        raise ValueError(
            f"{error} dma_hf adds '{NAME}[:PRESET][+CACHE]', for example '{NAME}:balanced+int4'."
        ) from None
    table = _table_of(model)
    if table is not None and is_dma(name):
        raise ValueError(
            f"attn_implementation={name!r} does not reach {type(model).__name__}, which chooses its layers from "
            f"{table}; load the model with attn_implementation='sdpa', or name dma_mxfp for the language model "
            "alone: {'text_config': 'dma_mxfp'}"
        )
    return name


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


def _table_of(model: PreTrainedModel) -> str | None:
    """Return the name of the table of a model's attention layers, which begins as that of its configuration."""
    prefix = type(model.config).__name__.removesuffix("Config").upper()
    for name, table in vars(sys.modules[type(model).__module__]).items():
        if isinstance(table, dict) and "eager" in table and name.replace("_", "").startswith(prefix):
            return name
    return None
