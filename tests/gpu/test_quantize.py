"""The quantizer on a GPU equals the torch quantizer on the same GPU bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dma_kernels.testing import random_qkv
from quantized_operands import AMPERE, BLACKWELL, HOPPER, RECIPES, check

pytestmark = pytest.mark.gpu

# A chip with the necessary casts can write the operand formats of other chips.
ARCHS = (AMPERE, HOPPER, BLACKWELL)


@pytest.fixture(autouse=True)
def has_fp8_casts() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("casts to E4M3 need compute capability 8.9")


def keys_values(dtype: torch.dtype, **shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    _, key, value = random_qkv(q_len=1, dtype=dtype, device="cuda", **shape)
    key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
    return key, value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_operand_format_equals_the_specification(recipe: str, dtype: torch.dtype) -> None:
    key, value = keys_values(dtype, batch=2, kv_heads=3, kv_len=1000, head_dim=128)
    poison = torch.full((1 << 24,), float("nan"), device="cuda")
    del poison  # the allocator reuses this memory for the outputs
    for arch in ARCHS:
        check(key, value, RECIPES[recipe], arch)


@pytest.mark.parametrize("head_dim", [64, 80, 192, 256])
@pytest.mark.parametrize("recipe", ["int8", "e5m2", "nvfp4"])
def test_every_head_dim_equals_the_specification(recipe: str, head_dim: int) -> None:
    key, value = keys_values(torch.bfloat16, kv_heads=2, kv_len=777, head_dim=head_dim)
    check(key, value, RECIPES[recipe], HOPPER)


@pytest.mark.parametrize("recipe", ["int8", "nvfp4"])
def test_padded_rows_equal_the_specification(recipe: str) -> None:
    key, value = keys_values(torch.bfloat16, batch=3, kv_heads=2, kv_len=5000)
    rows = torch.tensor([[-45, -45, 45, 5000], [0, 0, 0, 3000], [0, 0, 9, 9]], dtype=torch.int32, device="cuda")
    check(key, value, RECIPES[recipe], HOPPER, rows=rows)


def test_tensors_may_have_more_elements_than_32_bits_count() -> None:
    key = torch.randn(1, 1, 128, 128, dtype=torch.bfloat16, device="cuda")
    storage = torch.zeros(17_000_000 * 128, dtype=torch.bfloat16, device="cuda")  # 4.4 GB
    spread = storage.as_strided((1, 1, 128, 128), (0, 0, 17_000_000, 1))
    spread.copy_(key)
    check(spread, spread, RECIPES["int8"], HOPPER)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("recipe", ["int8", "e4m3-floor", "e5m2", "nvfp4"])
def test_non_finite_values_spread_as_in_the_specification(recipe: str, bad: float) -> None:
    # GPU arithmetic produces other NaNs than the interpreter.
    key, value = keys_values(torch.bfloat16, kv_heads=2, kv_len=500, head_dim=64)
    key[0, 0, 300, 3], value[0, 0, 400, 5] = bad, bad
    recipe_without_rotation = replace(RECIPES[recipe], rotate=False)
    for arch in ARCHS:
        check(key, value, recipe_without_rotation, arch)


def test_the_largest_numbers_equal_the_specification() -> None:
    key, value = keys_values(torch.bfloat16, kv_len=200)
    largest = torch.finfo(torch.bfloat16).max
    key[0, 0, 150, 3], key[0, 0, 151, 4], value[0, 0, 3, 5] = largest, -largest, largest
    check(key, value, RECIPES["int8-floor-rotated"], HOPPER)
    check(key, value, replace(RECIPES["int8"], smooth_k=False), HOPPER)
