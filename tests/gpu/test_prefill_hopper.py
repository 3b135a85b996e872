"""The warp-specialized and one-warpgroup kernels on Hopper, against the reference and the portable kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from dma_kernels import Recipe, attention, attention_with_lse
from dma_kernels.prefill.config import OneWarpgroupConfig, PortableConfig, WarpSpecializedConfig
from dma_kernels.prefill.plan import forget_plans
from dma_kernels.runtime.reports import kernel_reports
from dma_kernels.testing import random_qkv, relative_error
from kernel_choice import use_kernel
from prefill_cases import (
    COUNTED,
    EXACT_STARTS,
    MASKED,
    RECIPES,
    SPARSE,
    UNCOUNTED,
    Case,
    assert_an_exact_start_has_no_low_tile,
    assert_matches_reference,
    assert_skips_as_the_reference,
    that_skips,
)
from torch import Tensor


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _is_hopper(), reason="needs a Hopper")]


@contextmanager
def computed_by(kernel: type[Any]) -> Iterator[list[str]]:
    """Yield a list that gets the kernel's name for each call that it computes."""
    calls: list[str] = []
    with kernel_reports(lambda name: calls.append(name) if name == kernel.kernel else None):
        yield calls


LONG, SHORT = WarpSpecializedConfig.kernel, OneWarpgroupConfig.kernel
kernels = pytest.mark.parametrize("kernel", [LONG, SHORT])
short = pytest.mark.parametrize("kernel", [SHORT])


@pytest.fixture
def kernel() -> str:
    """The kernel for calls of any length."""
    return LONG


