"""Whether a forward pass collects attention weights. Models such as GPT-2 do not pass ``output_attentions`` on."""

from __future__ import annotations

from functools import cache
from typing import Any

from .versions import check_attributes, private_imports


def is_collecting_attentions() -> bool:
    """Return whether the running model collects attention weights with hooks."""
    collected = _collector().get()
    return bool(collected) and any(name.endswith("attentions") for name in collected)


@cache
def _collector() -> Any:
    with private_imports():
        from transformers.utils.output_capturing import _active_collector
    check_attributes(_active_collector, ["get"])
    return _active_collector


def is_output_hook(hook: Any) -> bool:
    """Return whether a forward hook is one of Transformers that only collects requested outputs."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"
