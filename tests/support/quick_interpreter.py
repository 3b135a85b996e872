"""Triton's interpreter without work that it does again and throws away, half of the time of the tests that run in it.

At each call of a device function it replaces the language by a walk through all members of its modules, though the
kernel that calls has replaced it already; and it adds, subtracts and multiplies integers a second time, in 64 bits, for
overflows that it reports in debug mode alone. So do Triton 3.6 and 3.9.
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
    """Have the language replaced once for a kernel, and no overflow looked for."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    patch = interpreter._patch_lang
    replaced: set[ModuleType] = set()

    class Scope:
        """Of a kernel: at its end the language is what it was."""

        def __init__(self, function: Callable[..., Any]) -> None:
            self._scope = patch(function)

        def restore(self) -> None:
            replaced.clear()
            self._scope.restore()

    def patch_once(function: Callable[..., Any]) -> Scope | None:
        """Return what a kernel calls at its end; a device function, which is called by a kernel, calls nothing."""
        modules = _languages(function)
        if modules and modules <= replaced:
            return None
        scope = Scope(function)
        replaced.update(modules)
        return scope

    interpreter._patch_lang = patch_once


@cache
def _languages(function: Callable[..., Any]) -> frozenset[ModuleType]:
    """Return the modules of the language that a function sees, as the interpreter finds them."""
    return frozenset(value for value in function.__globals__.values() if value is language or value is language.core)
