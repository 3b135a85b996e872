"""The Triton backend in the interpreter, against the reference. ``tests/gpu`` runs the same cases on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from dma_kernels import attention, attention_with_lse
from dma_kernels.prefill.config import select_compute_path
from dma_kernels.runtime import chip
from dma_kernels.testing import assert_bits_equal, random_qkv, relative_error
from prefill_cases import (
    CASES,
    EXACT_STARTS,
    MASKED,
    RECIPES,
    SPARSE,
    Case,
    assert_an_exact_start_has_no_low_tile,
    assert_an_infinite_value_shows_where_the_exact_start_ends,
    assert_an_infinite_value_spreads_by_tile,
    assert_counting_changes_no_bit,
    assert_largest_fp16_values_stay_finite,
    assert_matches_reference,
    assert_skips_as_the_reference,
    with_one_head,
)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device"),
    pytest.mark.usefixtures("poisoned"),  # memory that the quantizer does not write must not be read
]

# One chip per recipe and compute path: Hopper, which loads by TMA, if it has the path.
LOWERED = {
    (name, select_compute_path(recipe, arch)): (name, arch)
    for arch in (89, 100, 80, 90)
    for name, recipe in RECIPES.items()
}
PATHS = [*LOWERED.values(), ("int8", 89), ("paper", 89)]


FEATURES = ("bidirectional", "window", "softcap", "sinks", "softcap-and-sinks", "mask", "offset", "head-dim-80-96")


CALLS = {name: case if name == "causal" else with_one_head(case) for name, case in CASES.items()}
CALLS |= {f"masked-{name}": replace(MASKED[name], head_dim=64) for name in ("bidirectional", "packed-left-padded")}


@pytest.mark.parametrize("call", CALLS)
def test_default_recipe_matches_the_reference(call: str) -> None:
    assert_matches_reference(CALLS[call], RECIPES["balanced"], torch.float16, "cpu")


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_largest_fp16_values_stay_finite(backend: str) -> None:
    assert_largest_fp16_values_stay_finite(backend, "cpu")


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_an_infinite_value_spreads_by_tile(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        chip, "INTERPRETER", replace(chip.INTERPRETER, arch=80)
    )  # the interpreter reads the NaN of E4M3 as a number
    assert_an_infinite_value_spreads_by_tile(backend, "cpu")
    assert_an_infinite_value_shows_where_the_exact_start_ends(backend, "cpu")


@pytest.mark.parametrize(
    ("recipe", "arch", "case"),
    [
        *((*path, "causal") for path in PATHS),
        *((*path, "left-padded") for path in PATHS if path[0] in ("fp4", "int8-pv16")),
    ],
)
def test_every_compute_path_matches_the_reference(recipe: str, case: str, on_chip: None) -> None:
    assert_matches_reference(with_one_head(CASES[case]), RECIPES[recipe], torch.float16, "cpu")


@pytest.mark.parametrize(
    ("recipe", "arch"),
    [*product(["paper"], (80, 89, 90, 100, 120)), ("int8", 80), ("int8", 90), ("fp4", 100), ("nvfp4-keys", 100)],
)
def test_head_dim_256_matches_the_reference_on_every_chip(recipe: str, arch: int, on_chip: None) -> None:
    if (recipe, arch) == ("paper", 120) and chip.triton_version() < (3, 9):
        pytest.skip("the interpreter fails in tl.dot_scaled before Triton 3.9")
    case = Case(q_len=150, kv_len=420, q_heads=1, head_dim=256, options={"q_offset": 270})
    assert_matches_reference(case, RECIPES[recipe], torch.float16, "cpu")


@pytest.mark.parametrize(
    ("recipe", "arch", "case"),
    [
        *(("nvfp4", 100, case) for case in FEATURES),
        *product(("paper", "nvfp4-keys"), [90], ("window", "softcap-and-sinks", "mask")),
    ],
)
def test_features_with_4_bit_operands_match_the_reference(recipe: str, case: str, on_chip: None) -> None:
    assert_matches_reference(with_one_head(CASES[case]), RECIPES[recipe], torch.float16, "cpu")


@pytest.mark.parametrize("recipe", ["identity", "int8", "int8-pv16"])
def test_masked_keys_and_values_may_hold_any_value(recipe: str) -> None:
    query, key, value = random_qkv(batch=2, q_len=300, kv_len=300, dtype=torch.float16)
    kv_range = torch.tensor([[45, 300], [0, 290]])
    options = {"q_offset": torch.tensor([-45, 0]), "kv_offset": torch.tensor([-45, 0]), "kv_range": kv_range}
    expected = attention(query, key, value, RECIPES[recipe], backend="triton", **options)
    for tensor in (key, value):
        tensor[0, :, :45] = float("nan")
        tensor[1, :, 290:] = float("inf")
    assert torch.equal(attention(query, key, value, RECIPES[recipe], backend="triton", **options), expected)


@pytest.mark.parametrize("ends", [(-(2**63), 2**63 - 1), (0, 2**32), (-(2**32) + 5, 9)])
def test_ranges_past_32_bits_are_clamped(ends: tuple[int, int]) -> None:
    qkv = random_qkv(q_len=9, kv_len=9, dtype=torch.float16)
    out, cut = (
        attention(*qkv, RECIPES["int8"], kv_range=torch.tensor([each]), backend="triton") for each in (ends, (0, 9))
    )
    assert torch.equal(out, cut)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint16], ids=str)
@pytest.mark.parametrize("name", ["kv_offset", "q_offset"])
def test_offsets_may_have_small_integer_dtypes(name: str, dtype: torch.dtype) -> None:
    """Derived positions need more bits: with ``kv_offset`` 3 the first query is at 394."""
    query, key, value = random_qkv(q_len=9, kv_len=400, dtype=torch.float16)
    options = {"q_offset": torch.tensor([120])} if name == "q_offset" else {"kv_offset": torch.tensor([3])}
    expected = attention(query, key, value, RECIPES["int8"], **options, backend="triton")
    narrow = {name: offset.to(dtype) for name, offset in options.items()}
    assert torch.equal(attention(query, key, value, RECIPES["int8"], **narrow, backend="triton"), expected)
    reference = attention(query, key, value, RECIPES["int8"], **narrow, backend="reference")
    assert relative_error(expected, reference) < 2e-3


@pytest.mark.parametrize("sinks", [torch.arange(8.0)[::2], torch.tensor(2.0).expand(4)], ids=["step", "expanded"])
def test_sinks_may_have_any_stride(sinks: torch.Tensor) -> None:
    qkv = random_qkv(q_heads=4, kv_heads=2, q_len=9, kv_len=9, dtype=torch.float16)
    expected = attention(*qkv, RECIPES["int8"], sinks=sinks.clone().contiguous(), backend="triton")
    assert torch.equal(attention(*qkv, RECIPES["int8"], sinks=sinks, backend="triton"), expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [{"batch": 0}, {"q_heads": 0}, {"q_len": 0}, {"kv_len": 0}], ids=str)
def test_empty_inputs_match_the_reference(shape: dict[str, int], recipe: str) -> None:
    query, key, value = random_qkv(**({"q_len": 5, "kv_len": 200} | shape), dtype=torch.float16)
    kv_range = torch.tensor([[0, 3]]).expand(len(query), 2)  # so that the call is planned with low tiles
    for _ in range(2):  # the first call compiles, the second repeats its plan
        out, lse = attention_with_lse(query, key, value, RECIPES[recipe], kv_range=kv_range, backend="triton")
        assert out.shape == query.shape
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_zero_keys_and_queries_leave_masked_scores_finite() -> None:
    zeros = torch.zeros(1, 1, 300, 64, dtype=torch.float16)
    value = torch.ones_like(zeros)
    out = attention(zeros, zeros, value, RECIPES["int8-pv16"], backend="triton")
    torch.testing.assert_close(out, value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nan_key_reaches_only_the_rows_that_attend_to_it(bad: float) -> None:
    query, key, value = random_qkv(q_len=300, kv_len=300, dtype=torch.float16)
    key[0, 0, 140, 3] = bad
    out = attention(query, key, value, RECIPES["int8-pv16"], backend="triton")
    assert out[0, :, 140:].isnan().any()
    assert not out[0, :, :128].isnan().any()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_lazily_negated_tensor_is_read_negated() -> None:
    query, key, value = random_qkv(q_len=130, kv_len=130, head_dim=16, dtype=torch.float16)
    negated = torch.view_as_complex(torch.stack((key, key), -1)).conj().imag
    assert negated.is_neg()
    expected = attention(query, -key, value, RECIPES["int8"], backend="triton")
    assert_bits_equal(attention(query, negated, value, RECIPES["int8"], backend="triton"), expected)


def test_triton_is_rejected_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = random_qkv(q_len=8, kv_len=8)
    with pytest.raises(RuntimeError, match=r"backend='triton' cannot run: it takes bf16 and fp16, got torch.float32"):
        attention(query, key, value, RECIPES["int8"], backend="triton")
    monkeypatch.setattr(chip, "is_interpreted", lambda: False)
    with pytest.raises(RuntimeError, match=r"backend='triton' cannot run: it needs a CUDA device, got cpu"):
        attention(query.half(), key.half(), value.half(), RECIPES["int8"], backend="triton")


@pytest.mark.parametrize(
    ("case", "recipe", "arch"),
    [
        # Not gqa, because all cases have two query heads for each KV head.
        *((case, "balanced", 90) for case in SPARSE if case != "gqa"),
        ("causal", "fp4", 100),
        *((case, "nvfp4-keys", 80) for case in ("inside-a-tile", "left-padded")),  # blocks of 64 keys
    ],
)
def test_the_same_tiles_are_skipped_as_in_the_reference(case: str, recipe: str, on_chip: None) -> None:
    call = with_one_head(replace(SPARSE[case], head_dim=64))
    assert_skips_as_the_reference(call, RECIPES[recipe], torch.float16, "cpu")


@pytest.mark.parametrize(
    ("case", "recipe"),
    [*product(EXACT_STARTS, ["balanced"]), *product(["chunk"], ("paper", "nvfp4-keys", "int8-pv16"))],
)
def test_an_exact_start_matches_the_reference(case: str, recipe: str) -> None:
    call = with_one_head(replace(EXACT_STARTS[case], head_dim=64))
    assert_an_exact_start_has_no_low_tile(call, RECIPES[recipe], torch.float16, "cpu")


def test_no_tile_of_an_exact_start_is_skipped() -> None:
    recipe = replace(RECIPES["balanced"], exact_until=640)
    call = with_one_head(replace(SPARSE["inside-a-block"], head_dim=64))
    assert_skips_as_the_reference(call, recipe, torch.float16, "cpu")


def test_an_infinite_threshold_skips_nothing() -> None:
    case = with_one_head(replace(SPARSE["causal"], head_dim=64))
    infinite = replace(RECIPES["balanced"], skip_threshold=math.inf)
    counts, expected_counts = case.zero_counts("cpu"), case.zero_counts("cpu")
    case.call(infinite, "reference", torch.float32, "cpu", expected_counts)
    out, _ = case.call(infinite, "triton", torch.float16, "cpu", counts)
    assert_bits_equal(out, case.call(RECIPES["balanced"], "triton", torch.float16, "cpu")[0])
    assert torch.equal(counts, expected_counts)
    assert counts[:, 0].eq(0).all()
    assert counts[:, 1].gt(0).all()


def test_counting_tiles_changes_no_bit() -> None:
    assert_counting_changes_no_bit(torch.float16, head_dim=64)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_dominant_sink_logit_costs_no_accuracy(backend: str) -> None:
    """E4M3 probabilities are scaled by the largest score, not by the sink logit."""
    query, key, value = random_qkv(q_len=64, kv_len=1000, dtype=torch.float16)
    query *= 0.05  # the largest logits are near 1
    errors = []
    for sink in (-math.inf, 12.0):
        sinks = torch.full((query.shape[1],), sink)
        exact = attention(query.double(), key.double(), value.double(), RECIPES["int8-pv16"], sinks=sinks.double())
        out = attention(query, key, value, RECIPES["int8"], sinks=sinks, backend=backend)
        errors.append(relative_error(out, exact))
    assert errors[1] < 1.5 * errors[0]
