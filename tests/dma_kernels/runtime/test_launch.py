"""The launcher, without a GPU: what it launches, how, and what it takes for the same. On a device: ``tests/gpu``."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from dma_kernels.runtime import launch
from dma_kernels.runtime.launch import Launcher, matrix_descriptor
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import JITFunction
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

GRID = (2, 3, 1)


def _add(x_ptr, y_ptr, stride, length, factor, BLOCK: tl.constexpr, SIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset * stride, mask=offset < length, other=0.0)
    tl.store(y_ptr + offset, SIGN * factor * x, mask=offset < length)


add = triton.jit(do_not_specialize=["length"])(_add)
CONSTANTS = {"SIGN": -1, "BLOCK": 4}


STREAM = 7


class Recorder:
    """Stands for a compiled kernel: records its launches, and those that Triton's hooks are told of."""

    function = 1
    packed_metadata = (8, 1, 0)

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.hooked: list[tuple[Any, ...]] = []

    def run(self, x: int, y: int, z: int, *arguments: Any) -> None:
        stream, function, metadata, launch_metadata, enter_hook, exit_hook, *rest = arguments
        assert (stream, function, metadata) == (STREAM, self.function, self.packed_metadata)
        assert launch_metadata is enter_hook is exit_hook is None
        self.launches.append(((x, y, z), *rest))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.hooked.append((grid, *arguments))


