"""The decode kernels against the reference in Triton's interpreter; ``tests/gpu`` runs the same cases on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from decode_cases import (
    CASES,
    DTYPES,
    FORMATS,
    ROTATED_KEYS,
    Case,
    assert_as_exact,
    assert_decode_matches,
    assert_small_value_channels_are_exact,
    assert_steps_match,
    assert_storages_equal,
    gathered,
    interpreted,
    scattered,
)
from dma_kernels.cache import decode
from dma_kernels.cache.api import cached_attention, restore
from dma_kernels.cache.decode import MAX_QUERIES, decode_attention
from dma_kernels.cache.reference import CacheOptions, cached_attention_reference
from dma_kernels.testing import assert_bits_equal

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device")
formats = pytest.mark.parametrize("format", FORMATS)
OF_INT8 = ("one-query", "ragged", "window", "at-a-boundary", "across-a-boundary", "many-columns", "head-dim-80-96")


@pytest.mark.parametrize(("format", "case"), [*product(["int4"], CASES), *product(["int8"], OF_INT8)])
def test_matches_the_reference(format: str, case: str) -> None:
    assert_decode_matches(interpreted(case), format, torch.float16, "cpu")


@pytest.mark.parametrize(
    ("format", "case"),
    [
        *product(["int4"], ("one-query", "one-key", "across-a-boundary", "no-band", "no-band-across-a-boundary")),
        *product(["int4"], ("ragged", "nothing-visible", "window", "after-the-sinks")),
        *(("int8", "ragged"), (ROTATED_KEYS, "across-a-boundary")),
    ],
)
def test_steps_match_the_reference(format: str, case: str) -> None:
    assert_steps_match(interpreted(case), format, torch.float16, "cpu")


@pytest.mark.parametrize("case", ["many-columns", "window", "head-dim-80-96", "head-dim-8"])
def test_rotated_keys_match_the_reference(case: str) -> None:
    assert_decode_matches(interpreted(case), ROTATED_KEYS, torch.float16, "cpu")


def test_rotated_keys_with_outliers_are_as_accurate_as_the_reference() -> None:
    """The scales of rotated keys overflow FP16, and BF16 would round the rotated queries."""
    case = Case(kv_len=700, head_dim=128)
    query, key, value = case.inputs(torch.float16, "cpu")
    key, query = key * 1024.0, query / 1024.0
    storage = case.storage(ROTATED_KEYS, torch.float16, "cpu", is_filled=False)
    storage.append(key, value)
    out, _ = decode_attention(query, storage, CacheOptions(0.125))
    stored = key[:, :, :0], value[:, :, :0]
    exact, _ = cached_attention_reference(query.float(), *stored, storage, CacheOptions(scale=0.125))
    assert_as_exact(out, exact)


@pytest.mark.parametrize("ratio", [1e3, 1e5])
@pytest.mark.parametrize("q_len", [1, 5])
def test_value_channels_next_to_larger_ones_are_exact(q_len: int, ratio: float) -> None:
    assert_small_value_channels_are_exact(ratio, q_len, torch.bfloat16, "cpu")


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("case", ["ragged", "no-band"])
def test_pages_and_unquantized_rows_may_be_in_any_order(case: str, backend: str) -> None:
    """A chunk and a step that completes a tile give the same bits as with pages in order."""
    format, kv_len = "int4", 384
    made = replace(CASES[case], kv_len=kv_len, padding=CASES[case].padding[:2])
    query, key, value = replace(made, q_len=41).inputs(torch.float16, "cpu")
    plain = made.storage(format, torch.float16, "cpu", is_filled=False)
    plain.append(key[:, :, : kv_len - 41], value[:, :, : kv_len - 41])
    apart = scattered(plain)
    for new in (slice(kv_len - 41, kv_len - 1), slice(kv_len - 1, kv_len)):
        arguments = query[:, :, new.start - kv_len + 41 : new.stop - kv_len + 41], key[:, :, new], value[:, :, new]
        out = cached_attention(*arguments, apart, backend=backend)
        assert_bits_equal(out, cached_attention(*arguments, plain, backend=backend))
        assert_storages_equal(gathered(apart), plain)
    for ours, expected in zip(
        restore(apart, apart.lengths - 300, 300), restore(plain, plain.lengths - 300, 300), strict=True
    ):
        assert_bits_equal(ours, expected)


@pytest.mark.parametrize(("format", "backend"), [("int8", "reference"), ("int4", "triton")])
def test_residual_kv_needs_no_spare_tile(format: str, backend: str) -> None:
    """Single tokens, and chunks across tile boundaries, attend before their keys are stored."""
    case = Case(kv_len=410, q_len=410, head_dim=16, q_heads=2, kv_heads=1, padding=(0,))
    query, key, value = case.inputs(torch.float16, "cpu")
    whole = case.storage(format, torch.float16, "cpu", is_filled=False)
    residual = {name: getattr(whole, name)[:, :, 128:].clone() for name in ("key_residual", "value_residual")}
    short = replace(whole.mapped(torch.clone), **residual, slack_tiles=1)
    assert short.diagonal_tiles == 1
    start = 250
    for storage in (short, whole):
        storage.append(key[:, :, :start], value[:, :, :start])
    for end in (251, 262, 390, 391, 410):
        new = [x[:, :, start:end] for x in (query, key, value)]
        out, expected = (cached_attention(*new, each, backend=backend) for each in (short, whole))
        torch.testing.assert_close(out, expected, atol=2e-3, rtol=0.0)
        start = end
    assert_bits_equal(short.kv_pages, whole.kv_pages)


def test_memory_after_the_last_key_is_not_read() -> None:
    case = Case(kv_len=500)
    storage = case.storage("int8", torch.float16, "cpu")
    query, _, _ = case.inputs(torch.float16, "cpu")
    expected, _ = decode_attention(query, storage, CacheOptions(0.125))
    unused = torch.arange(500, 512) % storage.residual_len
    storage.key_residual[:, :, unused] = torch.nan
    storage.value_residual[:, :, unused] = torch.nan
    storage.kv_pages[3] = 255  # an incomplete tile: all its scales are NaN
    out, _ = decode_attention(query, storage, CacheOptions(0.125))
    assert_bits_equal(out, expected)


@formats
def test_a_nan_key_reaches_the_output(format: str) -> None:
    case = Case(kv_len=600)
    query, key, value = case.inputs(torch.float16, "cpu")
    key[0, 1, 200, 3] = torch.nan
    storage = case.storage(format, torch.float16, "cpu", is_filled=False)
    storage.append(key, value)
    out, _ = decode_attention(query, storage, CacheOptions(0.125))
    assert out[:, 2:].isnan().all()
    assert not out[:, :2].isnan().any()


@pytest.mark.parametrize(("case", "sms"), [("window", 1), ("ragged", 7), ("nothing-visible", 60)])
def test_any_number_of_ctas_splits_the_work(case: str, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and more CTAs than work items: a CTA has several heads, or a head several CTAs."""
    monkeypatch.setattr(decode.chip, "of", lambda device: replace(decode.chip.INTERPRETER, sms=sms))
    decode.launch_decode.plan.cache_clear()  # plans are not keyed by chip
    assert_decode_matches(interpreted(case), "int4", torch.float16, "cpu")
    assert_steps_match(interpreted(case), "int4", torch.float16, "cpu")
    decode.launch_decode.plan.cache_clear()


