"""Which form keys and values take on which chip."""

from __future__ import annotations

import pytest
import torch
from dma_kernels import Recipe
from dma_kernels.runtime.lowering import Form, Lowering, dequantized_dtype, select_lowering

RAW, DEQUANTIZED, INT8, E4M3, E5M2, PACKED = Form
BALANCED = Recipe(low="mxint8", shared_scale="tile", smooth_k=True, pv="fp8")
MXFP8 = Recipe(low="mxfp8", shared_scale="tile", pv="fp8")
PAPER = Recipe(low="mxfp4", high="mxfp8", scale_rounding="floor", sink_tiles=0)
NVFP4 = Recipe(low="nvfp4", high="mxfp8", smooth_k=True, rotate=True, pv="fp8")
MIXED = Recipe(low_q="mxfp8", low_k="mxfp4")
KEYS = Recipe(low_q="bf16", low_k="nvfp4")


@pytest.mark.parametrize(
    ("recipe", "arch", "expected"),
    [
        (BALANCED, 80, Lowering("8bit", RAW, INT8, DEQUANTIZED)),
        (BALANCED, 89, Lowering("8bit", RAW, INT8, E4M3)),
        (BALANCED, 90, Lowering("8bit", RAW, INT8, E4M3)),
        (BALANCED, 100, Lowering("8bit", RAW, INT8, E4M3)),
        (MXFP8, 80, Lowering("portable", RAW, DEQUANTIZED, DEQUANTIZED)),
        (MXFP8, 90, Lowering("8bit", RAW, E4M3, E4M3)),
        (PAPER, 80, Lowering("portable", DEQUANTIZED, DEQUANTIZED, RAW)),
        (PAPER, 89, Lowering("8bit", DEQUANTIZED, E5M2, RAW)),
        (PAPER, 90, Lowering("8bit", DEQUANTIZED, E5M2, RAW)),
        (PAPER, 100, Lowering("scaled", PACKED, PACKED, RAW)),
        (PAPER, 120, Lowering("scaled", PACKED, PACKED, RAW)),
        (NVFP4, 90, Lowering("portable", DEQUANTIZED, DEQUANTIZED, E4M3)),
        (NVFP4, 100, Lowering("scaled", PACKED, PACKED, E4M3)),
        (MIXED, 90, Lowering("portable", RAW, DEQUANTIZED, RAW)),
        (MIXED, 103, Lowering("scaled", RAW, PACKED, RAW)),
        (KEYS, 120, Lowering("portable", RAW, DEQUANTIZED, RAW)),
        (Recipe(low="bf16", high="bf16"), 90, Lowering("portable", RAW, None, None)),
        (Recipe(low="mxfp8", high="mxfp8"), 100, Lowering("scaled", PACKED, None, None)),
        (Recipe(low="mxint8", high="mxint8"), 100, Lowering("portable", DEQUANTIZED, None, None)),
    ],
)
def test_lowering_of_a_recipe(recipe: Recipe, arch: int, expected: Lowering) -> None:
    assert select_lowering(recipe, arch) == expected


@pytest.mark.parametrize("arch", [100, 103, 110])
def test_wide_heads_are_not_block_scaled_in_tensor_memory(arch: int) -> None:
    assert select_lowering(PAPER, arch, 192) == Lowering("8bit", DEQUANTIZED, E5M2, RAW)
    assert select_lowering(NVFP4, arch, 192) == Lowering("portable", DEQUANTIZED, DEQUANTIZED, E4M3)
    assert select_lowering(NVFP4, 120, 192) == select_lowering(NVFP4, arch)


def test_a_side_that_is_not_quantised_keeps_the_models_dtype() -> None:
    assert dequantized_dtype(torch.float16, "bf16", "nvfp4") == torch.float16
    assert dequantized_dtype(torch.float16, "mxfp8", "bf16") == torch.float16
    assert dequantized_dtype(torch.float16, "mxfp8", "nvfp4") == torch.bfloat16
