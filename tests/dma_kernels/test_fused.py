"""The Triton backend in its interpreter, against the reference. The same cases run on a GPU in ``tests/gpu``."""

from __future__ import annotations

import pytest
import torch
from dma_kernels import Recipe, attention, fused, key_mean, quantize
from dma_kernels.fused_quantize import quantize_keys_values, quantize_queries
from dma_kernels.operands import select_lowering
from dma_kernels.quantize import e8m0_to_float, to_e4m3, value_scale
from dma_kernels.testing import assert_bits_equal, random_qkv
from dma_kernels.transforms import hadamard_rotate
from fused_cases import CASES, RECIPES, assert_matches_reference

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device")

SHORT = ("causal", "chunk", "bidirectional", "left-padded", "window")


@pytest.mark.parametrize("case", CASES)
def test_8bit_lowering_matches_the_reference(case: str) -> None:
    assert_matches_reference(CASES[case], RECIPES["int8"], torch.float16, "cpu")


@pytest.mark.parametrize("case", SHORT)
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "int8"])
def test_other_recipes_match_the_reference(recipe: str, case: str) -> None:
    assert_matches_reference(CASES[case], RECIPES[recipe], torch.float16, "cpu")


@pytest.mark.parametrize("arch", [80, 89])
@pytest.mark.parametrize("case", ["causal", "bidirectional"])
def test_chips_without_tensor_copies_match_the_reference(case: str, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "INTERPRETED_ARCH", arch)
    assert_matches_reference(CASES[case], RECIPES["int8"], torch.float16, "cpu")


@pytest.mark.parametrize(
    ("recipe", "arch", "lowering"),
    [
        ("int8", 80, "portable"),
        ("int8", 89, "8bit"),
        ("int8", 90, "8bit"),
        ("int8", 100, "8bit"),
        ("e4m3-rotated", 90, "8bit"),
        ("nvfp4", 90, "portable"),
        ("paper", 90, "portable"),
        ("identity", 90, "portable"),
    ],
)
def test_lowering_of_a_recipe(recipe: str, arch: int, lowering: str) -> None:
    assert select_lowering(RECIPES[recipe], arch) == lowering


@pytest.mark.parametrize("low", ["mxint8", "mxfp8"])
@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_fused_key_and_value_operands_equal_the_specification(low: str, rotate: bool, head_dim: int) -> None:
    recipe = Recipe(low=low, shared_scale="tile", smooth_k=True, rotate=rotate, pv="fp8")
    _, key, value = random_qkv(batch=2, kv_heads=2, q_len=1, kv_len=300, head_dim=head_dim, dtype=torch.float16)
    k_high, k_low, k_factor, v_low, v_factor = quantize_keys_values(
        key, value, recipe, kv_offset=0, rows=None, is_interpreted=True
    )
    x = key.float() - key_mean(key)
    x = hadamard_rotate(x) if rotate else x
    expected = quantize(x, low, shared_scale="tile")
    unit = 2.0**-6 if low == "mxint8" else 1.0
    assert k_high is not None
    assert v_low is not None
    assert_bits_equal(k_high[:, :, :300], x.half())
    assert_bits_equal(k_low[:, :, :300], expected.data)
    assert_bits_equal(k_factor, e8m0_to_float(expected.scale[:, :, ::128, 0]) * unit)
    scale = value_scale(value)
    assert_bits_equal(v_factor, scale[:, :, 0])
    # Entry 4 t + 2 j + c of a group of 16 holds the key 8 j + 2 t + c.
    order = [
        group + 8 * j + 2 * t + c for group in range(0, 288, 16) for t in range(4) for j in range(2) for c in (0, 1)
    ]
    transposed = to_e4m3(value.float() / scale).transpose(-1, -2)
    assert_bits_equal(v_low[..., :288], transposed[..., order])


@pytest.mark.parametrize("low", ["mxint8", "mxfp8"])
@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
def test_fused_query_operands_equal_the_specification(low: str, rotate: bool) -> None:
    recipe = Recipe(low=low, shared_scale="tile", rotate=rotate)
    query, _, _ = random_qkv(batch=2, q_heads=2, q_len=70, kv_len=1, head_dim=96, dtype=torch.float16)
    q_high, q_low, q_factor = quantize_queries(query, recipe, is_interpreted=True)
    x = hadamard_rotate(query) if rotate else query.float()
    expected = quantize(x, low, shared_scale="row")
    assert (q_high is None) == (not rotate)
    if q_high is not None:
        assert_bits_equal(q_high, x.half())
    assert_bits_equal(q_low, expected.data)
    assert_bits_equal(q_factor, e8m0_to_float(expected.scale[..., 0]) * (2.0**-6 if low == "mxint8" else 1.0))


def test_zero_keys_and_queries_do_not_break_masked_scores() -> None:
    zeros = torch.zeros(1, 1, 300, 64, dtype=torch.float16)
    value = torch.ones_like(zeros)
    out = attention(zeros, zeros, value, RECIPES["int8-pv16"], backend="triton")
    torch.testing.assert_close(out, value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_key_shows_in_the_rows_that_see_it(bad: float) -> None:
    query, key, value = random_qkv(q_len=300, kv_len=300, dtype=torch.float16)
    key[0, 0, 140, 3] = bad
    out = attention(query, key, value, RECIPES["int8-pv16"], backend="triton")
    assert out[0, :, 140:].isnan().any()
    assert not out[0, :, :128].isnan().any()


def test_triton_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = random_qkv(q_len=8, kv_len=8)
    with pytest.raises(RuntimeError, match=r"backend='triton' cannot run: it takes bf16 and fp16, got torch.float32"):
        attention(query, key, value, RECIPES["int8"], backend="triton")
    monkeypatch.setattr(fused, "is_interpreted", lambda: False)
    with pytest.raises(RuntimeError, match=r"backend='triton' cannot run: it needs a CUDA device, got cpu"):
        attention(query.half(), key.half(), value.half(), RECIPES["int8"], backend="triton")