def test_batches_larger_than_a_block_of_rows_match_the_reference() -> None:
    case = Case(kv_len=300, head_dim=16, q_heads=1, kv_heads=1, padding=(0, *range(100, 135), 300, 5))
    assert_decode_matches(case, "int8", torch.float16, "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@formats
def test_rescaling_channels_of_queries_and_keys_changes_nothing(format: str, dtype: str) -> None:
    """Multiplying key channels by powers of two, and dividing query channels by them, is exact."""
    case = Case(kv_len=600, q_len=2)
    limit = 40 if dtype == "bf16" else 13  # what the dtype holds exactly
    query, key, value = case.inputs(DTYPES[dtype], "cpu")
    query, key = (((x * 64).round() / 64).clamp(-7, 7) for x in (query, key))
    exponent = torch.randint(-limit, limit + 1, (64,))
    results = []
    for sign in (0, 1):
        storage = case.storage(format, key.dtype, "cpu", is_filled=False)
        storage.append((key.float() * torch.exp2(sign * exponent)).to(key.dtype), value)
        scaled = (query.float() * torch.exp2(-sign * exponent)).to(query.dtype)
        results.append(decode_attention(scaled, storage, CacheOptions(0.125)))
    for plain, rescaled in zip(*results, strict=True):
        assert_bits_equal(plain, rescaled)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("q_len", [1, 40])
@formats
def test_fp16_keys_of_any_range_match_the_reference(format: str, q_len: int, backend: str) -> None:
    """Narrow ranges, and the lowest fp16 number, have scales and zero points outside the range of fp16."""
    case = Case(kv_len=600, q_len=q_len, kv_heads=1, q_heads=2)
    query, key, value = case.inputs(torch.float16, "cpu")
    key[..., :32] *= 2e-5
    query[..., :32] *= 1e4
    key[..., 200:300, 40] = torch.finfo(torch.float16).min
    query[..., 40] = 1e-4
    storage = case.storage(format, torch.float16, "cpu", is_filled=False)
    storage.append(key[:, :, :-q_len], value[:, :, :-q_len])
    new = query, key[:, :, -q_len:], value[:, :, -q_len:]
    exact, _ = cached_attention_reference(query.float(), *new[1:], storage, CacheOptions(scale=0.125))
    out = cached_attention(*new, storage, backend=backend)
    assert_as_exact(out, exact)
    assert all(x.isfinite().all() for x in restore(storage, storage.lengths - 500, 500))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("q_len", [1, 40])
def test_the_lowest_fp16_values_stay_finite(q_len: int, backend: str) -> None:
    query, key, value = Case(kv_len=600, q_len=q_len).inputs(torch.float16, "cpu")
    value[..., 0] = torch.finfo(torch.float16).min
    storage = Case(kv_len=600).storage("int8", torch.float16, "cpu", is_filled=False)
    storage.append(key[:, :, :-q_len], value[:, :, :-q_len])
    out = cached_attention(query, key[:, :, -q_len:], value[:, :, -q_len:], storage, backend=backend)
    assert all(x.isfinite().all() for x in (out, *restore(storage, storage.lengths - 500, 500)))


@pytest.mark.parametrize("sinks", [torch.arange(8.0)[::2], torch.tensor(2.0).expand(4)], ids=["step", "expanded"])
def test_sinks_may_have_any_stride(sinks: torch.Tensor) -> None:
    case = Case(kv_len=40)
    query, _, _ = case.inputs(torch.float16, "cpu")
    storage = case.storage("int8", torch.float16, "cpu")
    expected, _ = decode_attention(query, storage, CacheOptions(0.125, sinks=sinks.clone().contiguous()))
    assert_bits_equal(decode_attention(query, storage, CacheOptions(0.125, sinks=sinks))[0], expected)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("q_len", [1, 5, 40])
def test_a_broken_sink_logit_shows_in_the_output_of_its_head(q_len: int, backend: str) -> None:
    case = Case(kv_len=600, q_len=q_len)
    query, _, _ = case.inputs(torch.float16, "cpu")
    storage, sinks = case.storage("int8", torch.float16, "cpu"), torch.tensor([torch.nan, 0.0, torch.inf, -torch.inf])
    out = cached_attention(query, None, None, storage, sinks=sinks, backend=backend)
    assert out[:, ::2].isnan().all()
    assert out[:, 1::2].isfinite().all()


def test_too_many_queries_are_rejected() -> None:
    storage = Case(kv_len=40).storage("int8", torch.float16, "cpu")
    query = torch.zeros(1, 4, MAX_QUERIES + 1, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"query must have at most 16 positions, got 17; use the prefill kernel"):
        decode_attention(query, storage, CacheOptions(0.125))
