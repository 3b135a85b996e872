"""The launcher on a device: streams, graphs, threads, hooks and several devices."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from dma_kernels.runtime.launch import Launcher, matrix_descriptor

pytestmark = pytest.mark.gpu

SIZE = 4096


@triton.jit(do_not_specialize=["length"])
def _add_kernel(x_ptr, y_ptr, length, addend, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset, mask=offset < length, other=0.0)
    tl.store(y_ptr + offset, x + addend, mask=offset < length)


@triton.jit
def _copy_kernel(x_desc, y_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * ROWS
    offset = (i + tl.arange(0, ROWS))[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(y_ptr + offset, x_desc.load([i, 0]))


def add(launcher: Launcher, x: torch.Tensor, addend: float) -> torch.Tensor:
    y = torch.full_like(x, float("nan"))
    launcher((triton.cdiv(len(x), 256), 1, 1), x, y, len(x), addend)
    return y


@pytest.fixture
def launcher() -> Launcher:
    return Launcher(_add_kernel, {"BLOCK": 256}, num_warps=4)


@pytest.fixture
def named_launches() -> Iterator[list[str]]:
    """Names of the kernels that Triton's hook is told of, as a profiler is."""
    names: list[str] = []
    previous = triton.knobs.runtime.launch_enter_hook
    triton.knobs.runtime.launch_enter_hook = lambda metadata: names.append(metadata.get()["name"])
    yield names
    triton.knobs.runtime.launch_enter_hook = previous


def test_results_and_one_compilation(launcher: Launcher) -> None:
    for length in (1, 300, SIZE):
        x = torch.randn(length, device="cuda")
        for addend in (1.0, 2.0):
            assert torch.equal(add(launcher, x, addend), x + addend)
    assert len(launcher._compiled) == 1


def test_dtypes_and_alignment(launcher: Launcher) -> None:
    for x in (torch.randn(SIZE, device="cuda"), torch.randn(SIZE, device="cuda")[1:], torch.ones(SIZE).half().cuda()):
        assert torch.equal(add(launcher, x, 1.0), x + 1.0)
    assert len(launcher._compiled) == 3


def test_launches_go_to_the_current_stream_and_into_graphs(launcher: Launcher) -> None:
    x = torch.zeros(SIZE, device="cuda")
    add(launcher, x, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = add(launcher, add(launcher, x, 1.0), 2.0)
    x.fill_(5.0)
    graph.replay()
    assert torch.equal(y, torch.full_like(x, 8.0))


def test_threads(launcher: Launcher) -> None:
    x = torch.randn(SIZE, device="cuda")

    def work(addend: float) -> bool:
        return all(torch.equal(add(launcher, x, addend), x + addend) for _ in range(50))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, [float(i) for i in range(8)]))


def test_hooks_see_every_launch(launcher: Launcher, named_launches: list[Any]) -> None:
    x = torch.randn(SIZE, device="cuda")
    for _ in range(3):
        add(launcher, x, 1.0)
    assert named_launches == ["_add_kernel"] * 3


def test_descriptors() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs tensor copies by descriptor")
    launcher = Launcher(_copy_kernel, {"ROWS": 32, "COLUMNS": 64})
    for _ in range(2):
        x = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16)
        y = torch.zeros_like(x)
        launcher((4, 1, 1), matrix_descriptor(x, 32, 64), y)
        assert torch.equal(x, y)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_several_devices(launcher: Launcher) -> None:
    for _ in range(2):
        for index in range(2):
            with torch.cuda.device(index):
                x = torch.randn(SIZE, device=f"cuda:{index}")
                assert torch.equal(add(launcher, x, 1.0), x + 1.0)
