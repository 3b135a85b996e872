"""Plans of prefill calls on a GPU: compiled kernels launched with new addresses."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
from dma_kernels import Recipe, attention, saturated_values
from dma_kernels.prefill.plan import forget_plans
from dma_kernels.runtime.reports import kernel_reports
from dma_kernels.testing import random_qkv, relative_error
from prefill_cases import RECIPES
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.gpu

RECIPE = RECIPES["int8"]
Inputs = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    forget_plans()
    yield
    forget_plans()


def make(seed: int = 0, device: str = "cuda") -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    query, key, value = (
        torch.randn(2, heads, 300, 64, device=device, dtype=torch.bfloat16, generator=generator) for heads in (4, 2, 2)
    )
    return query, key, value


def compute(inputs: Inputs) -> Tensor:
    return attention(*inputs, RECIPE, backend="triton")


def expected(inputs: Inputs) -> Tensor:
    """Compute with Triton's own launch."""
    forget_plans()
    out = compute(inputs)
    forget_plans()
    return out


def warm_up(inputs: Inputs) -> None:
    compute(inputs)


def test_warm_calls_read_their_own_tensors() -> None:
    inputs = [make(seed) for seed in range(4)]
    outputs = [expected(each) for each in inputs]
    warm_up(inputs[0])
    results = [compute(each) for each in inputs]  # all alive at once
    for result, output in zip(results, outputs, strict=True):
        assert torch.equal(result, output)


def test_a_warm_call_reports_its_kernel() -> None:
    reports: list[list[str]] = []
    for _ in range(3):
        reports.append([])
        with kernel_reports(reports[-1].append):
            compute(make())
    assert len(reports[0]) == 1
    assert reports[1:] == reports[:1] * 2


def test_keys_and_values_may_be_one_tensor() -> None:
    query, key, value = make()
    warm_up((query, key, value))
    assert torch.equal(compute((query, key, key)), expected((query, key, key)))


def test_other_strides_give_the_same_result() -> None:
    query, key, value = make()
    warm_up((query, key, value))
    transposed = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(compute((transposed, key, value)), compute((query, key, value)))


def test_short_calls_of_other_lengths_launch_with_their_own_numbers() -> None:
    """The plan of the first call has neither the number of keys nor strides."""
    for kv_len in (300, 304, 317, 1000):
        inputs = random_qkv(
            batch=2, q_heads=4, kv_heads=2, q_len=2, kv_len=kv_len, head_dim=64, dtype=torch.bfloat16, device="cuda"
        )
        mask = torch.rand(2, 1, 1, kv_len, device="cuda") < 0.7
        for options in ({"window": 250}, {"mask": mask}):
            out = attention(*inputs, RECIPE, backend="triton", **options)
            assert relative_error(out, attention(*inputs, RECIPE, backend="reference", **options)) < 1e-2


def test_strided_sinks_are_copied_in_every_call() -> None:
    """Each call reads its own sinks."""
    inputs = make()
    for seed in range(4):
        sinks = torch.randn(4, 2, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))[:, 0]
        expected_out = attention(*inputs, RECIPE, sinks=sinks.contiguous(), backend="triton")
        assert torch.equal(attention(*inputs, RECIPE, sinks=sinks, backend="triton"), expected_out)


def test_warm_calls_run_on_streams_and_in_cuda_graphs() -> None:
    inputs, other = make(0), make(1)
    outputs = expected(inputs), expected(other)
    warm_up(inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = compute(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, outputs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute(inputs)
    for old, new in zip(inputs, other, strict=True):
        old.copy_(new)
    graph.replay()
    assert torch.equal(out, outputs[1])


def test_warm_calls_run_in_threads() -> None:
    inputs = [make(seed) for seed in range(8)]
    outputs = [expected(each) for each in inputs]
    torch.cuda.synchronize()

    def work(index: int) -> bool:
        return all(torch.equal(compute(inputs[index]), outputs[index]) for _ in range(30))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_hooks_and_profilers_see_every_launch() -> None:
    inputs, names = make(), []
    warm_up(inputs)
    previous = triton.knobs.runtime.launch_enter_hook
    triton.knobs.runtime.launch_enter_hook = lambda metadata: names.append(metadata.get()["name"])
    try:
        compute(inputs)
    finally:
        triton.knobs.runtime.launch_enter_hook = previous
    assert names[-1] == "prefill_kernel"
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        compute(inputs)
        torch.cuda.synchronize()
    seen = [event.name for event in profiler.events()]
    assert set(names) <= set(seen)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_the_device_of_the_tensors_is_used() -> None:
    inputs = make(device="cuda:1")
    outputs = expected(inputs)
    warm_up(inputs)
    assert torch.cuda.current_device() == 0
    assert torch.equal(compute(inputs), outputs)


@pytest.mark.filterwarnings("ignore:pv='fp8' clipped")
def test_saturated_values_are_counted_on_the_device_in_warm_calls_too() -> None:
    query, key, value = random_qkv(q_len=600, kv_len=600, head_dim=128, dtype=torch.bfloat16, device="cuda")
    value[0, 0, 200:203, 5] = 1e4
    recipe = Recipe(pv="fp8", low="mxint8", shared_scale="tile")
    for _ in range(3):
        before = saturated_values()
        attention(query, key, value, recipe)
        torch.cuda.synchronize()
        assert saturated_values() == before + 3
