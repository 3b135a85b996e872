"""Recorded calls, without a GPU: what is repeated, with which addresses, and what is not recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from dma_kernels.runtime import launch, replay
from dma_kernels.runtime.launch import Launcher, matrix_descriptor
from dma_kernels.runtime.replay import Call
from torch import Tensor
from triton.runtime import JITFunction

SIZE = 64


def _scale(x_ptr, x_desc, y_ptr, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Only its signature counts: :class:`Compiled` computes."""


def _read(pointer: int) -> np.ndarray:
    """Return a vector in memory, not as a tensor: what a kernel computes is no operation of PyTorch."""
    return np.ctypeslib.as_array((ctypes.c_float * SIZE).from_address(pointer))


def _pointer(argument: Any) -> int:
    return argument if isinstance(argument, int) else argument.data_ptr()


class Compiled:
    """Stands for a compiled kernel that multiplies two vectors and a number."""

    function = 1
    packed_metadata = ()

    def __init__(self) -> None:
        self.launches = 0

    def run(self, *arguments: Any) -> None:
        x, descriptor, y, factor, block = arguments[9:]
        assert block == SIZE
        assert (descriptor.shape, descriptor.strides, descriptor.padding) == ([2, 32], [32, 1], "zero")
        self.launches += 1
        _read(_pointer(y))[:] = factor * _read(_pointer(x)) * _read(descriptor.base.data_ptr())


