"""Shapes as the command line names them."""

from __future__ import annotations

import re

from dma_eval.errors import UserError

from .results import PrefillShape

DOCUMENTS = 8
"""Documents of a packed sequence."""


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
    query_heads, kv_heads = parse_heads(heads, "--shape")
    return PrefillShape(
        length=int(length),
        head_dim=int(head_dim),
        query_heads=query_heads,
        kv_heads=kv_heads,
        is_causal=mask != "full",
        batch=int(batch),
        documents=DOCUMENTS if mask == "documents" else 1,
    )


def parse_heads(value: str, option: str = "--heads") -> tuple[int, int]:
    """Return query and kv heads.

    Raises:
        UserError: The value is not of the form ``QUERY/KV``.
    """
    found = re.fullmatch(r"0*([1-9]\d*)/0*([1-9]\d*)", value)
    if found is None or int(found[1]) % int(found[2]):
        raise UserError(f"{option}: expected QUERY/KV with KV dividing QUERY, such as 32/8, got {value!r}")
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
