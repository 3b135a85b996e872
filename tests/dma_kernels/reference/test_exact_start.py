"""Positions below ``exact_until``. ``test_rule.py`` compares a recipe with such a start with the rule, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from dma_kernels import Recipe, attention
from dma_kernels.testing import assert_bits_equal, random_qkv, relative_error
from plain_attention import plain_attention
from torch import Tensor

LENGTH, BORDER = 700, 384
RECIPE = Recipe(low="mxint8", shared_scale="tile", smooth_k=True, rotate=True, pv="fp8", diagonal_tiles=0)
EXACT_START = replace(RECIPE, exact_until=BORDER)


def qkv(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return random_qkv(q_heads=6, kv_heads=2, q_len=LENGTH, kv_len=LENGTH, dtype=dtype)


@pytest.mark.parametrize("options", [{}, {"window": 300}, {"softcap": 3.0}], ids=str)
def test_rows_below_the_border_are_exact_and_rows_from_it_on_unchanged(options: dict[str, Any]) -> None:
    inputs = qkv()
    exact, low = plain_attention(*inputs, options)[0], attention(*inputs, RECIPE, **options)
    out = attention(*inputs, EXACT_START, **options)
    torch.testing.assert_close(out[:, :, :BORDER], exact[:, :, :BORDER], rtol=1e-11, atol=1e-12)
    assert relative_error(out[:, :, BORDER:], low[:, :, BORDER:]) < 1e-12
    below, above = slice(256, BORDER), slice(BORDER, None)  # rows with a low tile under RECIPE
    assert relative_error(low[:, :, below], exact[:, :, below]) > 1e-4
    assert relative_error(out[:, :, above], exact[:, :, above]) > 1e-4


@pytest.mark.parametrize("exact_until", [128, 1 << 27])
def test_the_identity_does_not_change(exact_until: int) -> None:
    inputs = qkv(torch.float32)
    recipes = Recipe(low="bf16", high="bf16"), Recipe(low="bf16", high="bf16", exact_until=exact_until)
    assert_bits_equal(*(attention(*inputs, recipe) for recipe in recipes))
