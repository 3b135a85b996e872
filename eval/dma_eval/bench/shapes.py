"""Shapes as the command line names them."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Sequence

from dma_eval.errors import UserError

from .results import DecodeShape, PrefillShape

DOCUMENTS = 8
"""Documents of a packed sequence."""


def prefill_shapes(
    lengths: Sequence[int],
    head_dims: Sequence[int],
    heads: Sequence[str],
    masks: Sequence[str],
    batch: int,
    *,
    every_combination: bool,
) -> list[PrefillShape]:
    """Return the shapes to measure, longest last within each family.

    A family has a head dimension, heads and a mask. Without ``every_combination`` it differs from the first family in
    at most one of them.

    Raises:
        UserError: A number of heads is invalid.
    """
    families = list(dict.fromkeys(itertools.product(head_dims, map(parse_heads, heads), masks)))
    if not every_combination:
        families = [family for family in families if sum(map(operator.ne, family, families[0])) <= 1]
    return [
        PrefillShape(
            length=length,
            head_dim=head_dim,
            query_heads=query_heads,
            kv_heads=kv_heads,
            is_causal=mask != "full",
            batch=batch,
            documents=DOCUMENTS if mask == "documents" else 1,
        )
        for head_dim, (query_heads, kv_heads), mask in families
        for length in sorted(set(lengths))
    ]


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
    (shape,) = prefill_shapes([int(length)], [int(head_dim)], [heads], [mask], int(batch), every_combination=True)
    return shape


def decode_shapes(sizes: Sequence[str], heads: Sequence[str], head_dims: Sequence[int]) -> list[DecodeShape]:
    """Return the shapes to measure: all sizes with the first values of heads and head dimension, or one other value.

    Raises:
        UserError: A value is invalid. The message names the option.
    """
    pairs = [parse_heads(value) for value in heads]
    families = [(pairs[0], head_dim) for head_dim in head_dims] + [(pair, head_dims[0]) for pair in pairs[1:]]
    return [
        DecodeShape(length=length, batch=batch, head_dim=head_dim, query_heads=query_heads, kv_heads=kv_heads)
        for (query_heads, kv_heads), head_dim in dict.fromkeys(families)
        for batch, length in map(_parse_size, sizes)
    ]


def parse_heads(value: str) -> tuple[int, int]:
    """Return query and kv heads.

    Raises:
        UserError: The value is not of the form ``QUERY/KV``.
    """
    found = re.fullmatch(r"0*([1-9]\d*)/0*([1-9]\d*)", value)
    if found is None or int(found[1]) % int(found[2]):
        raise UserError(f"--heads: expected QUERY/KV with KV dividing QUERY, such as 32/8, got {value!r}")
    return int(found[1]), int(found[2])


def _parse_size(value: str) -> tuple[int, int]:
    found = re.fullmatch(r"0*([1-9]\d*)x0*([1-9]\d*)", value)
    if found is None:
        raise UserError(f"--size: expected BATCHxKEYS, such as 8x32768, got {value!r}")
    return int(found[1]), int(found[2])
