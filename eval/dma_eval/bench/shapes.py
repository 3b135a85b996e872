"""Shapes as the command line names them."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable
from typing import Any

from dma_eval.errors import UserError

from .results import PrefillShape

DOCUMENTS = 8
"""Documents of a packed sequence."""


def combinations(*options: Iterable[Any], every: bool = False) -> list[tuple[Any, ...]]:
    """Return combinations of the options' values: all, or those that differ from the first in at most one option."""
    found = list(dict.fromkeys(itertools.product(*options)))
    return [each for each in found if every or sum(map(operator.ne, each, found[0])) <= 1]


def prefill_shape(batch: int, length: int, heads: tuple[int, int], head_dim: int, mask: str) -> PrefillShape:
    """Return the shape with these query and kv heads, and a mask of ``--mask``."""
    return PrefillShape(
        length=length,
        head_dim=head_dim,
        query_heads=heads[0],
        kv_heads=heads[1],
        is_causal=mask != "full",
        batch=batch,
        documents=DOCUMENTS if mask == "documents" else 1,
    )


def parse_shape(value: str) -> PrefillShape:
    """Return the shape that ``BATCHxTOKENS:QUERY/KV:HEAD_DIM[:MASK]`` names.

    Raises:
        UserError: It is not of this form.
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*):(\d+/\d+):([1-9]\d*)(?::(full|documents))?", value)
    if found is None:
        raise UserError(
            f"--shape: expected BATCHxTOKENS:QUERY/KV:HEAD_DIM[:MASK], such as 8x4096:32/8:128, got {value!r}"
        )
    batch, length, heads, head_dim, mask = found.groups("causal")
    return prefill_shape(int(batch), int(length), parse_heads(heads), int(head_dim), mask)


def parse_heads(value: str) -> tuple[int, int]:
    """Return query and kv heads.

    Raises:
        UserError: The value is not of the form ``QUERY/KV``.
    """
    found = re.fullmatch(r"0*([1-9]\d*)/0*([1-9]\d*)", value)
    if found is None or int(found[1]) % int(found[2]):
        raise UserError(f"--heads: expected QUERY/KV with KV dividing QUERY, such as 32/8, got {value!r}")
    return int(found[1]), int(found[2])


def parse_size(value: str) -> tuple[int, int]:
    """Return sequences and keys of each.

    Raises:
        UserError: The value is not of the form ``BATCHxKEYS``.
    """
    found = re.fullmatch(r"0*([1-9]\d*)x0*([1-9]\d*)", value)
    if found is None:
        raise UserError(f"--size: expected BATCHxKEYS, such as 8x32768, got {value!r}")
    return int(found[1]), int(found[2])
