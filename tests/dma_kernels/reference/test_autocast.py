"""Autocast changes no bit: fp32 computations of the reference stay in fp32."""

from __future__ import annotations

import pytest
import torch
from dma_kernels import Recipe, attention
from dma_kernels.cache.api import append, cached_attention, restore
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.testing import RECIPES, assert_bits_equal, random_qkv
from torch import Tensor

LENGTH = 300


def compute(recipe: Recipe, dtype: torch.dtype, *, is_cast: bool, is_compiled: bool) -> list[Tensor | None]:
    """Return an output and its gradients; also the backward pass runs under autocast."""
    leaves = [x.requires_grad_() for x in random_qkv(q_len=LENGTH, kv_len=LENGTH, head_dim=32, dtype=dtype)]
    call = torch.compile(attention, backend="eager") if is_compiled else attention
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        out = call(*leaves, recipe, softcap=20.0)
        out.float().square().sum().backward()
    return [out, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(
    ("recipe", "dtype", "is_compiled"),
    [
        ("identity", torch.bfloat16, False),
        ("mxint8-tile", torch.float32, False),
        ("mxint8-tile", torch.float32, True),
        ("nvfp4-keys-search", torch.float32, False),
        ("paper", torch.bfloat16, False),
    ],
)
def test_attention_and_its_gradient_are_unchanged(recipe: str, dtype: torch.dtype, is_compiled: bool) -> None:
    results = (compute(RECIPES[recipe], dtype, is_cast=is_cast, is_compiled=is_compiled) for is_cast in (True, False))
    for ours, plain in zip(*results, strict=True):
        assert ours is not None
        assert plain is not None
        assert_bits_equal(ours, plain)


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
