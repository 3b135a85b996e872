"""The kernel that dequantises a cache's body leaves every bit as the codecs do, and nothing where there is no tile."""

from __future__ import annotations

import pytest
import torch
from decode_cases import RECIPES, Case
from dequantize_cases import CASES, DTYPES, assert_dequantized, complete_slots, random_body
from dma_kernels.cache.dequantize import dequantize_body
from dma_kernels.numerics.formats import TILE

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_codec(recipe: str, dtype: torch.dtype) -> None:
    assert_dequantized(CASES["ragged"].storage(RECIPES[recipe], dtype, "cpu"), dtype)


@pytest.mark.parametrize("recipe", ["kv4", "kv8", "kv4-q8", "blocks", "e4m3-q16"])
@pytest.mark.parametrize("case", [name for name in CASES if name != "ragged"])
def test_every_shape(case: str, recipe: str) -> None:
    assert_dequantized(CASES[case].storage(RECIPES[recipe], torch.bfloat16, "cpu"), torch.bfloat16)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_byte(recipe: str) -> None:
    assert_dequantized(random_body(recipe, torch.bfloat16, "cpu"), torch.bfloat16)


@pytest.mark.parametrize(
    ("key_dtype", "value_dtype"),
    [(torch.bfloat16, torch.float16), (torch.float16, None), (None, torch.float16)],
    ids=["both", "keys", "values"],
)
def test_what_is_wanted(key_dtype: torch.dtype | None, value_dtype: torch.dtype | None) -> None:
    storage = Case(kv_len=200).storage(RECIPES["kv4"], torch.float16, "cpu")
    for actual, dtype, codec, body in zip(
        dequantize_body(storage, key_dtype, value_dtype),
        (key_dtype, value_dtype),
        (storage.key_codec, storage.value_codec),
        (storage.key_body, storage.value_body),
        strict=True,
    ):
        assert (actual is None) == (dtype is None)
        if actual is not None:
            assert actual.dtype == dtype
            assert torch.equal(actual[:, :, :TILE].float(), codec.decode(body)[:, :, 0])


@pytest.mark.parametrize("recipe", ["kv4", "kv8"])
def test_what_holds_no_complete_tile_is_not_written(recipe: str) -> None:
    storage = CASES["ragged"].storage(RECIPES[recipe], torch.bfloat16, "cpu")
    assert complete_slots(storage) == [3, 2, 0, 0]
    torch.use_deterministic_algorithms(True)  # new tensors hold NaN
    try:
        results = dequantize_body(storage, torch.bfloat16, torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)
    for actual in results:
        assert actual is not None
        for row, slots in enumerate(complete_slots(storage)):
            assert not actual[row, :, : slots * TILE].isnan().any()
            assert actual[row, :, slots * TILE :].isnan().all()
