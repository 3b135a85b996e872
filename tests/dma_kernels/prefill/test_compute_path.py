"""The operand formats of keys and values on each chip."""

from __future__ import annotations

import pytest
import torch
import triton
from dma_kernels import Recipe
from dma_kernels.prefill.config import ComputePath, select_compute_path
from dma_kernels.prefill.operands import (
    DEQUANTIZED,
    E4M3,
    E4M3_VALUES,
    E5M2,
    INT8,
    PACKED,
    RAW,
    dequantized_dtype,
)

BALANCED = Recipe(low="mxint8", shared_scale="tile", smooth_k=True, pv="fp8")
MXFP8 = Recipe(low="mxfp8", shared_scale="tile", pv="fp8")
PAPER = Recipe(low="mxfp4", high="mxfp8", scale_rounding="floor", sink_tiles=0)
NVFP4 = Recipe(low="nvfp4", high="mxfp8", smooth_k=True, rotate=True, pv="fp8")
MIXED = Recipe(low_q="mxfp8", low_k="mxfp4")
KEYS = Recipe(low_q="bf16", low_k="nvfp4")


@pytest.fixture(autouse=True)
def triton_3_9(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select paths as with a Triton that compiles all of them."""
    monkeypatch.setattr(triton, "__version__", "3.9.0")


@pytest.mark.parametrize(
    ("recipe", "arch", "name", "expected"),
    [
        (BALANCED, 80, "8bit", ComputePath(RAW, INT8, DEQUANTIZED)),
        (BALANCED, 89, "8bit", ComputePath(RAW, INT8, E4M3_VALUES)),
        (BALANCED, 90, "8bit", ComputePath(RAW, INT8, E4M3_VALUES)),
        (BALANCED, 100, "8bit", ComputePath(RAW, INT8, E4M3_VALUES)),
        (MXFP8, 80, "portable", ComputePath(RAW, DEQUANTIZED, DEQUANTIZED)),
        (MXFP8, 90, "8bit", ComputePath(RAW, E4M3, E4M3_VALUES)),
        (PAPER, 80, "portable", ComputePath(DEQUANTIZED, DEQUANTIZED, RAW)),
        (PAPER, 89, "8bit", ComputePath(DEQUANTIZED, E5M2, RAW)),
        (PAPER, 90, "8bit", ComputePath(DEQUANTIZED, E5M2, RAW)),
        (PAPER, 100, "scaled", ComputePath(PACKED["mxfp8"], PACKED["mxfp4"], RAW)),
        (PAPER, 120, "scaled", ComputePath(PACKED["mxfp8"], PACKED["mxfp4"], RAW)),
        (NVFP4, 90, "portable", ComputePath(DEQUANTIZED, DEQUANTIZED, E4M3_VALUES)),
        (NVFP4, 100, "scaled", ComputePath(PACKED["mxfp8"], PACKED["nvfp4"], E4M3_VALUES)),
        (MIXED, 90, "portable", ComputePath(RAW, DEQUANTIZED, RAW)),
        (MIXED, 103, "scaled", ComputePath(RAW, PACKED["mxfp4"], RAW)),
        (KEYS, 120, "portable", ComputePath(RAW, DEQUANTIZED, RAW)),
        (Recipe(low="bf16", high="bf16"), 90, "portable", ComputePath(RAW)),
        (Recipe(low="mxfp8", high="mxfp8"), 100, "scaled", ComputePath(PACKED["mxfp8"])),
        (Recipe(low="mxint8", high="mxint8"), 100, "portable", ComputePath(DEQUANTIZED)),
    ],
)
def test_each_recipe_has_the_expected_compute_path(recipe: Recipe, arch: int, name: str, expected: ComputePath) -> None:
    assert select_compute_path(recipe, arch) == expected
    assert expected.name == name


@pytest.mark.parametrize("arch", [100, 103, 110])
def test_large_head_dims_are_not_block_scaled_in_tensor_memory(arch: int) -> None:
    assert select_compute_path(PAPER, arch, 192) == ComputePath(DEQUANTIZED, E5M2, RAW)
    assert select_compute_path(NVFP4, arch, 192) == ComputePath(DEQUANTIZED, DEQUANTIZED, E4M3_VALUES)
    assert select_compute_path(NVFP4, 120, 192) == select_compute_path(NVFP4, arch)


@pytest.mark.parametrize("version", ["3.6.0", "3.8.0"])
def test_tensor_memory_needs_a_triton_that_compiles_block_scaled_products(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert select_compute_path(NVFP4, 100) == select_compute_path(NVFP4, 90)
    assert select_compute_path(NVFP4, 120) == ComputePath(PACKED["mxfp8"], PACKED["nvfp4"], E4M3_VALUES)


def test_an_unquantized_side_keeps_the_models_dtype() -> None:
    assert dequantized_dtype(torch.float16, "bf16", "nvfp4") == torch.float16
    assert dequantized_dtype(torch.float16, "mxfp8", "bf16") == torch.float16
    assert dequantized_dtype(torch.float16, "mxfp8", "nvfp4") == torch.bfloat16