class Triton:
    """Stands for Triton's own launch of a kernel that is not interpreted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel = JITFunction(_add, do_not_specialize=["length"])
        self.calls: list[dict[str, Any]] = []
        self.compiled: list[Recorder] = []
        self.device = 0
        monkeypatch.setattr(JITFunction, "run", self._run)
        monkeypatch.setattr(launch, "CompiledKernel", Recorder)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)
        monkeypatch.setattr(launch, "current_stream", lambda: STREAM)

    def _run(self, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Recorder:
        self.calls.append({"grid": grid, "arguments": arguments, **options})
        self.compiled.append(Recorder())
        return self.compiled[-1]

    def is_recompiled(self, *arguments: Any) -> bool:
        """Whether a launch with these arguments, after one with the usual ones, goes through Triton again."""
        launcher = Launcher(self.kernel, CONSTANTS)
        launcher(GRID, *usual())
        before = len(self.calls)
        launcher(GRID, *arguments)
        return len(self.calls) > before


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch) -> Triton:
    """A kernel whose compiled form is a recorder."""
    return Triton(monkeypatch)


def usual(**changes: Any) -> tuple[Any, ...]:
    """The arguments of a launch, in order."""
    arguments = {"x": torch.ones(64), "y": torch.zeros(64), "stride": 2, "length": 10, "factor": 0.5}
    return tuple((arguments | changes).values())


def test_the_first_launch_compiles_and_later_ones_go_to_the_compiled_kernel(jit: Triton) -> None:
    launcher = Launcher(jit.kernel, CONSTANTS, num_warps=8)
    first, second = usual(), usual(length=12, factor=2.0)
    launcher(GRID, *first)
    assert jit.calls == [{"grid": GRID, "arguments": first, "num_warps": 8, **CONSTANTS}]
    launcher((5, 1, 1), *second)
    assert len(jit.calls) == 1
    # Constants follow in the kernel's order, as Triton's launch passes them.
    assert jit.compiled[0].launches == [((5, 1, 1), *second, 4, -1)]


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.ones(64, dtype=torch.float16)},
        {"x": torch.ones(64)[1:]},
        {"x": None},
        {"stride": 1},
        {"stride": 16},
        {"stride": 2**31},
        {"length": 2**31},
        {"factor": 1},
    ],
    ids=["dtype", "alignment", "none", "one", "sixteen", "int64", "int64-unspecialised", "type"],
)
def test_what_triton_compiles_differently_goes_through_triton(change: dict[str, Any], jit: Triton) -> None:
    assert jit.is_recompiled(*usual(**change))


@pytest.mark.parametrize(
    "change",
    [{"length": 16}, {"length": 1}, {"factor": 3.5}, {"stride": 18}, {"x": torch.ones(128)}],
    ids=["unspecialised-16", "unspecialised-1", "float", "integer", "shape"],
)
def test_what_it_compiles_alike_does_not(change: dict[str, Any], jit: Triton) -> None:
    assert not jit.is_recompiled(*usual(**change))


def test_every_device_has_its_own_kernel(jit: Triton) -> None:
    launcher = Launcher(jit.kernel, CONSTANTS)
    launcher(GRID, *usual())
    jit.device = 1
    launcher(GRID, *usual())
    assert len(jit.calls) == 2


def test_triton_debugging_settings_are_heeded(jit: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(jit.kernel, CONSTANTS)
    launcher(GRID, *usual())
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    launcher(GRID, *usual())
    assert len(jit.calls) == 2


def test_a_hook_before_the_launch_is_called(jit: Triton) -> None:
    launcher = Launcher(jit.kernel, CONSTANTS)
    jit.kernel.add_pre_run_hook(lambda *arguments, **options: None)
    launcher(GRID, *usual())
    launcher(GRID, *usual())
    assert len(jit.calls) == 2  # Triton's launch calls it


def test_a_hook_in_the_passes_of_the_compiler_is_asked(jit: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(jit.kernel, CONSTANTS)
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", lambda: ("", ""), raising=False)
    launcher(GRID, *usual())
    launcher(GRID, *usual())
    assert len(jit.calls) == 2  # Triton's launch asks it


def test_a_version_of_triton_that_was_not_tried_launches_by_itself(
    jit: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Launcher(jit.kernel, CONSTANTS)
    monkeypatch.setattr(launch, "_SETTINGS", None)
    launch._warn_of_slow_launches.cache_clear()
    with pytest.warns(UserWarning, match=r"was tested with Triton 3\.6 to 3\.9, and this is \d"):
        launcher(GRID, *usual())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launcher(GRID, *usual())
    assert len(jit.calls) == 2


class TestInstalledTriton:
    """What direct launches rely on, read in the source of ``JITFunction.run``."""

    @pytest.fixture
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(JITFunction.run)))))

    def test_looks_at_the_settings_that_are_listed(self, nodes: list[ast.AST]) -> None:
        read = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        hooks = {"launch_enter_hook", "launch_exit_hook", "add_stages_inspection_hook"}
        knobs = {name.removeprefix("knobs.") for name in read if re.fullmatch(r"knobs\.\w+\.\w+", name)}
        settings = knobs - {f"runtime.{hook}" for hook in hooks}
        assert settings == set(launch.SETTINGS[".".join(triton.__version__.split(".")[:2])])

    def test_launches_with_the_arguments_that_are_passed(self, nodes: list[ast.AST]) -> None:
        (call,) = (node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "kernel.run")
        assert [ast.unparse(argument) for argument in call.args] == [
            *("grid_0", "grid_1", "grid_2", "stream", "kernel.function", "kernel.packed_metadata", "launch_metadata"),
            *("knobs.runtime.launch_enter_hook", "knobs.runtime.launch_exit_hook", "*bound_args.values()"),
        ]


def test_hooks_around_the_launch_are_called(jit: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(jit.kernel, CONSTANTS)
    arguments = usual()
    launcher(GRID, *arguments)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    launcher(GRID, *arguments)
    assert jit.compiled[0].hooked == [(GRID, *arguments, 4, -1)]  # Triton's own launcher calls them
    assert not jit.compiled[0].launches


def test_an_observer_is_told_of_every_launch(jit: Triton) -> None:
    launcher, seen = Launcher(jit.kernel, CONSTANTS), []
    with launch.observed(lambda *launched: seen.append(launched)):
        for arguments in (usual(), usual(length=12)):
            launcher(GRID, *arguments)
            assert seen[-1] == (jit.kernel, jit.compiled[0], GRID, (*arguments, 4, -1))
        jit.kernel.add_pre_run_hook(lambda *arguments, **options: None)
        launcher(GRID, *usual())
        assert seen[-1][1] is None
    launcher(GRID, *usual())
    assert len(seen) == 3


def test_a_kernel_that_triton_did_not_compile_is_not_kept(jit: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(jit.kernel, CONSTANTS)
    monkeypatch.setattr(JITFunction, "run", lambda self, *arguments, **options: None)
    launcher(GRID, *usual())
    monkeypatch.setattr(JITFunction, "run", jit._run)
    launcher(GRID, *usual())
    assert len(jit.calls) == 1


def test_the_first_launch_of_a_call_must_not_start_early(jit: Triton) -> None:
    """It would read what the caller gives before the work that makes it has ended."""
    usual_launch, early = Launcher(jit.kernel, CONSTANTS), Launcher(jit.kernel, CONSTANTS, launch_pdl=True)
    with launch.on_device(torch.device("cpu")):
        usual_launch((0, 1, 1), *usual())  # launches nothing
        with pytest.raises(RuntimeError, match="_add starts before the launch before it has ended"):
            early(GRID, *usual())
        usual_launch(GRID, *usual())
        early(GRID, *usual())
    assert len(jit.calls) == 2


def test_an_empty_grid_launches_nothing(jit: Triton) -> None:
    Launcher(jit.kernel, CONSTANTS)((0, 1, 1), *usual())
    assert not jit.calls


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted here")
def test_the_interpreter_runs_it() -> None:
    x, y = torch.arange(8.0), torch.zeros(4)
    launcher = Launcher(add, CONSTANTS, num_warps=4)
    for factor in (2.0, 3.0):
        launcher((1, 1, 1), x, y, 2, 3, factor)
        assert y.tolist() == [-0.0, -2 * factor, -4 * factor, 0.0]


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"constants must be the last parameters of _add: \['SIGN'\]; got \['BLOCK'\]"):
        Launcher(add, {"BLOCK": 4})
    with pytest.raises(TypeError, match=r"_add takes 5 arguments, got 2"):
        Launcher(add, CONSTANTS)(GRID, 1, 2)


_INTEGERS = st.sampled_from([0, 1, 2, 15, 16, 17, 48, 2**31 - 1, 2**31, -16, 2**40])
_TENSORS = st.builds(
    lambda dtype, offset: torch.ones(32, dtype=dtype)[offset:],
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8]),
    st.sampled_from([0, 1, 8]),
)


def _descriptor(rows: int, columns: int) -> TensorDescriptor:
    return matrix_descriptor(torch.ones(2, 64, 32, dtype=torch.float16), rows, columns)


def _gluon_descriptor(rows: int, swizzle: int) -> GluonDescriptor:
    tensor = torch.ones(64, 64, dtype=torch.float16)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=2)
    return GluonDescriptor(tensor, [64, 64], [64, 1], [rows, 64], layout)


_DESCRIPTORS = st.one_of(
    st.builds(_descriptor, st.sampled_from([16, 32]), st.sampled_from([16, 32])),
    st.builds(_gluon_descriptor, st.sampled_from([16, 32]), st.sampled_from([32, 64, 128])),
)
_ARGUMENTS = st.tuples(
    st.one_of(_TENSORS, st.none(), _DESCRIPTORS), _TENSORS, _INTEGERS, _INTEGERS, st.sampled_from([0.5, 2.0])
)


@given(_ARGUMENTS, _ARGUMENTS)
def test_what_triton_tells_apart_has_another_key(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        kernel = JITFunction(_add, do_not_specialize=["length"])
        launcher = Launcher(kernel, CONSTANTS)
        binder = create_function_from_signature(
            kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32))
        )
        ours = launcher._key(first) == launcher._key(second)
        theirs = binder(*first, **CONSTANTS)[1] == binder(*second, **CONSTANTS)[1]
        assert theirs or not ours


def test_descriptors_of_other_layouts_have_their_own_kernel(jit: Triton) -> None:
    launcher = Launcher(jit.kernel, CONSTANTS)
    for swizzle in (128, 128, 64):
        launcher(GRID, *usual(x=_gluon_descriptor(16, swizzle)))
    assert len(jit.calls) == 2


def test_a_descriptor_is_that_of_triton() -> None:
    tensor = torch.ones(2, 3, 8, 32, dtype=torch.float16)
    ours = matrix_descriptor(tensor, 16, 32)
    theirs = TensorDescriptor.from_tensor(tensor.view(-1, 32), [16, 32])
    assert (ours.shape, ours.strides, ours.block_shape) == (
        list(theirs.shape), list(theirs.strides), theirs.block_shape,
    )  # fmt: skip
    assert ours.base.data_ptr() == theirs.base.data_ptr()


def test_a_thread_is_given_a_context_before_its_first_launch_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    recorded: list[torch.device] = []

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1].index if current else -1)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: recorded.append(current[-1])))
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)

    def work() -> None:
        for each in (first, first, second, first):
            with launch.on_device(each):
                assert current == [each]

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert recorded == [first, second] * 2