class Device:
    """A kernel on a device that is the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel = JITFunction(_scale)
        self.launcher = Launcher(self.kernel, {"BLOCK": SIZE})
        self.compiled = Compiled()
        self.compilations = 0
        self.device = torch.device("cpu")
        monkeypatch.setattr(JITFunction, "run", self._run)
        monkeypatch.setattr(launch, "CompiledKernel", Compiled)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        for module in (launch, replay):
            monkeypatch.setattr(module, "current_stream", lambda: 0)

    def _run(self, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Compiled:
        self.compilations += 1
        self.compiled.run(*[None] * 9, *arguments, constants["BLOCK"])
        return self.compiled

    def multiply(self, x: Tensor, y: Tensor, factor: float = 1.0) -> tuple[Tensor, ...]:
        """Return ``x * y * y * factor``: two launches, with a tensor between them."""
        between, out = torch.empty_like(x), x.new_empty(SIZE)
        described = matrix_descriptor(y.view(2, 32), 2, 32)
        self.launcher((1, 1, 1), x, described, between, 1.0)
        self.launcher((1, 1, 1), between, described, out, factor)
        return (out,)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def check(call: Call, function: Callable[[Tensor, Tensor], tuple[Tensor, ...]], times: int = 1) -> None:
    """Run a call with new tensors each time."""
    for _ in range(times):
        x, y = torch.randn(2, SIZE).unbind()
        (out,) = call.run((x, None, y), lambda x=x, y=y: function(x, y))  # type: ignore[misc]
        assert torch.equal(out, x * y * y)


def test_the_third_run_repeats_the_launches_of_the_second(device: Device) -> None:
    call, runs = Call(), []

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        runs.append(1)
        return device.multiply(x, y)

    check(call, function, 5)
    assert len(runs) == 2
    assert device.compiled.launches == 10


def test_results_and_intermediate_tensors_are_new_each_time(device: Device) -> None:
    call = Call()
    check(call, device.multiply, 2)
    inputs = [tuple(torch.randn(2, SIZE).unbind()) for _ in range(3)]
    results = [call.repeat((x, None, y)) for x, y in inputs]
    for result, (x, y) in zip(results, inputs, strict=True):
        assert result is not None
        assert torch.equal(result[0], x * y * y)


def test_nothing_is_repeated_before_it_has_been_recorded(device: Device) -> None:
    call = Call()
    x, y = torch.randn(2, SIZE).unbind()
    assert call.repeat((x, None, y)) is None
    check(call, device.multiply)
    assert call.repeat((x, None, y)) is None
    check(call, device.multiply)
    assert call.repeat((x, None, y)) is not None


def test_zeros_are_zeros_each_time(device: Device) -> None:
    call = Call()

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        zeros, out = torch.zeros(SIZE), torch.empty(SIZE)
        device.launcher((1, 1, 1), zeros, matrix_descriptor(y.view(2, 32), 2, 32), out, 1.0)
        device.launcher((1, 1, 1), x, matrix_descriptor(y.view(2, 32), 2, 32), zeros, 1.0)
        return (out,)

    for _ in range(4):
        x, y = torch.randn(2, SIZE).unbind()
        (out,) = call.run((x, None, y), lambda x=x, y=y: function(x, y))  # type: ignore[misc]
        assert out.count_nonzero() == 0
    assert call.repeat((x, None, y)) is not None


@pytest.mark.parametrize("kind", ["zeros", "slice", "twice"])
def test_a_result_that_could_not_be_made_again_is_not_recorded(kind: str, device: Device) -> None:
    call = Call()

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        out = torch.zeros(SIZE) if kind == "zeros" else torch.empty(2 * SIZE)
        between = out[: 1 if kind == "slice" else SIZE]
        device.launcher((1, 1, 1), x, matrix_descriptor(y.view(2, 32), 2, 32), between, 1.0)
        return (between, between) if kind == "twice" else (between,)

    for _ in range(2):
        x, y = torch.randn(2, SIZE).unbind()
        out = call.run((x, None, y), lambda x=x, y=y: function(x, y))[0]  # type: ignore[misc]
        assert torch.equal(out, (x * y)[: len(out)])
    assert call._replay is None


def test_a_call_that_computes_in_torch_is_not_recorded(device: Device) -> None:
    call = Call()
    check(call, lambda x, y: device.multiply(x * 1.0, y), 3)
    assert call.repeat((torch.ones(SIZE), None, torch.ones(SIZE))) is None


def test_a_call_that_writes_into_its_inputs_in_torch_is_not_recorded(device: Device) -> None:
    call = Call()
    counter = torch.zeros(1)

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        counter.add_(1)
        return device.multiply(x, y)

    check(call, function, 4)
    assert counter.item() == 4


def test_a_tensor_of_unknown_origin_is_not_recorded(device: Device) -> None:
    hidden = torch.ones(SIZE)
    call = Call()
    for _ in range(4):
        x = torch.randn(SIZE)
        (out,) = call.run((x,), lambda x=x: device.multiply(x, hidden))  # type: ignore[misc]
        assert torch.equal(out, x)
    assert call.repeat((x,)) is None


def test_an_argument_that_may_hide_a_tensor_is_not_recorded(device: Device) -> None:
    x = torch.ones(SIZE)
    recorded = replay._without_addresses(device.kernel, device.compiled, (1, 1, 1), (x, [x]), {x.data_ptr(): 0})
    assert recorded is None


def test_inputs_at_one_address_are_not_recorded(device: Device) -> None:
    call = Call()
    for _ in range(3):
        x = torch.randn(SIZE)
        call.run((x, None, x), lambda x=x: device.multiply(x, x))  # type: ignore[misc]
    check(call, device.multiply)  # would take one for the other


def test_another_alignment_is_not_repeated(device: Device) -> None:
    call = Call()
    check(call, device.multiply, 2)
    x, y = torch.randn(SIZE + 1)[1:], torch.randn(SIZE)
    assert call.repeat((x, None, y)) is None


def test_another_setting_of_triton_is_not_repeated(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call()
    check(call, device.multiply, 3)
    compilations = device.compilations
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    check(call, device.multiply)
    assert device.compilations > compilations


def test_hooks_before_the_launch_see_it(device: Device) -> None:
    call = Call()
    check(call, device.multiply, 3)
    compilations = device.compilations
    device.kernel.add_pre_run_hook(lambda *arguments, **options: None)
    check(call, device.multiply)
    assert device.compilations == compilations + 2
