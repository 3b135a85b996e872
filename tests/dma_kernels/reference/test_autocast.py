"""Autocast changes no bit: fp32 computations of the reference stay in fp32."""

from __future__ import annotations

import pytest
import torch
from dma_kernels import Recipe, attention
from dma_kernels.cache.api import append, cached_attention, restore
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.testing import assert_bits_equal, random_qkv
from torch import Tensor

RECIPES = {
    "identity": Recipe(low="bf16", high="bf16"),
    "balanced": Recipe(low="mxint8", shared_scale="tile", smooth_k=True, rotate=True, pv="fp8"),
    "fp4": Recipe(low="nvfp4", high="bf16", scale_rounding="search", pv="fp8"),
    "paper": Recipe(low="mxfp4", high="mxfp8", scale_rounding="floor"),
}
LENGTH = 300


def compute(recipe: Recipe, dtype: torch.dtype, *, is_cast: bool, is_compiled: bool = False) -> list[Tensor]:
    """Return an output and its gradients; also the backward pass runs under autocast."""
    leaves = [x.requires_grad_() for x in random_qkv(q_len=LENGTH, kv_len=LENGTH, head_dim=32, dtype=dtype)]
    call = torch.compile(attention, backend="eager") if is_compiled else attention
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        out = call(*leaves, recipe, softcap=20.0)
        out.float().square().sum().backward()
    return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_attention_and_its_gradient_are_unchanged(recipe: str, dtype: torch.dtype) -> None:
    ours, expected = (compute(RECIPES[recipe], dtype, is_cast=is_cast) for is_cast in (True, False))
    assert len(ours) == 4
    for each, plain in zip(ours, expected, strict=True):
        assert_bits_equal(each, plain)


def test_compiled_attention_and_its_gradient_are_unchanged() -> None:
    calls = (
        compute(RECIPES["balanced"], torch.float32, is_cast=is_cast, is_compiled=True) for is_cast in (True, False)
    )
    for each, plain in zip(*calls, strict=True):
        assert_bits_equal(each, plain)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_attention_over_a_cache_is_unchanged(format: str) -> None:
    query, key, value = random_qkv(q_heads=4, kv_heads=2, q_len=LENGTH, kv_len=LENGTH, head_dim=32)
    results = []
    for is_cast in (True, False):
        storage = LayerStorage.allocate(
            format, batch=1, kv_heads=2, head_dim=32, value_dim=32, dtype=torch.float32, device=torch.device("cpu"),
            tiles=2,
        )  # fmt: skip
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            append(storage, key[:, :, :250], value[:, :, :250])
            out = cached_attention(*(x[:, :, 250:] for x in (query, key, value)), storage)
            results.append([out, *restore(storage, torch.tensor([0]), LENGTH), *storage.tensors().values()])
    for each, plain in zip(*results, strict=True):
        assert_bits_equal(each, plain)
