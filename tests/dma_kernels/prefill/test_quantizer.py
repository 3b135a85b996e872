"""The quantizer in Triton's interpreter equals the torch quantizer bit for bit, padding included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dma_kernels import Recipe
from dma_kernels.numerics.formats import TILE
from dma_kernels.numerics.quantize import nvfp4_global_scale
from dma_kernels.numerics.transforms import hadamard_rotate
from dma_kernels.prefill.config import select_compute_path
from dma_kernels.prefill.quantizer import quantize_keys_values, query_global_scale
from dma_kernels.testing import assert_bits_equal, random_qkv
from quantized_operands import AMPERE, BLACKWELL, HOPPER, RECIPES, check
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device")


def keys_values(**shape: int) -> tuple[Tensor, Tensor]:
    """Keys and values as Transformers passes them: transposed, non-contiguous views."""
    _, key, value = random_qkv(q_len=1, dtype=torch.float16, **shape)
    key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
    return key, value


@pytest.mark.parametrize("arch", [AMPERE, HOPPER, BLACKWELL])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_operand_format_equals_the_specification(recipe: str, arch: int) -> None:
    key, value = keys_values(kv_heads=2, kv_len=150)
    check(key, value, RECIPES[recipe], arch)


@pytest.mark.parametrize("recipe", ["int8", "e5m2", "nvfp4"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(80, 96), (20, 8), (128, 64)])
def test_every_head_dim_equals_the_specification(recipe: str, head_dim: int, value_dim: int) -> None:
    key, value = keys_values(kv_len=140, head_dim=head_dim, value_dim=value_dim)
    for arch in (HOPPER, BLACKWELL):
        check(key, value, RECIPES[recipe], arch)


@pytest.mark.parametrize("kv_offset", [0, 141, -45])
@pytest.mark.parametrize("kv_len", [1, 128, 300])
def test_padded_storage_starts_at_the_tile_of_key_0(kv_len: int, kv_offset: int) -> None:
    key, value = keys_values(kv_len=kv_len)
    check(key, value, RECIPES["int8"], HOPPER, kv_offset=kv_offset)


def tile_bytes(tensor: Tensor, tiles: int) -> Tensor:
    """Return tile-padded storage as bytes ``[B, Hkv, tiles, bytes of a tile]``."""
    return tensor.contiguous().view(torch.uint8).reshape(*tensor.shape[:2], tiles, -1)


@pytest.mark.parametrize("arch", [AMPERE, HOPPER, BLACKWELL])
@pytest.mark.parametrize("recipe", ["int8", "e4m3", "e5m2-row", "keys-only", "search-mxint8", "nvfp4-low"])
def test_only_low_tiles_are_written_if_high_tiles_are_unquantized(recipe: str, arch: int, poisoned: None) -> None:
    made = (RECIPES | {"nvfp4-low": Recipe(low="nvfp4", smooth_k=True, pv="fp8")})[recipe]
    path, tiles, written = select_compute_path(made, arch), 5, [1, 2]
    key, value = keys_values(kv_heads=2, kv_len=560, head_dim=32)
    whole, part = (
        quantize_keys_values(key, value, made, path, kv_offset=141, seq_info=None, low_tiles=low_tiles)
        for low_tiles in (None, range(1, 3))
    )
    assert whole.low is not None
    assert part.low is not None
    # Scales of the first tile apply to all tiles, and are stored even if it is not.
    for name in ("key_mean", "value_descale"):
        of_whole, of_part = (getattr(each if name == "key_mean" else each.low, name) for each in (whole, part))
        assert (of_whole is None) == (of_part is None)
        if of_whole is not None:
            assert_bits_equal(of_part, of_whole)
    for name in ("key", "value", "key_scale", "key_descale"):
        expected, actual = getattr(whole.low, name), getattr(part.low, name)
        if expected is None or actual is value:
            assert actual is expected
        elif actual.stride()[-1] == 0:  # a head's global scale, shared by its tiles
            assert_bits_equal(actual, expected)
        else:
            expected, actual = tile_bytes(expected, tiles), tile_bytes(actual, tiles)
            assert torch.equal(actual[:, :, written], expected[:, :, written])
            assert (actual[:, :, [0, 3, 4]] == 255).all()


def test_all_tiles_are_written_if_high_tiles_are_quantized() -> None:
    key, value = keys_values(kv_len=300)
    check(key, value, RECIPES["nvfp4"], HOPPER, low_tiles=range(1, 2))


@pytest.mark.parametrize("recipe", ["int8", "nvfp4", "keys-only"])
def test_padded_rows_equal_the_specification(recipe: str) -> None:
    key, value = keys_values(batch=4, kv_len=180, head_dim=32)
    # Padding must not affect scales or the mean.
    key[0, :, :45], key[1, :, 90:], value[0, :, :45], value[1, :, 90:] = 1e4, float("nan"), 1e4, float("nan")
    rows = torch.tensor([[-45, -45, 45, 180], [0, 0, 0, 90], [7, 7, -3, 999], [0, 0, 20, 20]], dtype=torch.int32)
    check(key, value, RECIPES[recipe], HOPPER, rows=rows)


def test_later_tokens_saturate_at_the_range_of_the_first_tile() -> None:
    key, value = keys_values(kv_len=3 * TILE + 20, head_dim=16)
    value[0, 0, 2 * TILE + 70, 3] = 1000.0
    value[0, 0, 3 * TILE + 5, 4] = -900.0
    key[0, 0, 3 * TILE, 0] = 500.0
    for arch in (AMPERE, HOPPER):
        check(key, value, Recipe(low="nvfp4", pv="fp8"), arch)


@pytest.mark.parametrize("recipe", ["int8", "nvfp4"])
@pytest.mark.parametrize("first", [0.0, float("nan"), float("inf")])
def test_a_degenerate_first_tile_equals_the_specification(recipe: str, first: float) -> None:
    key, value = keys_values(kv_heads=2, kv_len=200, head_dim=32)
    value[0, 0, :TILE], value[0, 1, :TILE, 3] = first, first
    if first == 0.0:
        key[0, 0, :TILE] = 2.0  # equal to their mean
    for arch in (AMPERE, HOPPER, BLACKWELL):
        check(key, value, RECIPES[recipe], arch)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("recipe", ["int8", "e4m3-floor", "e5m2", "nvfp4", "row", "search", "search-e8m0"])
def test_non_finite_values_spread_as_in_the_specification(recipe: str, bad: float) -> None:
    key, value = keys_values(kv_len=150, head_dim=32)
    key[0, 0, 140, 3], value[0, 0, 120, 5] = bad, bad
    for arch in (AMPERE, HOPPER, BLACKWELL):
        check(key, value, replace(RECIPES[recipe], rotate=False), arch)


@pytest.mark.parametrize("recipe", ["int8", "e5m2", "nvfp4"])
def test_zeros_and_the_smallest_numbers_equal_the_specification(recipe: str) -> None:
    key, value = keys_values(kv_len=300)
    key[:, :, :128] = 0.0
    value[:] = 0.0
    key[:, :, 200:] = 6e-8
    operands = check(key, value, RECIPES[recipe], HOPPER)
    if operands.low is not None and operands.low.key_descale is not None:
        assert operands.low.key_descale[0, 0, 0] == 1.0


def test_the_largest_numbers_equal_the_specification() -> None:
    key, value = (x.bfloat16() for x in keys_values(kv_len=150))
    largest = torch.finfo(torch.bfloat16).max
    key[0, 0, 140, 3], key[0, 0, 141, 4], value[0, 0, 3, 5] = largest, -largest, largest
    for recipe in (RECIPES["int8-floor-rotated"], replace(RECIPES["int8"], smooth_k=False)):
        check(key, value, replace(recipe, rotate=False), HOPPER)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize(("rotate", "rounding"), [(False, "ceil"), (True, "floor"), (True, "search")])
def test_nvfp4_query_scales_equal_the_specification(rotate: bool, rounding: str, head_dim: int) -> None:
    recipe = Recipe(low="nvfp4", high="mxfp8", rotate=rotate, scale_rounding=rounding)
    query, _, _ = random_qkv(batch=2, q_heads=3, q_len=150, kv_len=1, head_dim=head_dim, dtype=torch.float16)
    query[1, 2] *= 37.0
    query[0, 1, 5, 2] = torch.inf if not rotate else 300.0
    actual = query_global_scale(query, recipe)
    x = hadamard_rotate(query) if rotate else query.float()
    blocks = torch.nn.functional.pad(x, (0, -head_dim % 16)).unflatten(-1, (-1, 16)).abs().amax(-1)
    amax = blocks.masked_fill(~blocks.isfinite(), 0.0).amax((-2, -1))
    expected = nvfp4_global_scale(amax, rounding)
    assert actual is not None
    assert_bits_equal(actual, expected)
    assert query_global_scale(query, RECIPES["e5m2"]) is None


@pytest.mark.parametrize("smooth_k", [False, True])
def test_nothing_is_written_for_an_unquantized_recipe(smooth_k: bool) -> None:
    key, value = keys_values(kv_len=130)
    recipe = replace(RECIPES["identity"], smooth_k=smooth_k)
    operands = quantize_keys_values(key, value, recipe, select_compute_path(recipe, 90), kv_offset=0, seq_info=None)
    assert operands.high.key is key
    assert operands.high.value is value
    assert operands.key_mean is None


@pytest.mark.parametrize("recipe", ["int8", "e4m3"])
def test_tiles_without_a_visible_key_are_zero_whatever_the_mean(recipe: str) -> None:
    key, value = keys_values(kv_len=200, head_dim=32)
    key[0, 0, 3, 5] = torch.nan
    rows = torch.tensor([[0, 0, 0, 100]], dtype=torch.int32)
    operands = check(key, value, RECIPES[recipe], HOPPER, rows=rows)
    assert operands.low is not None
    assert (operands.low.key[0, 0, TILE:].float() == 0.0).all()
