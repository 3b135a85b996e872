"""The prefill kernel in Triton's interpreter: what only its host side, and a chunk of the last positions, show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from dma_kernels import Recipe
from dma_kernels.numerics.geometry import PrefillGeometry
from dma_kernels.prefill import host
from dma_kernels.prefill.host import prefill_attention
from dma_kernels.prefill.operands import Operands
from dma_kernels.prefill.quantizer import quantize_keys_values
from dma_kernels.runtime.descriptors import is_describable
from dma_kernels.runtime.launch import observed
from dma_kernels.runtime.lowering import select_lowering
from dma_kernels.runtime.tuning import L2_BYTES, select_section, select_tiles
from dma_kernels.testing import random_qkv, relative_error
from prefill_cases import Case, assert_matches_reference
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs these")

LENGTH, CHUNK = 650, 70
INT8 = Recipe(low="mxint8", shared_scale="tile", smooth_k=True, pv="fp8")
INT8_PV16 = Recipe(low="mxint8", shared_scale="tile", smooth_k=True)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return random_qkv(q_len=CHUNK, kv_len=LENGTH, dtype=torch.float16)


def run(query: Tensor, operands: Operands, recipe: Recipe, arch: int, window: int | None = None) -> Tensor:
    """Attend to a chunk of the last positions."""
    geometry = PrefillGeometry(LENGTH, LENGTH - CHUNK, 0, None, is_causal=True, window=window, mask=None)
    tiles = select_tiles(arch, select_lowering(recipe, arch), query.shape[3], query.shape[3])
    out, _ = prefill_attention(
        query, operands, geometry, recipe, tiles,
        scale=0.125, softcap=None, sinks=None, use_tma=arch >= 90, is_early=False,
    )  # fmt: skip
    return out


def one_shot(key: Tensor, value: Tensor, recipe: Recipe, arch: int) -> Operands:
    lowering = select_lowering(recipe, arch)
    return quantize_keys_values(key, value, recipe, lowering, kv_offset=0, rows=None)


@pytest.mark.parametrize("arch", [80, 90])
def test_values_of_high_tiles_are_not_rounded(arch: int) -> None:
    query, key, value = inputs()
    all_high = replace(INT8, diagonal_tiles=LENGTH)
    exact = replace(all_high, pv="bf16")
    actual = run(query, one_shot(key, value, all_high, arch), all_high, arch)
    assert relative_error(actual, run(query, one_shot(key, value, exact, arch), exact, arch)) < 1e-3


@pytest.mark.parametrize("section", [1, 2])
def test_sections_of_heads_are_all_computed(section: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "select_section", lambda kv_heads, size: section)
    case = Case(batch=1, q_heads=6, kv_heads=3, q_len=140, kv_len=140)  # the last section of two has one head
    assert_matches_reference(case, INT8, torch.float16, "cpu")


def test_tensors_that_a_descriptor_cannot_describe() -> None:
    x = torch.zeros(2, 64, 4, 40, dtype=torch.float16).transpose(1, 2)
    assert is_describable(x)
    assert not is_describable(x[..., 1:])  # starts between multiples of 16 bytes
    assert not is_describable(x.transpose(2, 3))  # channels are not side by side
    assert not is_describable(x[:, :1].expand(2, 4, 64, 40))  # heads at one address
    assert not is_describable(torch.zeros(1, 2, 8, 20, dtype=torch.float16))  # rows of 40 bytes
    assert not is_describable(x[:, :, :0])


def test_a_section_fits_in_the_cache() -> None:
    assert select_section(8, L2_BYTES // 8) == 8
    assert select_section(8, L2_BYTES // 64) == 8
    assert select_section(64, L2_BYTES // 3) == 3
    assert select_section(8, 1 << 30) == 1


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
def test_a_call_without_low_tiles_quantises_nothing_but_high_ones(
    recipe: Recipe, length: int, options: dict[str, Any], kernels: list[str]
) -> None:
    launched: list[str] = []
    case = Case(q_len=length, kv_len=length, q_heads=1, head_dim=16, options=options)
    with observed(lambda kernel, *_: launched.append(kernel.fn.__name__)):
        assert_matches_reference(case, recipe, torch.float16, "cpu")
    assert launched == kernels
