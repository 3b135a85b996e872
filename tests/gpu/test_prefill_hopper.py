"""The warp-specialized and multi-CTA kernels on Hopper, against the reference and the portable kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_calls import fill_free_memory_with_nan
from dma_kernels import attention, attention_with_lse
from dma_kernels.prefill.config import MultiCTAConfig, PortableConfig, WarpSpecializedConfig
from dma_kernels.prefill.plan import forget_plans
from dma_kernels.runtime.reports import kernel_reports
from dma_kernels.testing import random_qkv, relative_error
from kernel_choice import use_kernel
from prefill_cases import (
    EXACT_STARTS,
    MASKED,
    RECIPES,
    SPARSE,
    Case,
    assert_an_exact_start_has_no_low_tile,
    assert_matches_reference,
    assert_skips_as_the_reference,
    similar_cases,
)
from torch import Tensor


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _is_hopper(), reason="needs a Hopper")]

LONG, SHORT = WarpSpecializedConfig, MultiCTAConfig
"""The kernels for long and for short calls."""


@pytest.fixture(params=[LONG, SHORT], ids=lambda kernel: kernel.kernel)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """Run calls of any length on a kernel, at least one in each test."""
    use_kernel(monkeypatch, request.param)
    names: list[str] = []
    with kernel_reports(names.append):
        yield request.param
    forget_plans()
    assert request.param.kernel in names


def variants(*groups: tuple[type[Any], Iterable[str], Iterable[int]]) -> pytest.MarkDecorator:
    """Parametrize a test by kernel, recipe and head dimension: each recipe of a group with each of its dimensions."""
    values = [(kernel, name, size) for kernel, names, sizes in groups for name in names for size in sizes]
    ids = [f"{kernel.kernel}-{name}-{size}" for kernel, name, size in values]
    return pytest.mark.parametrize(("kernel", "recipe", "head_dim"), values, indirect=["kernel"], ids=ids)


def resized(case: Case, head_dim: int, kernel: type[Any]) -> Case:
    """Return a case with other channels, without what the warp-specialized kernel does not compute over 64 of them."""
    if kernel is LONG and head_dim == 64:
        options, tensors = dict(case.options), dict(case.tensors)
        options.pop("window", None)
        tensors.pop("mask", None)
        case = replace(case, options=options, tensors=tensors)
    return replace(case, head_dim=head_dim)


recipes_of_all_paths = pytest.mark.parametrize("recipe", ["balanced", "int8-pv16", "paper", "nvfp4-keys"])


Results = tuple[Tensor, Tensor]


def call_of_many_ctas(recipe: str, head_dim: int, batch: int, length: int) -> Callable[[], Results]:
    sizes = {"batch": batch, "q_heads": 16, "kv_heads": 4, "q_len": length, "kv_len": length, "head_dim": head_dim}
    qkv = random_qkv(**sizes, dtype=torch.bfloat16, device="cuda")
    return lambda: attention_with_lse(*qkv, RECIPES[recipe], backend="triton")


def assert_as_the_portable_kernel(
    results: Results, run: Callable[[], Results], tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        use_kernel(patch, PortableConfig)
        expected, expected_lse = run()
    assert relative_error(results[0], expected) < tolerance
    torch.testing.assert_close(results[1], expected_lse, atol=1e-4, rtol=1e-5)


AMONG_OTHERS = """
import time, torch
from dma_kernels import attention, attention_with_lse
from dma_kernels.runtime.reports import kernel_reports
from prefill_cases import RECIPES
q = torch.randn(1, 32, 8192, 128, dtype=torch.bfloat16, device="cuda")
k, v = (torch.randn(1, 8, 8192, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
launches = []
with kernel_reports(launches.append):
    for name in ("int8", "paper", "fp4", "nvfp4-keys"):
        expected = attention(q, k, v, RECIPES[name])
        end = time.perf_counter() + 3
        while time.perf_counter() < end:
            results = [attention(q, k, v, RECIPES[name]) for _ in range(20)]
            assert all(torch.equal(result, expected) for result in results), name
assert "warp-specialized" in launches
"""


def test_processes_can_share_a_gpu() -> None:
    """The GPU switches between them while kernels run."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", AMONG_OTHERS]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) for _ in range(4)]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), errors


