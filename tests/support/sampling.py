"""Parameters of a test of which continuous integration runs a sample, and ``-m exhaustive`` the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], is_in_sample: Callable[..., bool]) -> list[Any]:
    """Mark the parameters outside the sample as exhaustive; a tuple is passed as separate arguments."""
    found = []
    for value in values:
        several = value if isinstance(value, tuple) else (value,)
        marks = () if is_in_sample(*several) else pytest.mark.exhaustive
        found.append(pytest.param(*several, marks=marks))
    return found
