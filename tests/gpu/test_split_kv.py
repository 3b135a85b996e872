"""The split-KV kernels of short calls on a GPU: the interpreter's cases, long rows, CUDA graphs and torch.compile."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from dma_kernels import attention
from dma_kernels.prefill.split_kv_kernel import split_kv_kernel
from dma_kernels.runtime.reports import kernel_reports
from dma_kernels.testing import assert_bits_equal, random_qkv, relative_error
from prefill_cases import DTYPES, RECIPES, SHORT, Case, assert_matches_reference
from torch import Tensor

pytestmark = pytest.mark.gpu
BALANCED = RECIPES["balanced"]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*product(SHORT, ["bf16"]), *product(["one-query", "all", "head-dim-80-96"], ["fp16"])],
)
def test_a_short_call_matches_the_reference(case: str, dtype: str) -> None:
    assert_matches_reference(SHORT[case], BALANCED, DTYPES[dtype], "cuda")


@pytest.mark.parametrize("q_len", [1, 5, 63])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_long_rows_match_the_reference(head_dim: int, q_len: int) -> None:
    case = Case(
        q_len=q_len, kv_len=20_000, q_heads=8, kv_heads=2, batch=3, head_dim=head_dim,
        tensors={"q_offset": [19_000, 77, 12_345]},
    )  # fmt: skip
    assert_matches_reference(case, BALANCED, torch.bfloat16, "cuda")


def test_one_query_over_all_keys_runs_on_pytorchs_kernel() -> None:
    qkv = random_qkv(
        batch=2, q_heads=8, kv_heads=2, q_len=1, kv_len=5000, head_dim=128, dtype=torch.bfloat16, device="cuda"
    )
    names: list[str] = []
    with kernel_reports(names.append):
        out = attention(*qkv, BALANCED)
    assert names == ["sdpa"]
    exact = attention(*(x.double() for x in qkv), BALANCED, backend="reference")
    assert relative_error(out, exact) < 1e-2


def static_cache(slots: int) -> tuple[Tensor, Tensor, Tensor]:
    return random_qkv(q_heads=32, kv_heads=8, q_len=1, kv_len=slots, head_dim=128, dtype=torch.bfloat16, device="cuda")


def test_a_cuda_graph_of_a_step_is_replayed_while_a_static_cache_fills() -> None:
    query, key, value = static_cache(3000)
    offset = torch.tensor(0, device="cuda")

    def step() -> Tensor:
        return attention(query, key, value, BALANCED, q_offset=offset)

    for _ in range(2):  # compiles, then launches directly
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for position in (0, 1, 63, 64, 127, 1000, 2999):
        offset.fill_(position)
        graph.replay()
        assert_bits_equal(out, step())
        exact = attention(*(x.double() for x in (query, key, value)), BALANCED, q_offset=position, backend="reference")
        assert relative_error(out, exact) < 1e-2


def test_a_compiled_step_over_a_static_cache_equals_the_eager_one() -> None:
    query, key, value = static_cache(1500)

    def step(offset: Tensor) -> Tensor:
        return attention(query, key, value, BALANCED, q_offset=offset)

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for position in (0, 700, 701, 1499):
        offset = torch.tensor(position, device="cuda")
        assert_bits_equal(compiled(offset), step(offset))


def test_nothing_waits_for_the_device() -> None:
    query, key, value = static_cache(1500)
    tensors: dict[str, Any] = {
        "q_offset": torch.tensor([700], device="cuda"),
        "kv_offset": torch.tensor([-9], device="cuda"),
        "kv_range": torch.tensor([[9, 1400]], device="cuda"),
    }
    attention(query, key, value, BALANCED, **tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(query, key, value, BALANCED, **tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_other_lengths_do_not_recompile() -> None:
    def run(length: int) -> None:
        qkv = random_qkv(q_heads=4, q_len=2, kv_len=length, head_dim=64, dtype=torch.bfloat16, device="cuda")
        attention(*qkv, BALANCED, backend="triton")

    def compiled() -> int:
        return sum(len(cache[0]) for cache in split_kv_kernel.device_caches.values())

    run(300)
    before = compiled()
    for length in (3, 301, 512, 777, 2049, 20_000):
        run(length)
    assert compiled() == before


def test_keys_and_values_may_have_more_than_2_31_elements() -> None:
    heads, kv_len = 34, 524_288
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, length, 128, dtype=torch.bfloat16, device="cuda", generator=generator)
        for length in (1, kv_len, kv_len)
    )
    out = attention(query, key, value, BALANCED, backend="triton")
    exact = torch.cat([
        torch.nn.functional.scaled_dot_product_attention(*(x[:, h : h + 1].float() for x in (query, key, value)))
        for h in (0, heads - 1)
    ], 1)  # fmt: skip
    assert relative_error(out[:, [0, heads - 1]], exact) < 2e-2
