"""Appending in Triton stores the same bits as appending in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import FORMATS, STORED_FORMATS, Case, assert_storages_equal
from dma_kernels.cache.append import append_tokens
from dma_kernels.cache.decode import decode_step
from dma_kernels.cache.reference import CacheOptions
from dma_kernels.runtime import launch
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device")

formats = pytest.mark.parametrize("format", FORMATS)
STEPS = (100, 20, 30, 300, 1, 500, 3)  # in a tile, across a boundary, several tiles, more than the residual KV holds
CALLS = [
    *((Case(kv_len=sum(STEPS), kv_heads=1, head_dim=80, value_dim=96), format, STEPS) for format in STORED_FORMATS),
    *(
        (Case(kv_len=270, kv_heads=1, head_dim=dim, value_dim=value_dim), format, (100, 170))
        for dim, value_dim in ((64, 128), (33, 65), (8, 20), (128, 256))
        for format in FORMATS
    ),
    *((Case(kv_len=430, padding=(0, 37, 250)), format, (130, 150, 1, 149)) for format in FORMATS),
    *((Case(kv_len=1500, kv_heads=1, window=200), format, (600, 700, 200)) for format in FORMATS),
]
"""A cache, its format, and the tokens of each step."""


@pytest.mark.parametrize(("case", "format", "steps"), CALLS)
def test_stored_bits_equal_torch(
    case: Case, format: str, steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asserting(monkeypatch)  # in a ring of pages, which holds the last tiles, no tile lacks a page
    dtype = torch.bfloat16 if case.kv_len == 270 else torch.float16
    _, key, value = case.inputs(dtype, "cpu")
    ours, expected = (case.storage(format, dtype, "cpu", is_filled=False) for _ in range(2))
    start = 0
    for step in steps:
        new = slice(start, start + step)
        append_tokens(ours, key[:, :, new], value[:, :, new])
        expected.append(key[:, :, new], value[:, :, new])
        assert_storages_equal(ours, expected)
        start += step


def test_appending_zero_tokens_changes_nothing() -> None:
    case = Case(kv_len=130)
    storage = case.storage("int8", torch.float16, "cpu")
    append_tokens(storage, storage.key_residual[:, :, :0], storage.value_residual[:, :, :0])
    assert_storages_equal(storage, case.storage("int8", torch.float16, "cpu"))


@formats
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_non_finite_values_constants_and_signed_zeros_equal_torch(format: str) -> None:
    case = Case(kv_len=384, kv_heads=1)
    _, key, value = case.inputs(torch.float16, "cpu")
    key[:, :, :128], value[:, :, :128] = 0.0, -0.0
    key[:, :, 100] = -0.0
    key[:, :, 200, 5], value[:, :, 150, 7], key[:, :, 130, 9] = torch.inf, torch.nan, -torch.inf
    key[:, :, 256:, 3], value[:, :, 300] = 0.1, 60000.0
    ours, expected = (case.storage(format, torch.float16, "cpu", is_filled=False) for _ in range(2))
    append_tokens(ours, key, value)
    expected.append(key, value)
    assert_storages_equal(ours, expected)
    keys, values = ours.dequantize(0, 384)
    assert (keys[:, :, :128] == 0.0).all()
    assert keys[:, :, 128:256].isnan().sum() == 2 * 128
    assert values[:, :, 128:256].isnan().sum() == 64
    assert torch.equal(keys[:, :, 256:, 3].half(), key[:, :, 256:, 3])


def asserting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter evaluate device assertions, as the launch options do on a device."""
    options = replace(interpreter.interpreter_builder.options, **launch.ASSERTS)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)


@pytest.mark.parametrize("page", [0, -1], ids=["too-few", "negative"])
@pytest.mark.parametrize("in_step", [False, True], ids=["append", "decode"])
@formats
def test_a_tile_without_a_page_fails_an_assertion_and_overwrites_no_other(
    format: str, in_step: bool, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tile 2, which the next token completes, is one too many, or its entry says that it has no page."""
    case = Case(kv_len=384)
    query, *kv = case.inputs(torch.float16, "cpu")
    storage = case.storage(format, torch.float16, "cpu", is_filled=False)
    storage.append(*(x[:, :, :-1] for x in kv))
    if page < 0:
        storage.page_table[:, 2] = page
    else:
        storage.page_table = storage.page_table[:, :2].contiguous()
    storage.appended = 0  # as in a CUDA graph, the host does not know the lengths
    key, value = (x[:, :, -1:] for x in kv)

    def store() -> None:
        if in_step:
            decode_step(query, key, value, storage, CacheOptions(0.125))
        else:
            append_tokens(storage, key, value)

    before, lengths = storage.kv_pages.clone(), storage.lengths.clone()
    store()  # without assertions, so that the rest of the kernel runs
    assert torch.equal(storage.kv_pages, before)
    storage.lengths = lengths
    asserting(monkeypatch)
    with pytest.raises(InterpreterError, match="the cache has no page for a complete tile; reserve more tiles"):
        store()
