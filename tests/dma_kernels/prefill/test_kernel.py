"""The prefill kernel's host side, and chunks of the last positions, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from dma_kernels import Recipe, attention
from dma_kernels.numerics.layout import is_describable
from dma_kernels.prefill.config import L2_BYTES, select_swizzle_group
from dma_kernels.prefill.plan import plan
from dma_kernels.testing import random_qkv, relative_error
from prefill_cases import Case, assert_matches_reference

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs these")

INT8 = Recipe(low="mxint8", shared_scale="tile", smooth_k=True, pv="fp8")


@pytest.mark.parametrize("arch", [80, 90])
def test_values_of_high_tiles_are_not_rounded(on_chip: None) -> None:
    inputs = random_qkv(q_len=70, kv_len=650, dtype=torch.float16)
    all_high = replace(INT8, diagonal_tiles=650)
    # With a key range on the device, the host does not know that all tiles are high.
    out, exact = (
        attention(*inputs, replace(all_high, pv=pv), kv_range=torch.tensor([[0, 650]]), backend="triton")
        for pv in ("fp8", "bf16")
    )
    assert relative_error(out, exact) < 1e-3


@pytest.mark.parametrize("heads", [1, 2])
def test_swizzle_groups_of_heads_are_all_computed(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dma_kernels.prefill.plan.select_swizzle_group", lambda kv_heads, size: heads)
    case = Case(batch=1, q_heads=6, kv_heads=3, q_len=140, kv_len=140)  # the last group of two has one head
    assert_matches_reference(case, INT8, torch.float16, "cpu")


def test_misaligned_broadcast_and_empty_tensors_have_no_descriptor() -> None:
    x = torch.zeros(2, 64, 4, 40, dtype=torch.float16).transpose(1, 2)
    assert is_describable(x)
    assert not is_describable(x[..., 1:])  # not aligned to 16 bytes
    assert not is_describable(x.transpose(2, 3))  # channels are not contiguous
    assert not is_describable(x[:, :1].expand(2, 4, 64, 40))  # broadcast heads
    assert not is_describable(torch.zeros(1, 2, 8, 20, dtype=torch.float16))  # rows of 40 bytes
    assert not is_describable(x[:, :, :0])


def test_a_swizzle_group_fits_in_the_l2_cache() -> None:
    assert select_swizzle_group(8, L2_BYTES // 8) == 8
    assert select_swizzle_group(8, L2_BYTES // 64) == 8
    assert select_swizzle_group(64, L2_BYTES // 3) == 3
    assert select_swizzle_group(8, 1 << 30) == 1


BIDIRECTIONAL = {"is_causal": False}


@pytest.mark.parametrize(
    ("recipe", "length", "options", "kernels"),
    [
        (INT8, 384, {}, ["prefill_kernel"]),
        (INT8, 385, {}, ["quantize_kernel", "prefill_kernel"]),
        (INT8, 256, BIDIRECTIONAL, ["prefill_kernel"]),
        (INT8, 257, BIDIRECTIONAL, ["quantize_kernel", "prefill_kernel"]),
        (replace(INT8, sink_tiles=0), 257, {}, ["quantize_kernel", "prefill_kernel"]),
        (replace(INT8, high="mxfp8", rotate=True), 384, {}, ["quantize_kernel", "prefill_kernel"]),
        (INT8, 40, {"q_offset": 424, "kv_offset": 424}, ["prefill_kernel"]),
        (INT8, 40, {"q_offset": 424, "kv_offset": 130}, ["quantize_kernel", "prefill_kernel"]),
        (INT8, 40, {"q_offset": 424, "kv_offset": 88}, ["prefill_kernel"]),
    ],
)  # fmt: skip
def test_a_call_without_low_tiles_quantizes_only_high_operands(
    recipe: Recipe, length: int, options: dict[str, Any], kernels: list[str]
) -> None:
    case = Case(q_len=length, kv_len=length, q_heads=1, head_dim=16, options=options)
    assert_matches_reference(case, recipe, torch.float16, "cpu")
    launches = plan(case.problem(recipe, torch.float16, "cpu")).launches
    assert launches is not None
    assert launches.kernels == kernels
