"""Launch plans without a GPU: launched kernels and addresses, and when Triton's own launch is used."""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from dma_kernels.numerics.layout import TensorLayout, layout_of, matrix_blocks
from dma_kernels.runtime import launch
from dma_kernels.runtime import plan as planning
from dma_kernels.runtime.chip import triton_version
from dma_kernels.runtime.launch import launch_kernel
from dma_kernels.runtime.plan import NUMBER, LaunchPlan, PlannedTensor
from torch import Tensor
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

SIZE = 64
CPU = torch.device("cpu")


def _scale(x_ptr, x_desc, y_ptr, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Only its signature matters; :class:`Compiled` computes."""


def describe(x: Any) -> TensorDescriptor:
    """Describe a vector as a matrix of two rows."""
    matrix = x.as_strided((2, 32), (32, 1))
    return TensorDescriptor(matrix, *matrix_blocks(matrix, 2, 32))


def _read(pointer: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * SIZE).from_address(pointer))


def _pointer(argument: Any) -> int:
    return argument if isinstance(argument, int) else argument.data_ptr()


class Compiled:
    """Fake compiled kernel that multiplies two vectors and a number."""

    function, packed_metadata = 0, (4, 1, 0)

    def __init__(self) -> None:
        self.launches: list[tuple[int, ...]] = []
        self.run = SimpleNamespace(
            launch=self._launch, launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0,
            profile_scratch_size=0, arg_annotations=[], kernel_signature=b"",
        )  # fmt: skip

    def _launch(self, *arguments: Any) -> None:
        """Stand in for Triton's launcher in C: the last argument is a tuple of the kernel's, or they come last."""
        x, matrix, *layout, y, factor, block = arguments[-1] if triton_version() >= (3, 7) else arguments[13:]
        assert layout[:5] == [2, 32, 32, 1, False]  # shape, strides, and whether padding is NaN
        self.compute(arguments[:3], x, matrix, y, factor, block)

    def compute(self, grid: tuple[int, ...], x: Any, matrix: Any, y: Any, factor: float, block: int) -> None:
        assert block == SIZE
        self.launches.append(grid)
        _read(_pointer(y))[:] += factor * _read(_pointer(x)) * _read(_pointer(matrix))


class Device:
    """A kernel on the CPU as a device: it adds the product of two vectors and a number to a third."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel = JITFunction(_scale)
        self.launcher = partial(launch_kernel, self.kernel, {"BLOCK": SIZE})
        self.compiled = Compiled()
        self.compilations = 0
        monkeypatch.setattr(JITFunction, "run", self._run)
        monkeypatch.setattr(launch, "CompiledKernel", Compiled)
        monkeypatch.setattr(planning, "current_stream", lambda: 0)

    def _run(
        self, x: Any, descriptor: Any, y: Any, factor: float, *, grid: Any, warmup: bool, **constants: Any
    ) -> Compiled:
        self.compilations += 1
        self.compiled.compute(grid, x, descriptor.base, y, factor, constants["BLOCK"])
        return self.compiled

    def multiply(self, x: Any, y: Any, missing: Any = None) -> list[Any]:
        """Return ``x * y * y``: two launches, with a tensor between them."""
        between, out = x.new_zeros((SIZE,)), x.new_empty((SIZE,))
        described = describe(y)
        self.launcher((1, 1, 1), x, described, between, 1.0)
        self.launcher((2, 1, 1), between, described, out, 1.0)
        return [out]

    def plan(self) -> LaunchPlan:
        layout = TensorLayout.dense((SIZE,), torch.float32, CPU)
        return LaunchPlan(self.multiply, [layout, layout, None], CPU)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    empty_strided = torch.empty_strided  # the kernel adds to its result
    monkeypatch.setattr(torch, "empty_strided", lambda *a, **b: empty_strided(*a, **b).zero_())
    monkeypatch.setattr(Tensor, "new_empty", Tensor.new_zeros)
    return Device(monkeypatch)


def check(plan: LaunchPlan, times: int = 1) -> None:
    """Run a plan with new tensors each time."""
    results = []
    for _ in range(times):
        x, y = torch.randn(2, SIZE).unbind()
        results.append((plan.run((x, y, None))[0], x * y * y))
    for out, expected in results:  # all alive at once
        torch.testing.assert_close(out, expected)


def test_the_first_run_compiles_and_later_ones_launch_the_compiled_kernels(device: Device) -> None:
    plan = device.plan()
    assert not device.compiled.launches
    assert plan.kernels == ["_scale", "_scale"]
    check(plan, 4)
    assert device.compilations == 2
    assert device.compiled.launches == [(1, 1, 1), (2, 1, 1)] * 4


def test_a_captured_tensor_is_passed_to_every_call(device: Device) -> None:
    constant = torch.full((SIZE,), 3.0)

    def function(x: Any) -> list[Any]:
        out = x.new_empty((SIZE,))
        device.launcher((1, 1, 1), constant, describe(x), out, 1.0)
        return [out]

    plan = LaunchPlan(function, [TensorLayout.dense((SIZE,), torch.float32, CPU)], CPU)
    for _ in range(3):
        x = torch.randn(SIZE)
        torch.testing.assert_close(plan.run((x,))[0], 3.0 * x)
        constant.fill_(3.0)


def test_a_changed_setting_recompiles_and_launch_hooks_see_every_launch(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = device.plan()
    check(plan, 2)
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    check(plan, 2)
    assert device.compilations == 4
    device.kernel.add_pre_run_hook(lambda *arguments, **options: None)
    check(plan, 2)
    assert device.compilations == 8


@pytest.mark.parametrize("attribute", ["global_scratch_size", "profile_scratch_size", "gsan_enabled"])
def test_kernels_that_need_more_than_arguments_use_tritons_own_launch(device: Device, attribute: str) -> None:
    setattr(device.compiled.run, attribute, 1)
    check(device.plan(), 3)
    assert device.compilations == 6


def test_an_untested_triton_version_uses_tritons_own_launch(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_SETTINGS", None)
    launch._warn_of_slow_launches.cache_clear()
    plan = device.plan()
    with pytest.warns(UserWarning, match=r"was tested with Triton 3\.6 to 3\.9, and this is \d"):
        check(plan, 3)
    assert device.compilations == 6


def test_the_first_launch_of_a_call_must_not_use_pdl(device: Device) -> None:
    """It would read inputs before the work that produces them has finished."""
    device.launcher = partial(launch_kernel, device.kernel, {"BLOCK": SIZE}, launch_pdl=True)
    with pytest.raises(RuntimeError, match="_scale starts before the previous launch ends"):
        device.plan()


@pytest.mark.parametrize("kind", ["zeroed", "twice", "input"])
def test_results_must_be_newly_allocated_and_distinct(kind: str) -> None:
    def function(x: PlannedTensor) -> list[PlannedTensor]:
        out = x.new_zeros((SIZE,)) if kind == "zeroed" else x if kind == "input" else x.new_empty((SIZE,))
        return [out, out] if kind == "twice" else [out]

    with pytest.raises(AssertionError, match="result"):
        LaunchPlan(function, [TensorLayout.dense((SIZE,), torch.float32, CPU)], CPU)


class Pair(NamedTuple):
    """A tensor and a number as one argument of a kernel."""

    tensor: Any
    number: int


def test_tuples_of_arguments_are_filled() -> None:
    """The compiled kernel gets nested tuples with addresses, and Triton the tuples' own types with tensors."""
    kernel = JITFunction(_scale)
    layout = TensorLayout.dense((SIZE,), torch.float32, CPU)

    def function(x: Any, number: Any) -> list[Any]:
        out = x.new_empty((SIZE,))
        launch_kernel(kernel, {"BLOCK": SIZE}, (1, 1, 1), (Pair(x, 2), (number,)), number, Pair(out, number), 1.0)
        return [out]

    planned = LaunchPlan(function, [layout, NUMBER], CPU).launches[0]
    arguments = (*planned.arguments, *planned.constants)
    fill = planning._filler(arguments, {0: 0, 2: 1, 1: 2}, SimpleNamespace())  # type: ignore[arg-type]
    for first, second, number in ((11, 22, 5), (33, 44, 6)):
        assert fill([first, second, number]) == (((first, 2), (number,)), number, (second, number), 1.0, SIZE)
    x, out = torch.zeros(2, SIZE).unbind()
    filled = planning._with_tensors(planned.arguments, {0: x, 1: 5, 2: out})
    (pair, numbers), number, other, factor = filled
    assert isinstance(pair, Pair)
    assert isinstance(other, Pair)
    assert pair.tensor is x
    assert other.tensor is out
    assert (pair.number, numbers, number, other.number, factor) == (2, (5,), 5, 5, 1.0)


def test_host_code_cannot_compute_with_a_number_of_each_call() -> None:
    with pytest.raises(TypeError, match="PlannedNumber"):
        LaunchPlan(lambda x, number: [x.new_empty((number + 1,))], [layout_of(torch.ones(2)), NUMBER], CPU)
