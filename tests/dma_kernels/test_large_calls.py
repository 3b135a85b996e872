"""Offsets beyond 32 bits and grids beyond CUDA's limits, without a GPU. ``tests/gpu`` uses large tensors.

Elements more than 2^31 apart are in sparse files, so only written pages take memory. Grids are inspected, not launched.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_cases import Case
from dma_kernels import Recipe, attention
from dma_kernels.cache.api import cached_attention, restore
from dma_kernels.numerics.call import AttentionCall
from dma_kernels.numerics.geometry import LOG2_E
from dma_kernels.numerics.layout import TensorLayout
from dma_kernels.prefill.hopper.quantize_q import quantize_q
from dma_kernels.prefill.operands import DEQUANTIZED, INT8, RAW
from dma_kernels.prefill.plan import plan
from dma_kernels.runtime import chip
from dma_kernels.runtime.plan import LaunchPlan
from dma_kernels.testing import random_qkv
from prefill_cases import RECIPES
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device")

LIMIT = 2**31
RECIPE = Recipe(low="nvfp4", smooth_k=True, pv="fp8", diagonal_tiles=0, sink_tiles=0)
"""Uses everything that a call computes: NVFP4's query and key scales, value scales and the mean key."""
DIMENSIONS = {
    "batch": {"batch": 3},
    "heads": {"q_heads": 3, "kv_heads": 3},
    "tokens": {"q_len": 3, "kv_len": 140},
    "channels": {"head_dim": 32},
}
"""Dimensions of more than two indices, so that the stride itself stays below 2^31."""


def spread(tensor: Tensor, dim: int, path: Path) -> Tensor:
    """Return the same numbers with the last index of ``dim`` at least 2^31 elements after the first.

    As many unused elements precede them, so that an offset that wraps around reads zeros.
    """
    stride = -(-LIMIT // (tensor.shape[dim] - 1))
    strides = list(torch.empty(tensor.shape[:dim] + tensor.shape[dim + 1 :], device="meta").stride())
    strides.insert(dim, stride)
    far = LIMIT + (tensor.shape[dim] - 1) * stride + tensor.numel()
    storage = torch.from_file(str(path), shared=True, size=far, dtype=tensor.dtype)
    return storage.as_strided(tensor.shape, strides, LIMIT).copy_(tensor)


@cache
def contiguous_call(dimension: str, has_mask: bool) -> tuple[dict[str, Any], Tensor]:
    """Return the tensors of a call, and its output."""
    sizes = {"q_len": 2, "kv_len": 140, "head_dim": 16} | DIMENSIONS[dimension]
    made = random_qkv(**({"q_heads": 1} | sizes), dtype=torch.float16)
    tensors: dict[str, Any] = dict(zip(("query", "key", "value"), made, strict=True))
    if has_mask:
        shape = (*tensors["query"].shape[:3], tensors["key"].shape[2])
        tensors["mask"] = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    return tensors, attention(**tensors, recipe=RECIPE, backend="triton")


@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize("name", ["query", "key", "value", "mask"])
def test_offsets_beyond_32_bits_give_the_results_of_contiguous_tensors(
    name: str, dimension: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        chip, "INTERPRETER", replace(chip.INTERPRETER, arch=80)
    )  # the kernel computes the address of every element
    tensors, expected = contiguous_call(dimension, name == "mask")
    far = spread(tensors[name], list(DIMENSIONS).index(dimension), tmp_path / name)
    assert torch.equal(attention(**(tensors | {name: far}), recipe=RECIPE, backend="triton"), expected)


STEP = Case(kv_len=512, q_len=3, q_heads=4, head_dim=32, padding=(0, 5))


def step_tensors() -> dict[str, Tensor]:
    query, key, value = STEP.inputs(torch.float16, "cpu")
    return {"query": query, "key": key[:, :, -3:], "value": value[:, :, -3:]}


def step(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Return the output of a step, and the keys and values that are stored after it."""
    _, key, value = STEP.inputs(torch.float16, "cpu")
    storage = STEP.storage("int8", torch.float16, "cpu", is_filled=False)
    storage.append(key[:, :, :-3], value[:, :, :-3])
    out = cached_attention(**tensors, storage=storage, backend="triton")
    return [out, *restore(storage, storage.lengths - 512, 512)]


@pytest.fixture(scope="module")
def contiguous_step() -> list[Tensor]:
    return step(step_tensors())


@pytest.mark.parametrize(
    ("name", "dimension"),
    [*product(["key"], DIMENSIONS), ("query", "tokens"), ("query", "heads"), ("value", "tokens")],
)
def test_a_step_with_offsets_beyond_32_bits_equals_that_of_contiguous_tensors(
    name: str, dimension: str, tmp_path: Path, contiguous_step: list[Tensor]
) -> None:
    """A step over quantized, residual and sink KV, whose new keys complete a tile."""
    tensors = step_tensors()
    tensors[name] = spread(tensors[name], list(DIMENSIONS).index(dimension), tmp_path / name)
    for actual, expected in zip(step(tensors), contiguous_step, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("sizes", [{"batch": 9_000, "heads": 8}, {"heads": 70_000}, {"q_len": 5_000_000}], ids=str)
@pytest.mark.parametrize("recipe", ["int8", "nvfp4", "nvfp4-keys"])
def test_grids_are_within_the_limits_of_cuda(recipe: str, sizes: dict[str, int]) -> None:
    batch, heads, q_len = ({"batch": 1, "heads": 1, "q_len": 5} | sizes).values()
    query = torch.empty(1, dtype=torch.float16).expand(batch, heads, q_len, 32)
    key = query[:, :, :5].expand(batch, heads, 5, 32)
    named: dict[str, Any] = dict.fromkeys(("scale", "kv_range", "window", "softcap", "sinks", "mask", "tile_counts"))
    call = AttentionCall(
        query, key, key, replace(RECIPES[recipe], sink_tiles=0), is_causal=True, q_offset=400, kv_offset=0,
        backend="triton", **named,
    )  # fmt: skip
    launches = plan(call.layouts()).launches
    low_key = INT8 if recipe == "int8" else DEQUANTIZED

    def quantize(query: Any) -> list[Any]:
        return [quantize_q(query, None, None, RECIPES[recipe], low_key, RAW, logit_scale=LOG2_E, use_pdl=False).low]

    queries = LaunchPlan(quantize, [TensorLayout.of(query)], query.device)
    grids = [each.grid for each in (*launches.launches, *queries.launches)]
    assert len(grids) >= 3
    for first, *others in grids:
        assert first < LIMIT
        assert max(others) <= 65_535
