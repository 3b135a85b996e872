"""What Transformers combines in a mask function: a pattern, a window, and the documents of packed rows.

The functions keep all of it in closures, which no public interface shows. A function that another release makes in
another way is not recognized. Its mask is then dense, and tiles do not restart with each document.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor
from transformers import masking_utils

_AND = masking_utils.and_masks().__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_PACKED = masking_utils.packed_sequence_mask_function(None).__code__
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # older releases may lack it
_REMAPPED = None if _remap is None else _remap(None, None).__code__


def is_causal_window(mask_function: Callable[..., Any], window: int) -> bool:
    """Return whether a pattern is a causal window of this size, without anything else."""
    parts = _captured(mask_function, _AND).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not masking_utils.causal_mask_function:
        return False
    return bool(_captured(parts[0], _WINDOW).get("sliding_window") == window)


def split_packed(mask_function: Callable[..., Any]) -> tuple[Callable[..., Any], Tensor] | None:
    """Return the pattern within a document, and a number for the document of each token, ``[B, T]``.

    ``None`` means that the function is not that of packed rows.
    """
    parts = _captured(mask_function, _AND).get("mask_functions", ())
    if len(parts) != 2:
        return None
    pattern, packed = parts
    documents = _captured(packed, _PACKED).get("packed_sequence_mask")
    if documents is None:
        return None
    if _REMAPPED is not None:
        pattern = _captured(pattern, _REMAPPED).get("mask_function", pattern)
    return pattern, documents


def _captured(function: Any, code: CodeType) -> dict[str, Any]:
    """Return the variables that a function with this code captured, by name; none of another function."""
    if not isinstance(function, FunctionType) or function.__code__ is not code:
        return {}
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(code.co_freevars, cells, strict=True))
