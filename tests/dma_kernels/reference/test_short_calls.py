"""Short calls: a few queries that continue a sequence attend exactly, whatever the low tiles of the recipe are.

``test_rule.py`` compares them, and what is just not a short call, with the rule.
"""

from __future__ import annotations

import math

import torch
from dma_kernels import Recipe, attention
from dma_kernels.testing import RECIPES, random_qkv, relative_error
from plain_attention import plain_attention
from torch import Tensor


def qkv(q_len: int) -> tuple[Tensor, Tensor, Tensor]:
    return random_qkv(batch=2, q_heads=6, kv_heads=2, q_len=q_len, kv_len=700, dtype=torch.float64)


def test_a_prompt_of_a_few_tokens_in_a_static_cache_is_exact() -> None:
    query, key, value = qkv(10)
    key[:, :, 10:] = value[:, :, 10:] = math.nan
    kv_range = torch.tensor([[0, 10], [0, 10]])
    out = attention(query, key, value, RECIPES["mxint8-tile"], q_offset=torch.tensor(0), kv_range=kv_range)
    expected = plain_attention(query, key[:, :, :10], value[:, :, :10], {})[0]
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)


def test_tile_counts_of_a_short_call_stay_zero() -> None:
    counts = torch.zeros(6, 2, dtype=torch.int64)
    inputs = qkv(63)
    out = attention(*inputs, Recipe(low="mxint8", skip_threshold=1e-9), tile_counts=counts)
    assert counts.eq(0).all()
    assert relative_error(out, plain_attention(*inputs, {})[0]) < 1e-12
