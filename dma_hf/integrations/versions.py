"""Which versions of Transformers this package supports, and the error for a version that differs from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import transformers

SUPPORTED = ">=5.17,<5.25"
"""As in ``pyproject.toml``; continuous integration tests both ends of it."""


class UnsupportedTransformersError(RuntimeError):
    """A private interface of the installed Transformers is not what this package was written for.

    Args:
        interface: The function or class, by name.
        difference: What is different about it.
    """

    def __init__(self, interface: str, difference: str) -> None:
        super().__init__(
            f"Transformers {transformers.__version__} is installed, where {interface} {difference}; dma-hf supports "
            f"transformers{SUPPORTED}: pip install 'transformers{SUPPORTED}'"
        )
        self.interface, self.difference = interface, difference

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.interface, self.difference)


@contextmanager
def private_imports() -> Iterator[None]:
    """Within a ``with`` block, report an import from Transformers that fails as an unsupported version."""
    try:
        yield
    except ImportError as error:
        if not str(error.name).startswith("transformers"):
            raise
        raise UnsupportedTransformersError(str(error.name), f"cannot be imported as expected ({error})") from error


def check_parameters(function: Callable[..., Any], *known: str) -> None:
    """Check that a function has the parameters of one of the supported versions.

    Args:
        function: The function.
        known: Its parameters without ``self``, separated by spaces; one string for each form that is known.

    Raises:
        UnsupportedTransformersError: It has others.
    """
    found = " ".join(name for name in inspect.signature(function).parameters if name != "self")
    if found not in known:
        expected = " or ".join(f"({each})" for each in known)
        raise UnsupportedTransformersError(function.__qualname__, f"takes ({found}), not {expected}")


def check_attributes(owner: Any, names: Collection[str]) -> None:
    """Check that an object or a class has attributes.

    Raises:
        UnsupportedTransformersError: One is missing.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        kind = owner.__qualname__ if isinstance(owner, type) else type(owner).__qualname__
        raise UnsupportedTransformersError(kind, f"has no {', '.join(missing)}")
