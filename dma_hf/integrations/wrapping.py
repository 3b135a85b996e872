"""Methods of Transformers that this package wraps once, at import. ``docs/compatibility.md`` says why."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap_method(owner: type, name: str, function: Callable[..., Any]) -> None:
    """Have ``function(method, self, ...)`` answer calls of a public method, unless it is wrapped already."""
    method = getattr(owner, name)
    if method.__module__ == __name__:
        return

    @functools.wraps(method, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def wrapper(self: Any, *arguments: Any, **options: Any) -> Any:
        return function(method, self, *arguments, **options)

    setattr(owner, name, wrapper)
