"""The reference without quantization against the plain formula; ``test_rule.py`` tests quantization."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dma_kernels import Recipe, attention, attention_with_lse
from dma_kernels.testing import RECIPES, assert_as_accurate, assert_bits_equal, random_qkv, relative_error
from plain_attention import plain_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

IDENTITY = RECIPES["identity"]


def ints(*values: Any) -> Tensor:
    return torch.tensor(values)


def random_mask(*shape: int) -> Tensor:
    """A mask of about two thirds of the keys; query 2 is fully masked."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(11)) < 0.65
    if shape[2] > 2:
        mask[:, :, 2] = False
    return mask


SMALL = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 37, "kv_len": 37, "head_dim": 16}
CHUNK = SMALL | {"q_len": 9, "kv_len": 41}
# Name: shapes, options.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": (SMALL, {}),
    "bidirectional": (SMALL, {"is_causal": False}),
    "mqa": (SMALL | {"q_heads": 5, "kv_heads": 1}, {}),
    "own-scale": (SMALL, {"scale": 0.7}),
    "chunk-at-the-end": (CHUNK, {}),
    "chunk-in-the-middle": (CHUNK, {"q_offset": 20}),
    "chunk-before-the-keys": (CHUNK, {"q_offset": torch.tensor(-4)}),
    "chunk-past-the-keys": (CHUNK, {"q_offset": 100}),
    "offset-tensor-0d": (CHUNK, {"q_offset": torch.tensor(17)}),
    "offset-per-row": (CHUNK, {"q_offset": ints(3, 32)}),
    "kv-offset": (CHUNK, {"q_offset": 25, "kv_offset": 10}),
    "kv-offset-default-q": (CHUNK, {"kv_offset": ints(-7, 0)}),
    "cross": (CHUNK | {"q_len": 50}, {"is_causal": False}),
    "decode": (SMALL | {"q_len": 1}, {}),
    "decode-from-static-cache": (SMALL | {"q_len": 1}, {"q_offset": 20, "kv_range": ints([0, 21], [0, 21])}),
    "left-padding": (SMALL, {"kv_range": ints([11, 37], [0, 37]), "kv_offset": ints(-11, 0)}),
    "left-padding-chunk": (CHUNK, {"kv_range": ints([33, 41], [2, 41]), "kv_offset": ints(-33, -2)}),
    "left-padding-bidirectional": (
        SMALL,
        {"is_causal": False, "kv_range": ints([5, 37], [0, 37]), "kv_offset": ints(-5, 0), "q_offset": ints(-5, 0)},
    ),
    "right-padding": (SMALL, {"kv_range": ints([0, 20], [0, 37])}),
    "both-paddings": (SMALL, {"kv_range": ints([3, 30], [9, 20]), "kv_offset": ints(-3, -9)}),
    "empty-range": (SMALL, {"kv_range": ints([0, 0], [30, 12])}),
    "range-past-the-ends": (SMALL, {"kv_range": ints([-5, 30], [7, 1000])}),
    "window-1": (SMALL, {"window": 1}),
    "window-chunk": (CHUNK, {"window": 5}),
    "window-beyond-the-keys": (CHUNK, {"window": 5, "q_offset": 100}),
    "window-bidirectional": (SMALL, {"window": 6, "is_causal": False}),
    "window-cross": (CHUNK, {"window": 6, "is_causal": False, "q_offset": 12}),
    "window-offset-per-row-bidirectional": (CHUNK, {"window": 5, "q_offset": ints(30, 3), "is_causal": False}),
    "mask-full": (SMALL, {"mask": random_mask(2, 4, 37, 37)}),
    "mask-no-heads": (SMALL, {"mask": random_mask(2, 1, 37, 37)}),
    "mask-no-queries": (SMALL, {"mask": random_mask(2, 4, 1, 37)}),
    "mask-keys-only": (SMALL, {"mask": random_mask(1, 1, 1, 37)}),
    "mask-transposed": (SMALL, {"mask": random_mask(2, 4, 37, 37).mT}),
    "mask-one-query-head": (SMALL | {"q_heads": 1, "kv_heads": 1}, {"mask": random_mask(2, 1, 37, 37)}),
    "mask-and-range": (SMALL, {"mask": random_mask(2, 4, 37, 37), "kv_range": ints([4, 33], [2, 20])}),
    "mask-and-window": (CHUNK, {"mask": random_mask(2, 4, 9, 41), "window": 12}),
    "softcap": (SMALL, {"softcap": 1.5}),
    "sinks": (SMALL, {"sinks": torch.tensor([-3.0, 0.0, 2.0, 30.0])}),
    "sinks-chunk": (CHUNK, {"sinks": torch.tensor([-math.inf, 0.5, 200.0, -200.0])}),
    "sinks-and-no-key": (SMALL, {"sinks": torch.tensor([1.0, 2.0, 3.0, 4.0]), "kv_range": ints([0, 0], [30, 37])}),
    "value-dim-larger": (CHUNK | {"value_dim": 40}, {}),
    "no-queries": (SMALL | {"q_len": 0}, {}),
    "no-keys": (SMALL | {"kv_len": 0}, {}),
    "no-keys-sinks": (SMALL | {"kv_len": 0}, {"sinks": torch.tensor([1.0, 2.0, 3.0, 4.0])}),
    "one-of-each": (SMALL | {"batch": 1, "q_heads": 1, "kv_heads": 1, "q_len": 1, "kv_len": 1}, {}),
    "more-queries-than-keys": (SMALL | {"q_len": 41, "kv_len": 9}, {}),
}
cases = pytest.mark.parametrize("case", CASES)
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def run(case: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return query, key, value, output and log-sum-exp of a case."""
    shapes, options = CASES[case]
    qkv = random_qkv(**shapes, dtype=dtype)
    return *qkv, *attention_with_lse(*qkv, IDENTITY, backend="reference", **options)


class TestIdentity:
    """With ``low = high = bf16`` and ``pv = bf16`` the backend is plain attention."""

    @cases
    @pytest.mark.parametrize("score_bytes", [64 << 20, 1], ids=["one-block", "blocks-of-16"])
    def test_output_and_log_sum_exp_equal_the_fp64_formula(
        self, case: str, score_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("dma_kernels.reference.attention.SCORE_BYTES", score_bytes)
        *qkv, out, lse = run(case, torch.float64)
        expected, expected_lse = plain_attention(*qkv, CASES[case][1])
        assert out.dtype == lse.dtype == torch.float64
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)

    @cases
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    def test_16_bit_is_as_accurate_as_eager(self, case: str, dtype: torch.dtype) -> None:
        *qkv, out, lse = run(case, dtype)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        options = CASES[case][1]
        exact, exact_lse = plain_attention(*(x.double() for x in qkv), options)
        eager, _ = plain_attention(*qkv, options)
        assert out.shape == exact.shape
        if out.numel() == 0:
            return
        assert_as_accurate(out, eager, exact, factor=1.5)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("head_dim", [1, 24, 33, 80, 128, 256], ids=lambda d: f"D{d}")
    def test_every_head_dim_equals_the_formula(self, head_dim: int) -> None:
        value_dim = min(264 - head_dim, 256)
        qkv = random_qkv(q_heads=2, kv_heads=1, q_len=19, kv_len=19, head_dim=head_dim, value_dim=value_dim)
        out = attention(*qkv, IDENTITY)
        expected = scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
        assert relative_error(out, expected) < 1e-5

    @pytest.mark.parametrize("transform", ["smooth_k", "rotate"])
    def test_rotation_and_smoothing_cancel(self, transform: str) -> None:
        recipe = Recipe(low="bf16", **{transform: True})
        query, key, value = random_qkv(q_len=40, kv_len=40, dtype=torch.float64)
        key = key + 1.0
        # Sinks and softcaps are not invariant to a shift of all scores.
        sinks = torch.tensor([0.5, -1.0], dtype=torch.float64)
        for options in ({}, {"sinks": sinks}, {"softcap": 2.0}, {"softcap": 2.0, "sinks": sinks}):
            transformed = attention_with_lse(query, key, value, recipe, **options)
            plain = attention_with_lse(query, key, value, IDENTITY, **options)
            torch.testing.assert_close(transformed, plain, rtol=1e-11, atol=1e-12)


@recipes
def test_rows_without_keys_are_zero_under_every_recipe(recipe: Recipe) -> None:
    qkv = random_qkv(batch=2, q_len=64, kv_len=70)
    out, lse = attention_with_lse(*qkv, recipe, kv_range=ints([4, 4], [0, 70]))
    assert_bits_equal(out[0], torch.zeros_like(out[0]))
    assert_bits_equal(lse[0], torch.full_like(lse[0], -math.inf))
    assert out[1].isfinite().all()
    for q_len, kv_len in ((0, 7), (3, 0), (0, 0)):
        out, lse = attention_with_lse(*random_qkv(q_len=q_len, kv_len=kv_len, value_dim=24), recipe)
        assert_bits_equal(out, torch.zeros(1, 2, q_len, 24))
        assert_bits_equal(lse, torch.full((1, 2, q_len), -math.inf))


def test_the_lse_of_a_row_without_keys_is_its_sink_logit_however_low() -> None:
    sinks = torch.tensor([3.0, -200.0, -1e9, -math.inf])
    qkv = random_qkv(batch=2, q_heads=4, q_len=3, kv_len=5)
    out, lse = attention_with_lse(*qkv, IDENTITY, kv_range=ints([2, 2], [0, 5]), sinks=sinks)
    assert_bits_equal(out[0], torch.zeros_like(out[0]))
    assert_bits_equal(lse[0], sinks[:, None].expand(4, 3))
    assert lse[1].isfinite().all()


class TestHiddenContent:
    @recipes
    @pytest.mark.parametrize("filler", [math.nan, math.inf, 1e30], ids=str)
    def test_keys_outside_the_range_do_not_matter(self, recipe: Recipe, filler: float) -> None:
        # Neither for scales nor for means that tokens share.
        query, key, value = random_qkv(batch=2, kv_heads=2, q_len=64, kv_len=95)
        options = {"kv_range": ints([12, 95], [0, 86]), "kv_offset": ints(-12, 0), "q_offset": ints(19, 22)}
        expected = attention(query, key, value, recipe, **options)
        for tensor in (key, value):
            tensor[0, :, :12] = filler
            tensor[1, :, 86:] = filler
        assert expected.isfinite().all()
        assert_bits_equal(attention(query, key, value, recipe, **options), expected)

    @recipes
    @pytest.mark.parametrize("broken", ["query", "key", "value"])
    def test_a_visible_nan_reaches_the_output(self, recipe: Recipe, broken: str) -> None:
        query, key, value = random_qkv(q_heads=1, q_len=6, kv_len=6)
        {"query": query, "key": key, "value": value}[broken][0, 0, 3, 2] = math.nan
        out = attention(query, key, value, recipe)
        seen = out[0, 0, 3:4] if broken == "query" else out[0, 0, 3:]
        assert (seen[:, 2] if broken == "value" else seen).isnan().all()


class TestLayout:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
    def test_output_is_token_major(self, dtype: torch.dtype) -> None:
        out, lse = attention_with_lse(*random_qkv(**SMALL, value_dim=24, dtype=dtype), IDENTITY)
        assert out.shape == (2, 4, 37, 24)
        assert out.transpose(1, 2).is_contiguous()
        assert lse.shape == (2, 4, 37)
        assert lse.is_contiguous()

    @recipes
    def test_input_strides_do_not_matter(self, recipe: Recipe) -> None:
        qkv = random_qkv(**SMALL)
        token_major = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
        every_other = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in qkv]
        expected = attention(*qkv, recipe)
        for strided in (token_major, every_other):
            assert not any(x.is_contiguous() for x in strided)
            torch.testing.assert_close(attention(*strided, recipe), expected, rtol=1e-5, atol=1e-6)

    def test_inputs_are_unchanged(self) -> None:
        given = dict(zip(("query", "key", "value"), random_qkv(**SMALL), strict=True))
        given |= {"kv_range": ints([5, 37], [0, 30]), "mask": random_mask(2, 1, 37, 37), "sinks": torch.ones(4)}
        copies = {name: x.clone() for name, x in given.items()}
        attention(**given, recipe=RECIPES["nvfp4-mxfp8"], softcap=3.0)
        for name, copy in copies.items():
            assert_bits_equal(given[name], copy)
