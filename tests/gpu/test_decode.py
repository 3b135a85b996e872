"""The decode and append kernels on a GPU: the interpreter's cases, long rows, and CUDA graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cuda_calls import capture, compiled_count
from decode_cases import (
    CASES,
    DTYPES,
    STORED_FORMATS,
    Case,
    assert_decode_matches,
    assert_small_value_channels_are_exact,
    assert_steps_match,
    assert_storages_equal,
)
from dma_kernels.cache.append import append_tokens
from dma_kernels.cache.decode import decode_attention, decode_step
from dma_kernels.cache.decode_kernel import decode_kernel
from dma_kernels.cache.reference import CacheOptions
from dma_kernels.cache.storage import LayerStorage

pytestmark = pytest.mark.gpu

LONG = Case(kv_len=5000, q_heads=32, kv_heads=8, head_dim=128, padding=(0, 77))
ALL_CASES = CASES | {"long": LONG, "long-of-16": replace(LONG, q_len=16)}

formats = pytest.mark.parametrize("format", STORED_FORMATS)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@formats
@pytest.mark.parametrize("case", ALL_CASES)
def test_matches_the_reference(case: str, format: str, dtype: torch.dtype) -> None:
    assert_decode_matches(ALL_CASES[case], format, dtype, "cuda")


@formats
@pytest.mark.parametrize("case", ALL_CASES)
def test_steps_match_the_reference(case: str, format: str) -> None:
    assert_steps_match(ALL_CASES[case], format, torch.bfloat16, "cuda")


@pytest.mark.parametrize("q_len", [1, 5])
def test_value_channels_next_to_larger_ones_are_exact(q_len: int) -> None:
    assert_small_value_channels_are_exact(1e5, q_len, torch.bfloat16, "cuda")


@formats
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 96), (256, 256)], ids=str)
def test_appended_bits_equal_torch(format: str, dims: tuple[int, int]) -> None:
    case = Case(kv_len=1500, head_dim=dims[0], value_dim=dims[1], padding=(0, 77))
    _, key, value = case.inputs(torch.bfloat16, "cuda")
    ours, expected = (case.storage(format, torch.bfloat16, "cuda", is_filled=False) for _ in range(2))
    start = 0
    for step in (100, 20, 30, 300, 1, 1046, 3):
        new = slice(start, start + step)
        append_tokens(ours, key[:, :, new], value[:, :, new])
        expected.append(key[:, :, new], value[:, :, new])
        start += step
    assert_storages_equal(ours, expected)


@formats
def test_a_cuda_graph_of_a_step_fills_the_cache(format: str) -> None:
    case = Case(kv_len=700, q_heads=8, kv_heads=2, head_dim=128)
    query, key, value = case.inputs(torch.bfloat16, "cuda")
    ours, expected = (case.storage(format, torch.bfloat16, "cuda", is_filled=False) for _ in range(2))
    for storage in (ours, expected):
        append_tokens(storage, key[:, :, :500], value[:, :, :500])
    steps = [(key[:, :, i : i + 1].contiguous(), value[:, :, i : i + 1].contiguous()) for i in range(500, 650)]
    outputs = [decode_step(query, *step, expected, CacheOptions(0.1)) for step in steps]
    static = tuple(x.clone() for x in steps[0])
    decode_step(query, *static, ours, CacheOptions(0.1))  # compiles
    ours.lengths -= 1
    graph, out = capture(lambda: decode_step(query, *static, ours, CacheOptions(0.1)))
    for step, expected_out in zip(steps, outputs, strict=True):
        for old, new in zip(static, step, strict=True):
            old.copy_(new)
        graph.replay()
        assert torch.equal(out, expected_out)
    assert_storages_equal(ours, expected)


def test_other_lengths_do_not_recompile() -> None:
    def run(length: int) -> None:
        case = Case(kv_len=length, head_dim=128)
        storage = LayerStorage.allocate(
            "int8", batch=1, kv_heads=2, head_dim=128, value_dim=128, dtype=torch.bfloat16,
            device=torch.device("cuda"), tiles=20,
        )  # fmt: skip
        query, key, value = case.inputs(torch.bfloat16, "cuda")
        append_tokens(storage, key, value)
        decode_attention(query, storage, CacheOptions(0.1))

    run(300)
    before = compiled_count(decode_kernel)
    for length in (1, 301, 512, 777, 2049):
        run(length)
    assert compiled_count(decode_kernel) == before


OVERFLOW = """
import torch
from decode_cases import Case
from dma_kernels.cache.decode import decode_step
from dma_kernels.cache.reference import CacheOptions

case = Case(kv_len=385)
query, key, value = case.inputs(torch.bfloat16, "cuda")
storage = case.storage("int8", torch.bfloat16, "cuda", is_filled=False)
storage.page_table = storage.page_table[:, :2].contiguous()
storage.append(key[:, :, :380], value[:, :, :380])
step = query, key[:, :, -1:], value[:, :, -1:], storage, CacheOptions(0.125)
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    decode_step(*step)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    decode_step(*step)
for _ in range(2):
    graph.replay()
torch.cuda.synchronize()
print("383 tokens are stored")
graph.replay()
torch.cuda.synchronize()
print("the assertion did not fail")
"""


def test_a_replay_without_room_fails_an_assertion_on_the_device() -> None:
    """In a process of its own, whose CUDA context it breaks. Tile 2 is complete with token 384, and has no page."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", OVERFLOW], capture_output=True, text=True, env=environment)
    assert done.stdout == "383 tokens are stored\n"
    assert "the cache has no page for a complete tile; reserve more tiles" in done.stderr + done.stdout
    assert "device-side assert" in done.stderr
