"""Short calls: a few queries that continue a sequence attend exactly, whatever the low tiles of the recipe are.

``test_rule.py`` tests what is just not a short call: 64 queries, and recipes that quantize high tiles.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dma_kernels import Recipe, attention, attention_with_lse
from dma_kernels.testing import RECIPES, assert_bits_equal, random_qkv, relative_error
from plain_attention import plain_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

UNQUANTIZED_HIGH = {name: recipe for name, recipe in RECIPES.items() if recipe.high == "bf16"}
BALANCED = RECIPES["mxint8-tile"]
KEYS = 700


def qkv(q_len: int, **shapes: Any) -> tuple[Tensor, Tensor, Tensor]:
    defaults = {"batch": 2, "q_heads": 6, "kv_heads": 2, "kv_len": KEYS, "dtype": torch.float64}
    return random_qkv(**(defaults | shapes), q_len=q_len)


@pytest.mark.parametrize("recipe", UNQUANTIZED_HIGH.values(), ids=UNQUANTIZED_HIGH)
@pytest.mark.parametrize("q_len", [1, 63])
def test_up_to_63_queries_equal_those_of_the_identity_bit_for_bit(recipe: Recipe, q_len: int) -> None:
    inputs = [x.float() for x in qkv(q_len)]
    results = (attention_with_lse(*inputs, each, window=400) for each in (recipe, RECIPES["identity"]))
    for ours, identity in zip(*results, strict=True):
        assert_bits_equal(ours, identity)


def test_a_short_call_with_all_options_is_exact_attention() -> None:
    inputs = qkv(10)
    options: dict[str, Any] = {
        "q_offset": torch.tensor([650, 400]),
        "window": 390,
        "softcap": 3.0,
        "sinks": torch.linspace(-2.0, 4.0, 6, dtype=torch.float64),
        "mask": torch.rand(1, 1, 10, KEYS, generator=torch.Generator().manual_seed(2)) < 0.7,
    }
    out = attention(*inputs, BALANCED, **options)
    torch.testing.assert_close(out, plain_attention(*inputs, options)[0], rtol=1e-11, atol=1e-12)


def test_a_bidirectional_call_of_a_few_queries_has_low_tiles() -> None:
    inputs = qkv(10)
    exact = scaled_dot_product_attention(*inputs, enable_gqa=True)
    assert relative_error(attention(*inputs, BALANCED, is_causal=False), exact) > 1e-4


def test_a_prompt_of_a_few_tokens_in_a_static_cache_is_exact() -> None:
    query, key, value = qkv(10)
    key[:, :, 10:] = value[:, :, 10:] = math.nan
    kv_range = torch.tensor([[0, 10], [0, 10]])
    out = attention(query, key, value, BALANCED, q_offset=torch.tensor(0), kv_range=kv_range)
    expected = plain_attention(query, key[:, :, :10], value[:, :, :10], {})[0]
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)


def test_tile_counts_of_a_short_call_stay_zero() -> None:
    counts = torch.zeros(6, 2, dtype=torch.int64)
    recipe = Recipe(low="mxint8", skip_threshold=1e-9)
    inputs = qkv(63)
    out = attention(*inputs, recipe, tile_counts=counts)
    assert counts.eq(0).all()
    assert relative_error(out, plain_attention(*inputs, {})[0]) < 1e-12
