"""Launches without a GPU, and their assumptions about Triton. On a GPU: ``tests/gpu/test_plan.py``."""

from __future__ import annotations

import ast
import gc
import inspect
import re
import textwrap
import threading
import tomllib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from dma_kernels.numerics.layout import TensorLayout, matrix_blocks
from dma_kernels.runtime import chip, launch
from dma_kernels.runtime.launch import launch_kernel
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, make_backend
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


def test_a_launch_with_tensors_uses_tritons_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        calls.append({"grid": grid, "arguments": arguments, **options})

    monkeypatch.setattr(JITFunction, "run", run)
    launcher = partial(launch_kernel, JITFunction(_add), CONSTANTS, num_warps=8)
    arguments = (torch.ones(64), torch.zeros(64), 2, 10, 0.5)
    launcher(GRID, *arguments)
    launcher((0, 1, 1), *arguments)  # launches nothing
    assert calls == [{"grid": GRID, "arguments": arguments, "num_warps": 8, "enable_fp_fusion": True, **CONSTANTS}]


def test_new_kernels_of_a_plan_are_compiled_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    @contextmanager
    def together(executor: Any, ignore_errors: bool = False) -> Iterator[None]:
        assert ignore_errors, "Triton 3.6 would stay in the mode after an error, which the launch raises, too"
        events.append("begin")
        yield
        events.append("end")

    monkeypatch.setattr(triton, "AsyncCompileMode", together)
    monkeypatch.setattr(JITFunction, "warmup", lambda self, *arguments, grid, **options: events.append(arguments))
    kernels = [JITFunction(_add) for _ in range(3)]
    launches = [
        (launch.KernelLaunch(kernel, GRID, (), (4, sign), CONSTANTS), (index,))
        for index, (kernel, sign) in enumerate((kernel, sign) for kernel in kernels for sign in (1, -1))
    ]
    launch.compile_together(launches[:1])  # a kernel alone compiles when it is launched
    assert events == []
    launch.compile_together(launches[:4])
    assert events == ["begin", (1,), (2,), (3,), "end"]
    launch.compile_together(launches[:4])
    launch.compile_together([(launch.KernelLaunch(add, GRID, (), (4, 1), CONSTANTS), (6,)), *launches[3:5]])
    assert events == ["begin", (1,), (2,), (3,), "end"]  # the interpreter compiles nothing


def test_the_supported_range_of_triton_is_the_tested_one() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = [each for each in map(Requirement, project["dependencies"]) if each.name == "triton"]
    (major, first), *_, (_, last) = sorted(launch.SETTINGS)
    assert needed.specifier == Requirement(f"triton>={major}.{first},<{major}.{last + 1}").specifier


class TestInstalledTriton:
    """Assumptions of direct launches, checked in Triton's source."""

    @pytest.fixture
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(JITFunction.run)))))

    def test_triton_reads_only_the_listed_settings(self, nodes: list[ast.AST]) -> None:
        read = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        hooks = {"launch_enter_hook", "launch_exit_hook", "add_stages_inspection_hook"}
        knobs = {name.removeprefix("knobs.") for name in read if re.fullmatch(r"knobs\.\w+\.\w+", name)}
        settings = knobs - {f"runtime.{hook}" for hook in hooks}
        assert settings == set(launch.SETTINGS[chip.triton_version()])

    def test_triton_launches_with_the_arguments_passed(self, nodes: list[ast.AST]) -> None:
        """Constexprs included."""
        (call,) = (node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "kernel.run")
        assert [ast.unparse(argument) for argument in call.args] == [
            *("grid_0", "grid_1", "grid_2", "stream", "kernel.function", "kernel.packed_metadata", "launch_metadata"),
            *("knobs.runtime.launch_enter_hook", "knobs.runtime.launch_exit_hook", "*bound_args.values()"),
        ]


