"""The split-KV kernels of short calls on a GPU: the interpreter's cases, long rows, and CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import capture, compiled_count, no_synchronization
from dma_kernels import attention
from dma_kernels.prefill.split_kv_kernel import split_kv_kernel
from dma_kernels.testing import assert_bits_equal, random_qkv, relative_error
from prefill_cases import RECIPES, SHORT, Case, assert_matches_reference
from torch import Tensor

pytestmark = pytest.mark.gpu
BALANCED = RECIPES["balanced"]
LONG_ROWS = {
    f"{q_len}-queries-of-{head_dim}-channels": Case(
        q_len=q_len, kv_len=20_000, q_heads=8, kv_heads=2, batch=3, head_dim=head_dim,
        tensors={"q_offset": [19_000, 77, 12_345]},
    )
    for q_len in (1, 5, 63) for head_dim in (64, 96, 128, 256)
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", [*SHORT, *LONG_ROWS])
def test_a_short_call_matches_the_reference(case: str, dtype: torch.dtype) -> None:
    assert_matches_reference((SHORT | LONG_ROWS)[case], BALANCED, dtype, "cuda")


def static_cache(slots: int) -> tuple[Tensor, Tensor, Tensor]:
    return random_qkv(q_heads=32, kv_heads=8, q_len=1, kv_len=slots, head_dim=128, dtype=torch.bfloat16, device="cuda")


def test_a_cuda_graph_of_a_step_is_replayed_while_a_static_cache_fills() -> None:
    query, key, value = static_cache(3000)
    offset = torch.tensor(0, device="cuda")

    def step() -> Tensor:
        return attention(query, key, value, BALANCED, q_offset=offset)

    for _ in range(2):  # compiles, then launches directly
        step()
    graph, out = capture(step)
    for position in (0, 1, 63, 64, 127, 1000, 2999):
        offset.fill_(position)
        graph.replay()
        assert_bits_equal(out, step())
        exact = attention(*(x.double() for x in (query, key, value)), BALANCED, q_offset=position, backend="reference")
        assert relative_error(out, exact) < 1e-2


def test_nothing_waits_for_the_device() -> None:
    query, key, value = static_cache(1500)
    tensors: dict[str, Any] = {
        "q_offset": torch.tensor([700], device="cuda"),
        "kv_offset": torch.tensor([-9], device="cuda"),
        "kv_range": torch.tensor([[9, 1400]], device="cuda"),
    }
    attention(query, key, value, BALANCED, **tensors)
    with no_synchronization():
        attention(query, key, value, BALANCED, **tensors)


def test_other_lengths_do_not_recompile() -> None:
    def run(length: int) -> None:
        qkv = random_qkv(q_heads=4, q_len=2, kv_len=length, head_dim=64, dtype=torch.bfloat16, device="cuda")
        attention(*qkv, BALANCED, backend="triton")

    run(300)
    before = compiled_count(split_kv_kernel)
    for length in (3, 301, 512, 777, 2049, 20_000):
        run(length)
    assert compiled_count(split_kv_kernel) == before
