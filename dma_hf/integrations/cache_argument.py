"""The name of the cache argument in the installed Transformers."""

from __future__ import annotations

import inspect

from transformers import GenerationMixin

_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters

CACHE_ARGUMENT = "cache" if "cache" in _PARAMETERS else "past_key_values"
"""``cache`` in Transformers 5.24 and later, which deprecates ``past_key_values``."""

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the argument with which a caller may pass a cache to ``generate``."""
