"""Triton kernel launches, and all uses of undocumented parts of Triton.

The first launch of a kernel is ``kernel[grid](...)``, which compiles it. Later ones use :class:`DirectLaunch`, which
saves the host from binding and specializing 70 arguments. This relies on three undocumented facts: the arguments of
Triton's launcher in C, that an address may replace a tensor, and which settings cause recompilation.
They hold for the versions in :data:`SETTINGS`; tests check them in the installed version. Other versions always launch
as ``kernel[grid](...)``, with a warning. So do kernels with scratch memory, with a hook before the launch
(``add_pre_run_hook``) or in the compiler's passes, and all kernels while launch hooks are set.
"""

from __future__ import annotations

import functools
import inspect
import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from .chip import MAX_CTAS, triton_version

Grid = tuple[int, int, int]

_SINCE_3_6: tuple[str, ...] = ("runtime.debug", "compilation.instrumentation_mode")
SETTINGS: dict[tuple[int, ...], tuple[str, ...]] = dict.fromkeys([(3, 6), (3, 7), (3, 8)], _SINCE_3_6)
SETTINGS[3, 9] = (*_SINCE_3_6, "compilation.fpsan_homomorphic_casts")
"""Settings (``triton.knobs``) whose changes make Triton recompile a kernel, by tested version."""

FP_FUSION = {"enable_fp_fusion": True}
"""Launch option that lets a product and a sum become one instruction with one rounding: the default up to Triton 3.9.
Without it the kernels have a tenth more instructions."""

ASSERTS = {"debug": True, "sanitize_overflow": False}
"""Launch options with which ``tl.device_assert`` holds without ``TRITON_DEBUG``; integers are not checked."""

_SETTINGS = SETTINGS.get(triton_version())
settings = functools.partial(operator.attrgetter(*(_SETTINGS or _SINCE_3_6)), triton.knobs)
"""Return the current values of the settings that cause recompilation."""


@dataclass(frozen=True)
class KernelLaunch:
    """One launch."""

    kernel: Any  # a Triton or Gluon kernel
    grid: Grid  # CTAs along each axis
    arguments: tuple[Any, ...]  # runtime arguments in the kernel's order
    constants: tuple[Any, ...]  # values of the constexprs, in the kernel's order
    keywords: dict[str, Any]  # the constexprs by name, and Triton's launch options


def launch_kernel(kernel: Any, constants: Mapping[str, Any], grid: Grid, *arguments: Any, **options: Any) -> None:
    """Launch on the current device and stream, or do what :func:`launching` says instead.

    Args:
        kernel: A Triton or Gluon kernel whose runtime parameters come first and whose constexprs come last.
        constants: Value of every constexpr, by name.
        grid: CTAs along each axis; nothing happens if one of them is 0.
        arguments: The runtime arguments in the kernel's order: tensors, ``None``, integers, floats, tensor descriptors,
            and tuples of them.
        options: Triton's launch options: ``num_warps``, ``num_stages``, ``maxnreg``, ...

    Raises:
        ValueError: ``constants`` are not the kernel's constexprs, or these do not come last.
        TypeError: There are more or fewer arguments than runtime parameters.
    """
    names = kernel.arg_names
    runtime = len(names) - len(constants)
    if set(names[runtime:]) != set(constants):
        raise ValueError(
            f"constants must be the last parameters of {kernel.fn.__name__}: {sorted(names[max(runtime, 0) :])}; "
            f"got {sorted(constants)}"
        )
    if len(arguments) != runtime:
        raise TypeError(f"{kernel.fn.__name__} takes {runtime} arguments, got {len(arguments)}")
    if 0 in grid:
        return
    values = tuple(constants[name] for name in names[runtime:])
    _launcher.get()(KernelLaunch(kernel, grid, arguments, values, {**constants, **FP_FUSION, **options}))


def launch_by_triton(launch: KernelLaunch, arguments: Sequence[Any] | None = None) -> Any:
    """Launch through Triton, with other arguments if given; it compiles the kernel. Return the compiled kernel."""
    return launch.kernel[launch.grid](*(launch.arguments if arguments is None else arguments), **launch.keywords)


_compiled: set[tuple[Any, ...]] = set()
"""Kernels that :func:`compile_together` knows, with their constants."""


def compile_together(launches: Sequence[tuple[KernelLaunch, Sequence[Any]]]) -> None:
    """Compile the new kernels of launches at the same time. One alone compiles when it is launched.

    Each launch comes with its arguments, and raises the error of a kernel that does not compile. Triton 3.6 would not
    leave its mode after an error here.
    """
    new = {(launch.kernel, launch.constants): (launch, arguments) for launch, arguments in launches}
    new = {key: each for key, each in new.items() if key not in _compiled and isinstance(key[0], JITFunction)}
    if len(new) > 1:
        with ThreadPoolExecutor(len(new)) as executor, triton.AsyncCompileMode(executor, ignore_errors=True):
            for launch, arguments in new.values():
                launch.kernel.warmup(*arguments, grid=launch.grid, **launch.keywords)
    _compiled.update(new)


_launcher: ContextVar[Callable[[KernelLaunch], Any]] = ContextVar("launcher", default=launch_by_triton)


@contextmanager
def launching(launcher: Callable[[KernelLaunch], Any]) -> Iterator[None]:
    """Call ``launcher`` for the launches of this thread in a ``with`` block."""
    token = _launcher.set(launcher)
    try:
        yield
    finally:
        _launcher.reset(token)