def test_direct_launches_pass_the_same_arguments_as_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same order, with tensor maps in place of descriptors, and no hooks."""
    from triton.backends.nvidia import driver

    given: list[tuple[Any, ...]] = []
    maps: list[tuple[Any, ...]] = []

    def launch_in_c(*arguments: Any) -> None:
        given.append(arguments)

    def tensor_map(*arguments: Any) -> tuple[Any, ...]:
        maps.append(arguments)
        return "map", arguments[0]

    utils = SimpleNamespace(
        launch=launch_in_c, fill_tma_descriptor=tensor_map, fill_tma_descriptor_tiled=tensor_map,
        build_signature_metadata=",".join,
    )  # fmt: skip
    if chip.triton_version() == (3, 6):
        monkeypatch.setattr(driver, "make_launcher", lambda *_: "")
        monkeypatch.setattr(driver, "library_dirs", list)
        monkeypatch.setattr(driver, "compile_module_from_src", lambda **_: utils)
    else:  # objects of the module in C that the driver compiles
        monkeypatch.setattr(driver, "PyKernelArg", lambda nested_tuple, type: (nested_tuple, type), raising=False)
        for name in ("ARG_TUPLE", "ARG_KERNEL", "ARG_CONSTEXPR"):
            monkeypatch.setattr(driver, name, name, raising=False)
    active = SimpleNamespace(utils=utils, get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    signature = {"x": "*fp16", "d": "tensordesc<fp16[16, 32]>", "pair": ("*fp16", "i32"), "n": "i32", "B": "constexpr"}
    layout = {"swizzle": 2, "elem_size": 2, "elem_type": 6, "block_size": [16, 32], "fp4_padded": False}
    metadata = SimpleNamespace(
        tensordesc_meta=[layout], global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
        profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=True, num_ctas=1,
    )  # fmt: skip
    source = SimpleNamespace(constants={}, signature=signature, fn=SimpleNamespace(arg_names=list(signature)))

    class Kernel:
        run = driver.CudaLauncher(source, metadata)
        function, packed_metadata = 5, (4, 1, 0)
        __getitem__ = CompiledKernel.__getitem__

        def _init_handles(self) -> None:
            pass

        def launch_metadata(self, *_: Any) -> None:
            pass

    compiled: Any = Kernel()
    tensor = torch.ones(64, 32, dtype=torch.float16)
    descriptor = TensorDescriptor(tensor, *matrix_blocks(tensor, 16, 32))
    compiled[GRID](11, descriptor, (12, 3), 4, 128, stream=7)
    direct = launch.DirectLaunch(compiled, GRID)
    describe = direct.descriptor(0, descriptor)
    for _ in range(2):
        direct.run((11, *describe(tensor.data_ptr()), (12, 3), 4, 128), 7)
    assert len(maps) == 2  # one for the second and third launch
    assert maps[0] == maps[1]
    theirs, *ours = ([list(each) if isinstance(each, tuple) else each for each in launch] for launch in given)
    hooks = slice(10, 13) if chip.triton_version() == (3, 6) else slice(8, 11)  # with their metadata
    theirs[hooks] = [None] * 3
    assert ours == [theirs] * 2
    owner = weakref.ref(compiled)
    del compiled
    gc.collect()
    assert owner() is not None  # unloading its module would invalidate the function that is launched


def test_wrong_constants_and_argument_counts_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"constants must be the last parameters of _add: \['SIGN'\]; got \['BLOCK'\]"):
        launch_kernel(add, {"BLOCK": 4}, GRID, 1, 2, 3, 4, 5, 6)
    with pytest.raises(TypeError, match=r"_add takes 5 arguments, got 2"):
        launch_kernel(add, CONSTANTS, GRID, 1, 2)


_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]
_TENSORS = st.builds(
    lambda dtype, offset: torch.ones(32, dtype=dtype)[offset:], st.sampled_from(_DTYPES), st.integers(0, 9)
)


@given(_TENSORS, _TENSORS)
def test_triton_specializes_tensors_of_one_layout_alike(first: Tensor, second: Tensor) -> None:
    kernel = JITFunction(_add, do_not_specialize=["length"])
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    ours = TensorLayout.of(first) == TensorLayout.of(second)
    theirs = binder(first, first, 1, 2, 0.5, **CONSTANTS)[1] == binder(second, second, 1, 2, 0.5, **CONSTANTS)[1]
    assert theirs or not ours


def test_a_descriptor_equals_tritons() -> None:
    tensor = torch.ones(2, 3, 8, 32, dtype=torch.float16)
    ours = TensorDescriptor(tensor, *matrix_blocks(tensor, 16, 32))
    theirs = TensorDescriptor.from_tensor(tensor.view(-1, 32), [16, 32])
    assert (ours.shape, ours.strides, ours.block_shape) == (
        list(theirs.shape), list(theirs.strides), theirs.block_shape,
    )  # fmt: skip
    assert ours.base.data_ptr() == theirs.base.data_ptr()


def test_a_thread_gets_a_context_before_its_first_launch_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
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
