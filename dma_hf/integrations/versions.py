"""The supported versions of Transformers, and the error for all others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import transformers

SUPPORTED = ">=5.18,<5.25"
"""The range in ``pyproject.toml``. Continuous integration tests both ends."""


class UnsupportedTransformersError(RuntimeError):
    """A private interface of the installed Transformers differs from the supported versions."""


def _unsupported(interface: str, difference: str) -> UnsupportedTransformersError:
    return UnsupportedTransformersError(
        f"Transformers {transformers.__version__} is installed, where {interface} {difference}; dma-hf supports "
        f"transformers{SUPPORTED}: pip install 'transformers{SUPPORTED}'"
    )


def check_version(interface: str) -> None:
    """Check that the installed Transformers is one that continuous integration tests.

    Raises:
        UnsupportedTransformersError: It is older or newer.
    """
    oldest, too_new = (tuple(map(int, re.findall(r"\d+", bound))) for bound in SUPPORTED.split(","))
    if not oldest <= tuple(map(int, transformers.__version__.split(".")[:2])) < too_new:
        raise _unsupported(interface, "has not been tested")


@contextmanager
def private_imports() -> Iterator[None]:
    """Turn a failed import from Transformers within a ``with`` block into :class:`UnsupportedTransformersError`."""
    try:
        yield
    except ImportError as error:
        if not str(error.name).startswith("transformers"):
            raise
        raise _unsupported(str(error.name), f"cannot be imported as expected ({error})") from error
