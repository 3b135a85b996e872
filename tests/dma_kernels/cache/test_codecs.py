"""The codecs of a cache's tiles stand for exactly what a forward pass quantises."""

from __future__ import annotations

import math

import pytest
import torch
from dma_kernels import Recipe
from dma_kernels.cache.codecs import key_codec, value_codec
from dma_kernels.reference.operands import prepare_operands
from dma_kernels.testing import RECIPES, assert_bits_equal, random_qkv, relative_error

TILES = 3
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
dims = pytest.mark.parametrize("dim", [64, 80], ids=lambda dim: f"d{dim}")


def _tiles(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-2, (TILES, 128))


def _case(recipe: Recipe, dim: int):
    query, key, value = random_qkv(batch=2, kv_heads=2, q_len=1, kv_len=TILES * 128, head_dim=dim, dtype=torch.float16)
    position = torch.zeros(2, dtype=torch.int64)
    return key, value, prepare_operands(query, key, value, recipe, kv_position=position, visible=None)


@recipes
@dims
def test_keys(recipe: Recipe, dim: int) -> None:
    plain = Recipe(low="bf16", high="bf16", smooth_k=recipe.smooth_k, rotate=recipe.rotate)
    key, value, prepared = _case(recipe, dim)
    position = torch.zeros(2, dtype=torch.int64)
    wide = prepare_operands(key.double(), key.double(), value.double(), plain, kv_position=position, visible=None)
    transformed = wide.k_low if recipe.key_low == "bf16" else wide.k_low.float()
    codec = key_codec(recipe, dim, torch.float16)
    parts = codec.encode(_tiles(transformed))
    assert {name: (tuple(part.shape[3:]), part.dtype) for name, part in parts.items()} == {
        name: (part.shape, part.dtype) for name, part in codec.parts.items()
    }
    decoded = codec.decode(parts).flatten(2, 3)
    if recipe.is_uniform and recipe.high != "bf16":
        assert relative_error(decoded, prepared.k_low) < 1e-6
    else:
        assert_bits_equal(decoded, prepared.k_low)


@recipes
@dims
def test_values(recipe: Recipe, dim: int) -> None:
    _, value, prepared = _case(recipe, dim)
    codec = value_codec(recipe, dim, torch.float16)
    parts = codec.encode(_tiles(value))
    assert {name: (tuple(part.shape[3:]), part.dtype) for name, part in parts.items()} == {
        name: (part.shape, part.dtype) for name, part in codec.parts.items()
    }
    expected = prepared.v_low if prepared.value_scale is None else prepared.v_low * prepared.value_scale
    # A scale of the whole sequence moves the smallest values between E4M3's subnormals.
    assert relative_error(codec.decode(parts).flatten(2, 3), expected) < (1e-4 if recipe.pv == "fp8" else 1e-12)


@recipes
def test_storage_is_what_the_parts_take(recipe: Recipe) -> None:
    for codec in (key_codec(recipe, 80, torch.float16), value_codec(recipe, 80, torch.float16)):
        allocated = codec.allocate(2, 3, 5, device=torch.device("cpu"))
        assert sum(part.nbytes for part in allocated.values()) == 30 * codec.bytes_per_tile
        assert all(part.shape[:3] == (2, 3, 5) and not part.float().any() for part in allocated.values())


def test_bits_per_element() -> None:
    recipe = Recipe(low="mxint8", low_k="nvfp4", low_v="nvfp4")
    bits = 8 * key_codec(recipe, 128, torch.bfloat16).bytes_per_tile / (128 * 128)
    assert math.isclose(bits, 4.5, rel_tol=1e-3)


def test_a_tile_of_zeros_and_one_with_nan() -> None:
    codec = key_codec(Recipe(low="mxint8", shared_scale="tile"), 64, torch.float16)
    tiles = torch.zeros(2, 128, 64)
    tiles[1, 3, 5] = torch.nan
    parts = codec.encode(tiles)
    decoded = codec.decode(parts)
    assert parts["factor"][0] == 1.0
    assert_bits_equal(decoded[0], torch.zeros(128, 64))
    assert decoded[1].isnan().all()
