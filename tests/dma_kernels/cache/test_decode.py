"""The decode kernels against the reference, in Triton's interpreter; ``tests/gpu`` runs the same cases on a device."""

from __future__ import annotations

import pytest
import torch
from decode_cases import CASES, RECIPES, Case, assert_decode_matches, assert_steps_equal_their_parts
from dma_kernels import Recipe
from dma_kernels.cache.decode import MAX_QUERIES, decode_attention
from dma_kernels.cache.forms import select_forms
from dma_kernels.cache.reference import cached_attention_reference
from dma_kernels.runtime import chip
from dma_kernels.runtime.tuning import select_decode_tiles
from dma_kernels.testing import assert_bits_equal

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device")

SHORT = ("one-query", "across-a-border", "head-dim-80-96")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", ["kv8", "kv4"])
def test_matches_the_reference(recipe: str, case: str) -> None:
    assert_decode_matches(CASES[case], RECIPES[recipe], torch.float16, "cpu")


@pytest.mark.parametrize("case", SHORT)
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ("kv8", "kv4")])
def test_other_recipes_match_the_reference(recipe: str, case: str) -> None:
    assert_decode_matches(CASES[case], RECIPES[recipe], torch.float16, "cpu")


@pytest.mark.parametrize("case", ["one-query", "across-a-border", "ragged", "nothing-visible", "window", "one-key"])
@pytest.mark.parametrize("recipe", ["kv8", "kv4", "no-band"])
def test_steps_equal_their_parts(recipe: str, case: str) -> None:
    assert_steps_equal_their_parts(CASES[case], RECIPES[recipe], torch.float16, "cpu")


@pytest.mark.parametrize("case", ["sinks-of-many", "softcap-and-sinks-of-many"])
def test_smoothed_keys_of_quantised_high_tiles_match_the_reference(case: str) -> None:
    assert_decode_matches(CASES[case], RECIPES["nvfp4-mxfp8"], torch.float16, "cpu")


def test_chips_without_fp8_units_match_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chip, "INTERPRETED_ARCH", 80)
    assert_decode_matches(CASES["one-query"], RECIPES["kv8"], torch.float16, "cpu")
    assert_decode_matches(CASES["one-query"], RECIPES["e4m3"], torch.float16, "cpu")


@pytest.mark.parametrize("recipe", ["no-band", "kv4"])
def test_rows_do_not_depend_on_their_neighbours(recipe: str) -> None:
    case = Case(kv_len=500, padding=(0, 130))
    query, key, value = case.inputs(torch.float16, "cpu")
    together, _ = decode_attention(query, case.storage(RECIPES[recipe], torch.float16, "cpu"), scale=0.125)
    alone = Case(kv_len=370).storage(RECIPES[recipe], torch.float16, "cpu", is_filled=False)
    alone.append(key[1:, :, 130:], value[1:, :, 130:])
    out, _ = decode_attention(query[1:], alone, scale=0.125)
    torch.testing.assert_close(out, together[1:], atol=2e-3, rtol=0.0)


def test_what_lies_behind_the_last_key_does_not_matter() -> None:
    case = Case(kv_len=500)
    storage = case.storage(RECIPES["kv8"], torch.float16, "cpu")
    query, _, _ = case.inputs(torch.float16, "cpu")
    expected, _ = decode_attention(query, storage, scale=0.125)
    behind = torch.arange(500, 512) % storage.ring
    storage.key_tail[:, :, behind] = torch.nan
    storage.value_tail[:, :, behind] = torch.nan
    storage.key_body["factor"][:, :, 3] = torch.nan  # a tile that is not complete
    out, _ = decode_attention(query, storage, scale=0.125)
    assert_bits_equal(out, expected)


@pytest.mark.parametrize("recipe", ["kv8", "kv4"])
def test_a_broken_key_shows(recipe: str) -> None:
    case = Case(kv_len=600)
    query, key, value = case.inputs(torch.float16, "cpu")
    key[0, 1, 200, 3] = torch.nan
    storage = case.storage(RECIPES[recipe], torch.float16, "cpu", is_filled=False)
    storage.append(key, value)
    out, _ = decode_attention(query, storage, scale=0.125)
    assert out[:, 2:].isnan().all()
    assert not out[:, :2].isnan().any()


def test_too_many_queries_are_refused() -> None:
    storage = Case(kv_len=40).storage(RECIPES["kv8"], torch.float16, "cpu")
    query = torch.zeros(1, 4, MAX_QUERIES + 1, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"query must have at most 16 positions, got 17; use the prefill kernel"):
        decode_attention(query, storage, scale=0.125)


@pytest.mark.parametrize(
    ("recipe", "arch", "forms"),
    [
        ("kv8", 90, ("int8", "codes", "e4m3", "fp8")),
        ("kv8", 80, ("int8", "codes", "e4m3", "fp8_emulated")),
        ("kv8-q16", 90, ("int8", "split", "e4m3", "fp8")),
        ("kv4", 90, ("fp4", "halves", "fp4", "16bit")),
        ("e4m3", 90, ("e4m3", "codes", "e4m3", "fp8")),
        ("e4m3", 80, ("e4m3", "16bit", "e4m3", "fp8_emulated")),
        ("blocks", 90, ("block_e4m3", "16bit", "block_int8", "16bit")),
        ("identity", 90, ("16bit", "16bit", "16bit", "16bit")),
    ],
)
def test_forms_of_a_recipe(recipe: str, arch: int, forms: tuple[str, ...]) -> None:
    chosen = select_forms(RECIPES[recipe], arch)
    assert (chosen.key, chosen.query, chosen.value, chosen.pv) == forms


def test_programs_fill_the_chip_at_once_or_several_times() -> None:
    def programs(heads: int, tiles: int = 1000) -> int:
        sizes = select_decode_tiles(
            90, 128, "int8", "e4m3", columns=8, programs=heads, tiles=tiles, high_tiles=4, processors=132
        )
        return heads * sizes.splits

    assert programs(8) == 264
    assert programs(64) == 256
    assert programs(300) >= 4 * 264
    assert programs(8, tiles=1) == 40


def test_queries_of_another_format_than_int8_keys_keep_their_precision() -> None:
    """Keys of few bits make the products exact, so what is left is how well the queries are held."""
    recipe = Recipe(low_q="bf16", low_k="mxint8", shared_scale="tile", diagonal_tiles=0, sink_tiles=0)
    case = Case(kv_len=400, q_heads=1, kv_heads=1)
    query, key, value = case.inputs(torch.float16, "cpu")
    key = key.sign()
    results = []
    for dtype in (torch.float16, torch.float64):
        storage = case.storage(recipe, dtype, "cpu", is_filled=False)
        storage.append(key.to(dtype), value.to(dtype))
        results.append(storage)
    _, lse = decode_attention(query, results[0], scale=0.125)
    nothing = key[:, :, :0].double()
    _, exact = cached_attention_reference(
        query.double(), nothing, nothing, results[1], is_causal=True, window=None, scale=0.125
    )
    torch.testing.assert_close(lse.double(), exact, atol=2e-4, rtol=0.0)
