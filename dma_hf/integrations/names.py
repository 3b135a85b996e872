"""The error for an unknown ``dma_mxfp:...``, which lists the presets; that of Transformers lists its own names."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedModel

from ..config import preset
from ..settings import IMPLEMENTATIONS, NAME


def wrap_name_check() -> None:
    """Have ``PreTrainedModel`` check the part of a name after ``dma_mxfp:``."""
    original = PreTrainedModel.get_correct_attn_implementation
    if original.__module__ == __name__:
        return

    @functools.wraps(original, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: Any, *arguments: Any, **options: Any
    ) -> Any:
        name, colon, setting = str(requested_attention).partition(":")
        if name == NAME and colon and requested_attention not in IMPLEMENTATIONS:
            try:
                preset(setting)
            except ValueError as error:
                raise ValueError(f"attn_implementation={requested_attention!r}: {error}") from None
        return original(self, requested_attention, *arguments, **options)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