# With the same heads, so that each recipe compiles only twice.
HEADS: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 128}
SHAPES = similar_cases({"q_len": 1000, "kv_len": 1000} | HEADS, {
    "odd": {"batch": 2},
    "few-queries": {"q_len": 69, "kv_len": 569},
    "whole-tiles": {"q_len": 768, "kv_len": 768},
    "chunk": {"q_len": 300, "kv_len": 1500, "options": {"q_offset": 1200}},
    "offset": {"q_len": 300, "kv_len": 1500, "options": {"q_offset": 1300, "kv_offset": 256}},
    "bidirectional": {"options": {"is_causal": False}},
    "cross": {"kv_len": 450, "options": {"is_causal": False}},
    "wide": {"q_len": 200, "kv_len": 1500, "options": {"is_causal": False, "q_offset": 700}},
    "inside-a-tile": {"kv_len": 1141, "options": {"q_offset": 282, "kv_offset": 141}},
    "keys-ahead": {"q_len": 500, "options": {"kv_offset": 950, "is_causal": False}},
    "keys-end-early": {"kv_len": 600, "options": {"q_offset": 300}},
    "window": {"q_len": 1500, "kv_len": 1500, "options": {"window": 700}},
    "window-chunk": {"q_len": 300, "kv_len": 1500, "options": {"q_offset": 1200, "window": 515}},
    "window-bidirectional": {"q_len": 1500, "kv_len": 1500, "options": {"window": 500, "is_causal": False}},
    "left-padded-window": {
        "batch": 2,
        "options": {"window": 600},
        "tensors": {"kv_range": [[345, 1000], [0, 1000]], "kv_offset": [-345, 0], "q_offset": [-345, 0]},
    },
    "padded-bidirectional": {
        "batch": 3, "options": {"is_causal": False}, "tensors": {"kv_range": [[0, 0], [45, 700], [0, 1000]]},
    },
    "sinks-of-nothing": {
        "batch": 2, "tensors": {"kv_range": [[0, 0], [45, 900]], "sinks": [0.5, float("-inf"), 3.0, -2.0]},
    },
    "softcap-above-all-logits": {"options": {"softcap": 1e7}},
    "softcap-and-sinks": {
        "batch": 2,
        "options": {"softcap": 5.0, "is_causal": False},
        "tensors": {"kv_range": [[45, 900], [0, 0]], "sinks": [0.5, 3.0, 1.0, -2.0]},
    },
})  # fmt: skip
OTHER_PATHS = ("int8-pv16", "e4m3-rotated", "paper", "mxfp4-row", "int8-mxfp8", "fp4", "nvfp4", "mixed", "nvfp4-keys")


@variants(
    (LONG, ["int8"], (64, 96, 128, 192, 256)),
    (LONG, OTHER_PATHS, (128,)),
    (LONG, ["e4m3-rotated", "int8-mxfp8"], (64, 96, 192, 256)),
    (SHORT, ["balanced", "int8-pv16"], (64, 96)),
    (SHORT, ["balanced", *OTHER_PATHS], (128,)),
    (SHORT, ["paper", "fp4", "nvfp4-keys"], (64,)),
    (SHORT, ["fp4"], (96,)),
)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_reference(shape: str, recipe: str, head_dim: int, kernel: type[Any]) -> None:
    assert_matches_reference(resized(SHAPES[shape], head_dim, kernel), RECIPES[recipe], torch.bfloat16, "cuda")


@variants(
    (LONG, ["int8"], (128, 192, 256)),
    (LONG, ["paper", "fp4"], (128,)),
    (SHORT, ["balanced"], (64, 128)),
    (SHORT, ["int8-pv16", "paper", "fp4"], (128,)),
    (SHORT, ["nvfp4"], (64,)),
)
@pytest.mark.parametrize("case", MASKED)
def test_masks_match_the_reference(case: str, recipe: str, head_dim: int, kernel: type[Any]) -> None:
    assert_matches_reference(replace(MASKED[case], head_dim=head_dim), RECIPES[recipe], torch.bfloat16, "cuda")


@variants(
    (LONG, ["balanced", "fp4", "paper", "int8-pv16", "identity"], (128,)),
    (LONG, ["balanced"], (64, 256)),
    (SHORT, ["balanced", "fp4", "int8-pv16", "identity"], (128,)),
    (SHORT, ["balanced"], (64,)),
)
@pytest.mark.parametrize("case", SPARSE)
def test_the_tiles_that_the_reference_skips_are_skipped(
    case: str, recipe: str, head_dim: int, kernel: type[Any]
) -> None:
    assert_skips_as_the_reference(resized(SPARSE[case], head_dim, kernel), RECIPES[recipe], torch.bfloat16, "cuda")


