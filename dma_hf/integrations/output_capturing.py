"""Whether a forward pass collects attention weights. Models such as GPT-2 do not pass ``output_attentions`` on."""

from __future__ import annotations

from typing import Any

from .versions import private_imports

with private_imports():
    from transformers.utils.output_capturing import _active_collector


def is_collecting_attentions() -> bool:
    """Return whether the running model collects attention weights with hooks."""
    collected = _active_collector.get()
    return bool(collected) and any(name.endswith("attentions") for name in collected)


def is_output_hook(hook: Any) -> bool:
    """Return whether a forward hook is one of Transformers that only collects requested outputs."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"
