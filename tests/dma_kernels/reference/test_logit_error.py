"""The error of the logits of low tiles."""

from __future__ import annotations

import pytest
import torch
from dma_kernels import Recipe, quantize
from dma_kernels.reference.operands import logit_error
from dma_kernels.testing import random_qkv


@pytest.fixture
def query_and_key():
    shape = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 64, "kv_len": 160, "head_dim": 32}
    query, key, _ = random_qkv(**shape, dtype=torch.float64)
    return query, key


def test_it_is_zero_without_rounding_whatever_the_transforms(query_and_key):
    recipe = Recipe(low="bf16", smooth_k=True, rotate=True)
    assert logit_error(*query_and_key, recipe, 0.5).max() < 1e-6


def test_it_is_the_rms_of_the_error_without_the_mean_of_each_query(query_and_key):
    query, key = query_and_key
    rounded = [quantize(x, "mxfp4", scale_rounding="floor").dequantize().double() for x in (query, key)]
    exact, low = (q @ k.repeat_interleave(2, 1).mT * 0.5 for q, k in ((query, key), rounded))
    error = (low - exact) - (low - exact).mean(-1, keepdim=True)
    found = logit_error(query, key, Recipe(low="mxfp4", scale_rounding="floor", pv="fp8"), 0.5)
    assert found.shape == (2, 4)
    torch.testing.assert_close(found, error.square().mean((2, 3)).sqrt(), check_dtype=False)
