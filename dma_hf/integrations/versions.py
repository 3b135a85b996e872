"""The supported versions of Transformers, and the error for all others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers

SUPPORTED = ">=5.18,<5.25"
"""The range in ``pyproject.toml``. Continuous integration tests both ends."""


class UnsupportedTransformersError(RuntimeError):
    """A private interface of the installed Transformers differs from the supported versions.

    Args:
        interface: Name of the function or class.
        difference: How it differs, to complete a sentence.
    """

    def __init__(self, interface: str, difference: str) -> None:
        super().__init__(
            f"Transformers {transformers.__version__} is installed, where {interface} {difference}; dma-hf supports "
            f"transformers{SUPPORTED}: pip install 'transformers{SUPPORTED}'"
        )
        self.interface, self.difference = interface, difference

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.interface, self.difference)


def check_version(interface: str) -> None:
    """Check that the installed Transformers is one that continuous integration tests.

    Raises:
        UnsupportedTransformersError: It is older or newer.
    """
    oldest, too_new = (tuple(map(int, re.findall(r"\d+", bound))) for bound in SUPPORTED.split(","))
    if not oldest <= tuple(map(int, transformers.__version__.split(".")[:2])) < too_new:
        raise UnsupportedTransformersError(interface, "has not been tested")


@contextmanager
def private_imports() -> Iterator[None]:
    """Turn a failed import from Transformers within a ``with`` block into :class:`UnsupportedTransformersError`."""
    try:
        yield
    except ImportError as error:
        if not str(error.name).startswith("transformers"):
            raise
        raise UnsupportedTransformersError(str(error.name), f"cannot be imported as expected ({error})") from error
