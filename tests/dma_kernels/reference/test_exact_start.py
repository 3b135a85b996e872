"""Positions below ``exact_until``: their causal queries attend exactly, and all others are unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from dma_kernels import Recipe, attention, attention_with_lse
from dma_kernels.testing import assert_bits_equal, random_qkv, relative_error
from plain_attention import plain_attention
from torch import Tensor

LENGTH, BORDER = 700, 384
RECIPE = Recipe(low="mxint8", shared_scale="tile", smooth_k=True, rotate=True, pv="fp8", diagonal_tiles=0)
EXACT_START = replace(RECIPE, exact_until=BORDER)


def qkv(**shapes: Any) -> tuple[Tensor, Tensor, Tensor]:
    defaults = {"q_heads": 6, "kv_heads": 2, "q_len": LENGTH, "kv_len": LENGTH, "dtype": torch.float64}
    return random_qkv(**(defaults | shapes))


@pytest.mark.parametrize("options", [{}, {"window": 300}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("block_rows", [None, 50], ids=["one-block", "blocks-of-50-rows"])
def test_rows_below_the_border_are_exact_and_rows_from_it_on_unchanged(
    options: dict[str, Any], block_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if block_rows is not None:  # some blocks hold rows on both sides
        monkeypatch.setattr("dma_kernels.reference.attention.SCORE_BYTES", LENGTH * 4 * 6 * block_rows)
    inputs = qkv()
    exact, low = plain_attention(*inputs, options)[0], attention(*inputs, RECIPE, **options)
    out = attention(*inputs, EXACT_START, **options)
    torch.testing.assert_close(out[:, :, :BORDER], exact[:, :, :BORDER], rtol=1e-11, atol=1e-12)
    assert relative_error(out[:, :, BORDER:], low[:, :, BORDER:]) < 1e-12
    below, above = slice(256, BORDER), slice(BORDER, None)  # rows with a low tile under RECIPE
    assert relative_error(low[:, :, below], exact[:, :, below]) > 1e-4
    assert relative_error(out[:, :, above], exact[:, :, above]) > 1e-4


def test_a_call_below_the_border_equals_exact_attention_to_rounding() -> None:
    inputs = qkv(q_len=BORDER, kv_len=BORDER)
    identity = Recipe(low="bf16", high="bf16")
    results = (attention_with_lse(*inputs, recipe) for recipe in (EXACT_START, identity))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("q_offset", [0, 70, 250, 383])
def test_positions_decide_and_not_rows(q_offset: int) -> None:
    query, key, value = qkv()
    whole = attention(query, key, value, EXACT_START)
    rows = slice(q_offset, q_offset + 130)
    part = attention(query[:, :, rows], key, value, EXACT_START, q_offset=q_offset)
    assert relative_error(part, whole[:, :, rows]) < 1e-12


def test_padded_batch_rows_start_at_their_first_token() -> None:
    query, key, value = qkv(batch=2)
    padding = torch.tensor([0, 100])
    kv_range = torch.stack((padding, torch.full_like(padding, LENGTH)), 1)
    out = attention(query, key, value, EXACT_START, kv_range=kv_range, kv_offset=-padding, q_offset=-padding)
    for row, start in enumerate(padding.tolist()):
        alone = (x[row : row + 1, :, start:] for x in (query, key, value))
        assert relative_error(out[row : row + 1, :, start:], attention(*alone, EXACT_START)) < 1e-12


def test_bidirectional_calls_ignore_the_border() -> None:
    inputs = qkv()
    results = (attention(*inputs, recipe, is_causal=False) for recipe in (RECIPE, EXACT_START))
    assert_bits_equal(*results)


@pytest.mark.parametrize("exact_until", [128, 1 << 27])
def test_the_identity_does_not_change(exact_until: int) -> None:
    inputs = qkv(dtype=torch.float32)
    recipes = Recipe(low="bf16", high="bf16"), Recipe(low="bf16", high="bf16", exact_until=exact_until)
    assert_bits_equal(*(attention(*inputs, recipe) for recipe in recipes))
