"""The error for models that look up their attention layers by the name of the implementation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from ..config import is_dma


def check_attention(method: Callable[..., Any], model: PreTrainedModel, *arguments: Any, **options: Any) -> Any:
    """Call ``get_correct_attn_implementation``, and refuse a model whose constructor would raise a ``KeyError``.

    Raises:
        ValueError: The model looks up its attention layers by the name of the implementation (Falcon, SAM).
    """
    name = method(model, *arguments, **options)
    table = _table_of(model) if is_dma(name) else None
    if table is not None:
        raise ValueError(
            f"attn_implementation={name!r} does not reach {type(model).__name__}, which chooses its layers from "
            f"{table}; load the model with attn_implementation='sdpa', or name dma_mxfp for the language model "
            "alone: {'text_config': 'dma_mxfp'}"
        )
    return name


def _table_of(model: PreTrainedModel) -> str | None:
    """Return the name of the table of a model's attention layers, which begins as that of its configuration."""
    prefix = type(model.config).__name__.removesuffix("Config").upper()
    for name, table in vars(sys.modules[type(model).__module__]).items():
        if isinstance(table, dict) and "eager" in table and name.replace("_", "").startswith(prefix):
            return name
    return None
