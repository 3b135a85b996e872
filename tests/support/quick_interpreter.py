"""Remove redundant work from Triton's interpreter, which takes half of its tests' time.

At each call of a device function the interpreter patches all members of the language's modules again, although the
calling kernel has patched them. It also repeats integer arithmetic in 64 bits to find overflows that it reports only in
debug mode. Checked with Triton 3.6 and 3.9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

from triton import language
from triton.runtime import interpreter


def make_quick() -> None:
    """Patch the language once per kernel, and disable overflow checks."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    patch = interpreter._patch_lang
    replaced: set[ModuleType] = set()

    class Scope:
        """Restores the language at the end of a kernel."""

        def __init__(self, function: Callable[..., Any]) -> None:
            self._scope = patch(function)

        def restore(self) -> None:
            replaced.clear()
            self._scope.restore()

    def patch_once(function: Callable[..., Any]) -> Scope | None:
        """Patch the language for a kernel and return its scope; return ``None`` for a device function."""
        modules = _languages(function)
        if modules and modules <= replaced:
            return None
        scope = Scope(function)
        replaced.update(modules)
        return scope

    interpreter._patch_lang = patch_once


@cache
def _languages(function: Callable[..., Any]) -> frozenset[ModuleType]:
    """Return the language modules in a function's scope, as the interpreter finds them."""
    return frozenset(value for value in function.__globals__.values() if value is language or value is language.core)