@pytest.fixture
def launches(kernel: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Run calls of any length on a kernel, and record those that it computes, of which there must be some."""
    config = WarpSpecializedConfig if kernel == LONG else OneWarpgroupConfig
    use_kernel(monkeypatch, config)
    with computed_by(config) as calls:
        yield calls
    forget_plans()
    assert calls


Results = tuple[Tensor, Tensor]
"""An output and its log-sum-exp."""

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
    processes = [
        subprocess.Popen([sys.executable, "-c", AMONG_OTHERS], stderr=subprocess.PIPE, text=True, env=_environment())
        for _ in range(4)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), errors


def _environment() -> dict[str, str]:
    """Return the environment with this process's module paths."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


# The heads of `prefill_cases`, for which a kernel is compiled. Rows of a batch with their own ranges have several.
HEADS: dict[str, Any] = {"q_heads": 2, "kv_heads": 1, "head_dim": 128}
TWO_KV_HEADS: dict[str, Any] = {**HEADS, "q_heads": 4, "kv_heads": 2}
SHAPES = {
    "odd": Case(q_len=1000, kv_len=1000, batch=2, **HEADS),
    "few-queries": Case(q_len=69, kv_len=569, **HEADS),
    "whole-tiles": Case(q_len=768, kv_len=768, **HEADS),
    "chunk": Case(q_len=300, kv_len=1500, options={"q_offset": 1200}, **HEADS),
    "offset": Case(q_len=300, kv_len=1500, options={"q_offset": 1300, "kv_offset": 256}, **HEADS),
    "bidirectional": Case(q_len=1000, kv_len=1000, options={"is_causal": False}, **HEADS),
    "cross": Case(q_len=1000, kv_len=450, options={"is_causal": False}, **HEADS),
    "wide": Case(q_len=200, kv_len=1500, options={"is_causal": False, "q_offset": 700}, **HEADS),
}
EDGES = {
    "inside-a-tile": Case(q_len=1000, kv_len=1141, options={"q_offset": 282, "kv_offset": 141}, **HEADS),
    "keys-ahead": Case(q_len=500, kv_len=1000, options={"kv_offset": 950, "is_causal": False}, **HEADS),
    "keys-end-early": Case(q_len=1000, kv_len=600, options={"q_offset": 300}, **HEADS),
    "window": Case(q_len=1500, kv_len=1500, options={"window": 700}, **HEADS),
    "window-chunk": Case(q_len=300, kv_len=1500, options={"q_offset": 1200, "window": 515}, **HEADS),
    "window-bidirectional": Case(q_len=1500, kv_len=1500, options={"window": 500, "is_causal": False}, **HEADS),
    "left-padded": Case(
        q_len=1000, kv_len=1000, batch=2,
        tensors={"kv_range": [[345, 1000], [0, 1000]], "kv_offset": [-345, 0], "q_offset": [-345, 0]}, **TWO_KV_HEADS,
    ),
    "left-padded-window": Case(
        q_len=1500, kv_len=1500, batch=2, options={"window": 600},
        tensors={"kv_range": [[345, 1500], [0, 1500]], "kv_offset": [-345, 0], "q_offset": [-345, 0]}, **TWO_KV_HEADS,
    ),
    "padded-bidirectional": Case(
        q_len=1000, kv_len=1000, batch=3, options={"is_causal": False},
        tensors={"kv_range": [[0, 0], [45, 700], [0, 1000]]}, **TWO_KV_HEADS,
    ),
    "sinks": Case(q_len=1000, kv_len=1000, tensors={"sinks": [0.5, 3.0]}, **HEADS),
    "sinks-of-nothing": Case(
        q_len=1000, kv_len=1000, batch=2,
        tensors={"kv_range": [[0, 0], [45, 900]], "sinks": [0.5, float("-inf"), 3.0, -2.0]}, **TWO_KV_HEADS,
    ),
    "softcap": Case(q_len=1000, kv_len=1000, options={"softcap": 5.0}, **HEADS),
    "softcap-above-all-logits": Case(q_len=1000, kv_len=1000, options={"softcap": 1e7}, **HEADS),
    "softcap-and-sinks": Case(
        q_len=1000, kv_len=1000, batch=2, options={"softcap": 5.0, "is_causal": False},
        tensors={"kv_range": [[45, 900], [0, 0]], "sinks": [0.5, 3.0, 1.0, -2.0]}, **TWO_KV_HEADS,
    ),
}  # fmt: skip
"""Calls with partly masked low tiles, sink logits or a softcap."""

COMBINED = ("left-padded-window", "softcap-and-sinks")
"""Those of several features each, for head dimensions whose kernels are configured as another's."""
FEW_EDGES = ("keys-end-early", "window-chunk", "padded-bidirectional", "sinks", "softcap", *COMBINED)
"""One for each feature."""
FEW_MASKED = ("causal", "of-keys", "bidirectional", "left-padded", "window-softcap-sinks")


ALL_RECIPES = ("int8", "int8-pv16", "e4m3-rotated", "paper", "mxfp4-row", "int8-mxfp8", "fp4", "nvfp4", "mixed")
CALLS = [
    *product([LONG], SHAPES, (*ALL_RECIPES, "nvfp4-keys"), [128]),
    *product([LONG], SHAPES, ["int8"], (64, 96, 192, 256)),
    *product([LONG], SHAPES, ("e4m3-rotated", "int8-mxfp8"), (64, 256)),
    *product([LONG], EDGES, ("int8", "nvfp4-keys"), [128]),
    *product([LONG], EDGES, ["int8"], [256]),
    *product([LONG], [name for name in EDGES if "window" not in name], ["int8"], [64]),
    *product([LONG], FEW_EDGES, ("int8-pv16", "paper"), [128]),
    *product([LONG], COMBINED, ["int8"], (96, 192)),
    *product([SHORT], SHAPES, ("balanced", *ALL_RECIPES, "nvfp4-keys"), [128]),
    *product([SHORT], SHAPES, ("balanced", "int8-pv16", "fp4"), (64, 96)),
    *product([SHORT], SHAPES, ("e4m3-rotated", "paper", "nvfp4-keys"), [64]),
    *product([SHORT], EDGES, ["balanced"], (64, 128)),
    *product([SHORT], EDGES, ["nvfp4-keys"], [128]),
    *product([SHORT], FEW_EDGES, ("int8-pv16", "paper", "fp4"), [128]),
    *product([SHORT], COMBINED, ["int8-pv16"], [64]),
    *product([SHORT], COMBINED, ["balanced"], [96]),
]
MASKED_CALLS = [
    *product([LONG], MASKED, ["int8"], [128]),
    *product([LONG], FEW_MASKED, ("paper", "fp4"), [128]),
    *product([LONG], FEW_MASKED, ["int8"], [256]),
    *product([SHORT], MASKED, ["balanced"], [128]),
    *product([SHORT], FEW_MASKED, ("int8-pv16", "paper", "fp4"), [128]),
    *product([SHORT], FEW_MASKED, ["balanced"], [64]),
]
"""Kernel, case, recipe and head dimension of each call."""


@pytest.mark.parametrize(("kernel", "case", "recipe", "head_dim"), CALLS)
def test_matches_the_reference(case: str, recipe: str, head_dim: int, launches: list[str]) -> None:
    call = replace((SHAPES | EDGES)[case], head_dim=head_dim)
    assert_matches_reference(call, RECIPES[recipe], torch.bfloat16, "cuda")


@pytest.mark.parametrize(("kernel", "case", "recipe", "head_dim"), MASKED_CALLS)
def test_masks_match_the_reference(case: str, recipe: str, head_dim: int, launches: list[str]) -> None:
    assert_matches_reference(replace(MASKED[case], head_dim=head_dim), RECIPES[recipe], torch.bfloat16, "cuda")


@pytest.mark.parametrize(
    ("kernel", "recipe"),
    [*product([LONG], ("int8", "int8-pv16", "nvfp4-keys")), *product([SHORT], ("balanced", "int8-pv16"))],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_masked_keys_may_hold_any_value(recipe: str, is_causal: bool, launches: list[str]) -> None:
    length = 1100
    query, key, value = random_qkv(batch=2, q_len=length, kv_len=length, **HEADS, dtype=torch.bfloat16, device="cuda")
    starts, ends = torch.tensor([[345, 0], [1100, 690]], device="cuda")
    index = torch.arange(length, device="cuda")
    hidden = ((index < starts[:, None]) | (index >= ends[:, None]))[:, None, :, None]
    options: dict[str, Any] = {"kv_range": torch.stack([starts, ends], 1), "is_causal": is_causal}
    if is_causal:  # otherwise visible keys begin inside a tile
        options |= {"kv_offset": -starts, "q_offset": -starts}
    results = [
        attention(query, *(x.masked_fill(hidden, filler) for x in (key, value)), RECIPES[recipe], **options)
        for filler in (0.0, float("nan"))
    ]
    assert torch.equal(*results)
    assert results[0].isfinite().all()


def test_smoothed_mxfp8_high_tiles_match_the_reference(launches: list[str]) -> None:
    recipe = Recipe(low="mxint8", high="mxfp8", shared_scale="tile", smooth_k=True, pv="fp8")
    assert_matches_reference(SHAPES["odd"], recipe, torch.bfloat16, "cuda")


def assert_matches_portable(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Results], tolerance: float) -> None:
    """Compare a call's output and log-sum-exp with those of the portable kernel."""
    out, lse = call()
    with monkeypatch.context() as patch:
        use_kernel(patch, PortableConfig)
        expected, expected_lse = call()
    assert relative_error(out, expected) < tolerance
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("bands", [(0, 0), (0, 2), (3, 0), (1, 1), (7, 0), (0, 7)])
@pytest.mark.parametrize(
    ("kernel", "name", "is_causal", "head_dim", "dtype"),
    [
        # Three blocks in flight, and two.
        *product([LONG], ("int8-pv16", "nvfp4-keys"), (True, False), [128], [torch.bfloat16]),
        *product([SHORT], ["int8"], [True], (64, 128), [torch.float16]),
    ],
)
def test_diagonal_and_sink_tiles_match_the_portable_kernel(
    kernel: str, name: str, is_causal: bool, head_dim: int, dtype: torch.dtype, bands: tuple[int, int],
    launches: list[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    recipe = replace(RECIPES[name], diagonal_tiles=bands[0], sink_tiles=bands[1])
    qkv = random_qkv(q_len=1090, kv_len=1090, **(HEADS | {"head_dim": head_dim}), dtype=dtype, device="cuda")
    # The portable kernel starts with the high tiles, so with FP8 it rounds probabilities relative to other maxima.
    tolerance = 0.01 if kernel == LONG else 0.02
    run = partial(attention_with_lse, *qkv, recipe, is_causal=is_causal, backend="triton")
    assert_matches_portable(monkeypatch, run, tolerance)
    assert launches == [kernel]


@kernels
@pytest.mark.parametrize("recipe", ["balanced", "int8-pv16", "paper", "nvfp4-keys"])
@pytest.mark.parametrize("case", [name for name in EXACT_STARTS if name != "below"])
def test_exact_starts_match_the_reference(case: str, recipe: str, launches: list[str]) -> None:
    assert_an_exact_start_has_no_low_tile(EXACT_STARTS[case], RECIPES[recipe], torch.bfloat16, "cuda")


@pytest.mark.parametrize("recipe", ["int8", "fp4", "nvfp4-keys"])
def test_fp16_and_transposed_views_match_the_reference(recipe: str, launches: list[str]) -> None:
    assert_matches_reference(SHAPES["odd"], RECIPES[recipe], torch.float16, "cuda")


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_long_calls_run_on_it_and_match_the_portable_kernel(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = random_qkv(
        q_heads=16, kv_heads=4, q_len=16_400, kv_len=16_400, head_dim=head_dim, dtype=torch.bfloat16, device="cuda"
    )

    with computed_by(WarpSpecializedConfig) as calls:
        run = partial(attention_with_lse, *qkv, RECIPES["int8"], backend="triton")
        assert_matches_portable(monkeypatch, run, 0.01)
    assert calls == [LONG]


def test_runs_are_bit_identical(launches: list[str]) -> None:
    qkv = random_qkv(q_len=3000, kv_len=3000, **HEADS, dtype=torch.bfloat16, device="cuda")
    first = attention(*qkv, RECIPES["int8"], backend="triton")
    poison = torch.full((64, 1024, 1024), float("nan"), device="cuda")
    del poison  # the allocator hands this memory to the outputs
    for _ in range(5):
        assert torch.equal(attention(*qkv, RECIPES["int8"], backend="triton"), first)
    assert len(launches) == 6


@short
@pytest.mark.parametrize(
    ("head_dim", "name"),
    [
        (64, "int8"), (128, "int8"), (64, "int8-pv16"), (128, "int8-pv16"), (64, "paper"), (128, "paper"), (128, "fp4"),
        (128, "nvfp4-keys"),
    ],
)  # fmt: skip
def test_short_calls_of_many_ctas_are_deterministic_and_match_the_portable_kernel(
    head_dim: int, name: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv = random_qkv(
        batch=4, q_heads=16, kv_heads=4, q_len=2500, kv_len=2500, head_dim=head_dim, dtype=torch.bfloat16, device="cuda"
    )

    run = partial(attention_with_lse, *qkv, RECIPES[name], backend="triton")
    out, lse = run()
    poison = torch.full((64, 1024, 1024), float("nan"), device="cuda")
    del poison  # the allocator hands this memory to the outputs
    for _ in range(5):
        again, again_lse = run()
        assert torch.equal(again, out)
        assert torch.equal(again_lse, lse)
    assert_matches_portable(monkeypatch, run, 0.02)


@short
def test_swizzle_groups_need_not_divide_the_heads(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dma_kernels.prefill.plan.select_swizzle_group", lambda *_: 3)
    assert_matches_reference(SHAPES["odd"], RECIPES["balanced"], torch.bfloat16, "cuda")


@short
@pytest.mark.parametrize("recipe", ["balanced", "int8", "e4m3-rotated", "int8-pv16", "paper", "nvfp4-keys"])
def test_a_nan_query_makes_only_its_own_row_nan(recipe: str, launches: list[str]) -> None:
    query, key, value = random_qkv(q_len=700, kv_len=700, **HEADS, dtype=torch.bfloat16, device="cuda")
    expected = attention(query, key, value, RECIPES[recipe])
    query[0, 1, 650, 5] = float("nan")
    out = attention(query, key, value, RECIPES[recipe])
    assert out[0, 1, 650].isnan().all()
    out[0, 1, 650] = expected[0, 1, 650]
    assert torch.equal(out, expected)


@kernels
@pytest.mark.parametrize(("case", "recipe"), COUNTED)
def test_the_tiles_that_the_reference_skips_are_skipped(case: str, recipe: str, launches: list[str]) -> None:
    assert_skips_as_the_reference(SPARSE[case], RECIPES[recipe], torch.bfloat16, "cuda")


@kernels
@pytest.mark.parametrize(("case", "recipe"), UNCOUNTED)
def test_tiles_are_skipped_without_counting_them(case: str, recipe: str, launches: list[str]) -> None:
    assert_matches_reference(SPARSE[case], that_skips(RECIPES[recipe]), torch.bfloat16, "cuda")


@kernels
@pytest.mark.parametrize("case", SPARSE)
def test_no_tile_of_an_exact_start_is_skipped(case: str, launches: list[str]) -> None:
    recipe = replace(RECIPES["balanced"], exact_until=640)
    assert_skips_as_the_reference(SPARSE[case], recipe, torch.bfloat16, "cuda")


@pytest.mark.parametrize(
    ("kernel", "case", "head_dim"), [(LONG, "gqa", 64), (LONG, "gqa", 256), (SHORT, "gqa", 64), (SHORT, "mask", 64)]
)
def test_tiles_of_other_head_dims_are_skipped(case: str, head_dim: int, launches: list[str]) -> None:
    assert_skips_as_the_reference(replace(SPARSE[case], head_dim=head_dim), RECIPES["balanced"], torch.float16, "cuda")
