"""The name under which the installed Transformers takes and returns a cache."""

from __future__ import annotations

import inspect

from transformers import GenerationMixin

_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters

CACHE_ARGUMENT = "cache" if "cache" in _PARAMETERS else "past_key_values"
"""``cache`` as of Transformers 5.24, where the older ``past_key_values`` is deprecated."""

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""The names under which a caller may pass a cache to ``generate``."""
