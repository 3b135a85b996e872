"""Kernels that start before the one before them has ended (programmatic dependent launch)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from dma_kernels import attention_with_lse
from dma_kernels.prefill import backend
from dma_kernels.runtime import replay
from dma_kernels.testing import random_qkv
from prefill_cases import RECIPES
from quantized_operands import HOPPER, check
from quantized_operands import RECIPES as QUANTIZED
from torch import Tensor

pytestmark = pytest.mark.gpu

Results = list[tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    yield
    replay.call_of.cache_clear()


def choose(monkeypatch: pytest.MonkeyPatch, *, starts_early: bool) -> None:
    """Have kernels of calls of any length start early, or none."""
    monkeypatch.setattr(backend, "starts_early", lambda arch, kv_len: starts_early)
    replay.call_of.cache_clear()


def assert_equal(results: Results, expected: Results) -> None:
    for got, wanted in zip(results, expected, strict=True):
        for ours, theirs in zip(got, wanted, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_the_quantiser_equals_the_specification(recipe: str) -> None:
    _, key, value = random_qkv(
        q_len=1, batch=2, kv_heads=3, kv_len=1000, head_dim=128, dtype=torch.bfloat16, device="cuda"
    )
    poison = torch.full((1 << 24,), float("nan"), device="cuda")
    del poison  # the allocator hands this memory to the outputs
    check(key, value, QUANTIZED[recipe], HOPPER, use_pdl=True)


@pytest.mark.parametrize("length", [200, 1000, 2048, 4000])
@pytest.mark.parametrize("recipe", ["int8", "fp4", "nvfp4-keys", "e4m3-rotated"])
def test_layers_in_a_row_are_equal_to_the_bit(recipe: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"q_heads": 8, "kv_heads": 2, "q_len": length, "kv_len": length, "head_dim": 128}
    layers = [random_qkv(**sizes, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in range(4)]

    def run() -> Results:
        return [attention_with_lse(*layer, RECIPES[recipe], backend="triton") for layer in layers]

    choose(monkeypatch, starts_early=False)
    expected = run()
    choose(monkeypatch, starts_early=True)
    for _ in range(5):  # the third is a recording's
        assert_equal(run(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        for out, lse in captured:
            out.zero_()
            lse.zero_()
        graph.replay()
        assert_equal(captured, expected)