class _Address:
    """Stands for the tensor of a descriptor: a launch reads only its address."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def rebased(descriptor: Any, base: Any) -> Any:
    """Return the descriptor of another tensor with the same layout, without repeating its checks."""
    made = copy(descriptor)
    made.base = base
    return made


class DirectLaunch:
    """Launches a compiled kernel by the C function that Triton's own launch ends in.

    This cuts host time by two thirds, partly because the tensor map of each address is cached.
    """

    def __init__(self, compiled: CompiledKernel, grid: Grid) -> None:
        self._compiled = compiled  # owns the module that the function is in
        # Mirrors CudaLauncher.__call__ and the function that wrap_handle_tensordesc returns.
        launcher = compiled.run
        self._launch, self._map_layouts = launcher.launch, None
        if isinstance(self._launch, FunctionType):
            cells = inspect.getclosurevars(self._launch).nonlocals
            self._launch, self._map_layouts = cells["launcher"], cells["tensordesc_meta"]
        kernel = [compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl]
        no_scratch, no_hooks = [None] * 2, [None] * 3
        self._grid, self._takes_tuple = grid, triton_version() >= (3, 7)
        if self._takes_tuple:
            types = [launcher.arg_annotations, launcher.kernel_signature]
            self._fixed = [*kernel, compiled.packed_metadata, *no_hooks, *no_scratch, *types]
        else:
            self._fixed = [*kernel, *no_scratch, compiled.packed_metadata, *no_hooks]

    def descriptor(self, index: int, descriptor: Any) -> Callable[[int], tuple[Any, ...]]:
        """Return a function from an address to the arguments for a tensor there.

        Args:
            index: Which of the launch's descriptors this is.
            descriptor: A descriptor of a tensor with the same layout.
        """
        from triton.backends.nvidia.driver import make_tensordesc_arg

        layout = self._map_layouts[index] if self._map_layouts else None
        unused = (None,) if triton_version() >= (3, 8) else ()

        def describe(address: int) -> tuple[Any, ...]:
            return tuple(make_tensordesc_arg(rebased(descriptor, _Address(address)), layout, *unused))

        return functools.lru_cache(maxsize=64)(describe)

    def run(self, arguments: Sequence[Any], stream: int) -> None:
        """Launch with all arguments, constexprs included; tensors are given as addresses."""
        if self._takes_tuple:
            self._launch(*self._grid, stream, *self._fixed, arguments)
        else:
            self._launch(*self._grid, stream, *self._fixed, *arguments)


def direct_launch(launch: KernelLaunch, compiled: Any) -> DirectLaunch | None:
    """Return the direct launch of a compiled kernel; ``None`` if only Triton itself may launch the kernel."""
    if not (launches_directly([launch.kernel]) and isinstance(compiled, CompiledKernel)):
        return None
    launcher = compiled.run
    is_instrumented = getattr(launcher, "gsan_enabled", False)  # exists since 3.8
    if launcher.global_scratch_size or launcher.profile_scratch_size or is_instrumented:
        return None
    return DirectLaunch(compiled, launch.grid)


_STAY: AbstractContextManager[object] = nullcontext()
_bound = threading.local()
"""Attribute ``devices``: the devices whose CUDA context is bound to this thread."""


def blocks_of_heads(heads: int, blocks: int) -> Grid:
    """Return a grid of at least ``blocks`` CTAs per head; only the first axis takes more than 65,535 CTAs."""
    layers = max(1, -(-blocks // MAX_CTAS))
    return heads, -(-blocks // layers), layers


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device current for the launches of a call; on a CPU, the interpreter runs kernels."""
    if device.type != "cuda":
        return _STAY
    if device not in _bound.__dict__.setdefault("devices", set()):
        _bind_context(device)
    is_current = device.index is None or device.index == torch.cuda.current_device()
    return _STAY if is_current else torch.cuda.device(device)


def _bind_context(device: torch.device) -> None:
    """Bind the CUDA context of a device to this thread; a new thread has none before its first CUDA call.

    Triton's own launch binds it too late: the driver encodes tensor descriptors before that.
    """
    with torch.cuda.device(device):
        # Unlike most CUDA calls, allowed during graph capture.
        torch.cuda.Event().record()  # type: ignore[no-untyped-call]
    _bound.devices.add(device)


def current_stream() -> int:
    """Return the current stream of the current device."""
    driver: Any = triton.runtime.driver.active
    return int(driver.get_current_stream(driver.get_current_device()))


def launches_directly(kernels: Sequence[Any]) -> bool:
    """Whether kernels may be launched directly; warns if this version of Triton is untested."""
    for kernel in kernels:
        if not isinstance(kernel, JITFunction) or kernel.pre_run_hooks:
            return False
    if _SETTINGS is None:
        _warn_of_slow_launches()
        return False
    hooks = triton.knobs.runtime
    for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):  # a function, or a chain of functions
            return False
    return getattr(hooks, "add_stages_inspection_hook", None) is None  # exists since 3.7


@functools.cache
def _warn_of_slow_launches() -> None:
    """Warn, once, that this version of Triton was not tested."""
    first, *_, last = (".".join(map(str, version)) for version in SETTINGS)
    warnings.warn(
        f"dma_kernels was tested with Triton {first} to {last}, and this is {triton.__version__}: kernels are launched "
        f"by Triton's own launch, which takes the host about four times as long; install triton>={first},<={last}.*",
        stacklevel=2,
    )