@pytest.mark.parametrize("case", SPARSE)
def test_no_tile_of_an_exact_start_is_skipped(case: str, kernel: type[Any]) -> None:
    recipe = replace(RECIPES["balanced"], exact_until=640)
    assert_skips_as_the_reference(SPARSE[case], recipe, torch.bfloat16, "cuda")


@recipes_of_all_paths
@pytest.mark.parametrize("case", [name for name in EXACT_STARTS if name != "below"])
def test_exact_starts_match_the_reference(case: str, recipe: str, kernel: type[Any]) -> None:
    assert_an_exact_start_has_no_low_tile(EXACT_STARTS[case], RECIPES[recipe], torch.bfloat16, "cuda")


@pytest.mark.parametrize("bands", [(0, 0), (0, 2), (3, 0), (1, 1), (7, 0), (0, 7)])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", ["int8", "int8-pv16", "fp4", "nvfp4-keys"])  # two or three blocks in flight
def test_diagonal_and_sink_tiles_and_fp16_match_the_reference(
    name: str, is_causal: bool, bands: tuple[int, int], kernel: type[Any]
) -> None:
    recipe = replace(RECIPES[name], diagonal_tiles=bands[0], sink_tiles=bands[1])
    case = Case(q_len=1090, kv_len=1090, options={"is_causal": is_causal}, **HEADS)
    assert_matches_reference(case, recipe, torch.float16, "cuda")


@pytest.mark.parametrize("recipe", ["balanced", "int8-pv16", "nvfp4-keys"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_masked_keys_may_hold_any_value(recipe: str, is_causal: bool, kernel: type[Any]) -> None:
    length = 1100
    query, key, value = random_qkv(batch=2, q_len=length, kv_len=length, **HEADS, dtype=torch.bfloat16, device="cuda")
    starts, ends = torch.tensor([[345, 0], [1100, 690]], device="cuda")
    index = torch.arange(length, device="cuda")
    hidden = ((index < starts[:, None]) | (index >= ends[:, None]))[:, None, :, None]
    options: dict[str, Any] = {
        "kv_range": torch.stack([starts, ends], 1), "kv_offset": -starts, "q_offset": -starts, "is_causal": is_causal,
    }  # fmt: skip
    results = [
        attention(query, *(x.masked_fill(hidden, filler) for x in (key, value)), RECIPES[recipe], **options)
        for filler in (0.0, float("nan"))
    ]
    assert torch.equal(*results)
    assert results[0].isfinite().all()


@variants((SHORT, ["balanced", "int8", "e4m3-rotated", "int8-pv16", "paper", "nvfp4-keys"], (128,)))
def test_a_nan_query_makes_only_its_own_row_nan(recipe: str, head_dim: int, kernel: type[Any]) -> None:
    query, key, value = random_qkv(q_len=700, kv_len=700, **HEADS, dtype=torch.bfloat16, device="cuda")
    expected = attention(query, key, value, RECIPES[recipe])
    query[0, 1, 650, 5] = float("nan")
    out = attention(query, key, value, RECIPES[recipe])
    assert out[0, 1, 650].isnan().all()
    out[0, 1, 650] = expected[0, 1, 650]
    assert torch.equal(out, expected)


@variants((LONG, ["int8"], (128,)), (SHORT, ["int8", "int8-pv16", "paper", "fp4", "nvfp4-keys"], (64, 128)))
def test_calls_of_many_ctas_are_deterministic_and_match_the_portable_kernel(
    recipe: str, head_dim: int, kernel: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = call_of_many_ctas(recipe, head_dim, batch=4, length=2500)
    out, lse = run()
    fill_free_memory_with_nan()
    for _ in range(5):
        again, again_lse = run()
        assert torch.equal(again, out)
        assert torch.equal(again_lse, lse)
    # The portable kernel starts with the high tiles, so it rounds probabilities relative to other maxima.
    assert_as_the_portable_kernel((out, lse), run, 0.02, monkeypatch)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_long_calls_run_on_the_warp_specialized_kernel(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run, names = call_of_many_ctas("int8", head_dim, batch=1, length=16_400), []
    with kernel_reports(names.append):
        results = run()
    assert LONG.kernel in names
    assert_as_the_portable_kernel(results, run, 0.01, monkeypatch)
