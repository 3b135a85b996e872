"""Appending in Triton leaves every bit of the storage as appending in torch does."""

from __future__ import annotations

import pytest
import torch
from decode_cases import RECIPES, Case
from dma_kernels.cache.append import append_tokens
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.runtime import chip
from dma_kernels.testing import assert_bits_equal

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device")

STEPS = (100, 20, 30, 300, 1, 500, 3)  # within a tile, over a border, several tiles, more than the tail holds


def assert_storages_equal(actual: LayerStorage, expected: LayerStorage) -> None:
    """Assert that all tensors of two caches have the same bits."""
    for name, tensor in expected.tensors().items():
        try:
            assert_bits_equal(actual.tensors()[name], tensor)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def _append_both(case: Case, recipe: str, steps: tuple[int, ...]) -> None:
    _, key, value = case.inputs(torch.float16, "cpu")
    ours, expected = (case.storage(RECIPES[recipe], torch.float16, "cpu", is_filled=False) for _ in range(2))
    start = 0
    for step in steps:
        new = slice(start, start + step)
        append_tokens(ours, key[:, :, new], value[:, :, new])
        expected.append(key[:, :, new], value[:, :, new])
        assert_storages_equal(ours, expected)
        start += step


@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_equal_those_of_torch(recipe: str) -> None:
    _append_both(Case(kv_len=sum(STEPS), kv_heads=1, head_dim=80, value_dim=96), recipe, STEPS)


@pytest.mark.parametrize("recipe", ["kv8", "e4m3", "blocks"])
def test_chips_without_the_cast_to_e4m3_write_the_same_bytes(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chip, "device_arch", lambda device: 80)
    _append_both(Case(kv_len=sum(STEPS), kv_heads=1, head_dim=80, value_dim=96), recipe, STEPS)


@pytest.mark.parametrize("recipe", ["kv8", "kv4"])
def test_padded_rows_of_different_lengths(recipe: str) -> None:
    _append_both(Case(kv_len=430, padding=(0, 37, 250)), recipe, (130, 150, 1, 149))


@pytest.mark.parametrize("recipe", ["kv8", "kv4"])
def test_a_window_keeps_its_last_tiles(recipe: str) -> None:
    _append_both(Case(kv_len=1500, kv_heads=1, window=200), recipe, (600, 700, 200))


def test_nothing_new_changes_nothing() -> None:
    case = Case(kv_len=130)
    storage = case.storage(RECIPES["kv8"], torch.float16, "cpu")
    append_tokens(storage, storage.key_tail[:, :, :0], storage.value_tail[:, :, :0])
    assert_storages_equal(storage, case.storage(RECIPES["kv8"], torch.float16, "cpu"))


@pytest.mark.parametrize("recipe", ["kv8", "kv4"])
def test_a_broken_key_and_a_tile_of_zeros(recipe: str) -> None:
    case = Case(kv_len=256, kv_heads=1)
    _, key, value = case.inputs(torch.float16, "cpu")
    key[:, :, :128], value[:, :, :128] = 0.0, 0.0
    key[:, :, 200, 5], value[:, :, 150, 7] = torch.inf, torch.nan
    ours, expected = (case.storage(RECIPES[recipe], torch.float16, "cpu", is_filled=False) for _ in range(2))
    append_tokens(ours, key, value)
    expected.append(key, value)
    for side in ("key", "value"):
        codec = getattr(ours, f"{side}_codec")
        decoded = codec.decode(getattr(ours, f"{side}_body"))
        torch.testing.assert_close(
            decoded, codec.decode(getattr(expected, f"{side}_body")), rtol=0.0, atol=0.0, equal_nan=True
        )
        assert (decoded[:, :, 0] == 0.0).all()
        assert decoded[:, :, 1].isnan().any()
