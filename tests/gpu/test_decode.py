"""The decode and append kernels on a GPU: the interpreter's cases, and CUDA graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
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


@pytest.mark.parametrize(
    ("case", "format", "dtype"),
    [
        *product(CASES, ["int4"], ["bf16"]),  # the others in the next test
        *product(["one-query", "head-dim-80-96"], STORED_FORMATS, ["fp16"]),
    ],
)
def test_matches_the_reference(case: str, format: str, dtype: str) -> None:
    assert_decode_matches(CASES[case], format, DTYPES[dtype], "cuda")


@pytest.mark.parametrize("format", STORED_FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_steps_match_the_reference(case: str, format: str) -> None:
    assert_steps_match(CASES[case], format, torch.bfloat16, "cuda")


@pytest.mark.parametrize("ratio", [1e3, 1e5])
@pytest.mark.parametrize("q_len", [1, 5])
def test_value_channels_next_to_larger_ones_are_exact(q_len: int, ratio: float) -> None:
    assert_small_value_channels_are_exact(ratio, q_len, torch.bfloat16, "cuda")


@pytest.mark.parametrize("format", STORED_FORMATS)
@pytest.mark.parametrize("queries", [1, 16])
def test_long_steps_match_the_reference(queries: int, format: str) -> None:
    assert_steps_match(replace(LONG, q_len=queries), format, torch.bfloat16, "cuda")


@pytest.mark.parametrize("format", STORED_FORMATS)
def test_long_rows_match_the_reference(format: str) -> None:
    assert_decode_matches(LONG, format, torch.bfloat16, "cuda")


@pytest.mark.parametrize("format", STORED_FORMATS)
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


def _steps(storage: LayerStorage, case: Case, start: int, count: int) -> Iterator[tuple[torch.Tensor, ...]]:
    query, key, value = case.inputs(torch.bfloat16, "cuda")
    for position in range(start, start + count):
        new = slice(position, position + 1)
        yield query, key[:, :, new].contiguous(), value[:, :, new].contiguous()


@pytest.mark.parametrize("format", STORED_FORMATS)
def test_a_cuda_graph_of_a_step_fills_the_cache(format: str) -> None:
    case = Case(kv_len=700, q_heads=8, kv_heads=2, head_dim=128)
    _, key, value = case.inputs(torch.bfloat16, "cuda")

    def storage() -> LayerStorage:
        made = case.storage(format, torch.bfloat16, "cuda", is_filled=False)
        append_tokens(made, key[:, :, :500], value[:, :, :500])
        return made

    expected = storage()
    outputs = []
    for inputs in _steps(expected, case, 500, 150):
        outputs.append(decode_step(*inputs, expected, CacheOptions(0.1)))
    ours = storage()
    static = next(_steps(ours, case, 500, 1))
    lengths = ours.lengths.clone()
    decode_step(*static, ours, CacheOptions(0.1))  # compiles
    ours.lengths.copy_(lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_step(*static, ours, CacheOptions(0.1))
    for inputs, expected_out in zip(_steps(ours, case, 500, 150), outputs, strict=True):
        for old, new in zip(static, inputs, strict=True):
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

    def compiled() -> int:
        return sum(len(cache[0]) for cache in decode_kernel.device_caches.values())

    run(300)
    before = compiled()
    for length in (1, 301, 512, 777, 2049):
        run(length)
    assert compiled() == before


def test_every_output_is_written() -> None:
    case = Case(kv_len=1000, head_dim=128, q_len=5)
    storage = case.storage("int8", torch.bfloat16, "cuda")
    query, _, _ = case.inputs(torch.bfloat16, "cuda")
    poison = torch.full((64, 1024, 1024), float("nan"), device="cuda")
    del poison  # the allocator reuses this memory for the outputs
    out, lse = decode_attention(query, storage, CacheOptions(0.1))
    assert out.isfinite().all()
    assert lse.isfinite().all()


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
