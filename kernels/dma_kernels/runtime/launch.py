"""Launches of Triton kernels that cost little Python time.

Triton's own launch binds every argument, specialises on each, makes a string of it all to look the kernel up, and
compares every global constant that the kernel uses: 50 to 90 microseconds for a kernel of 70 parameters. A
:class:`Launcher` fixes the constexprs and the options once, keys on what can still differ, and launches the compiled
kernel itself, as Triton does; Triton's hooks and profilers see it as ever.

The first launch of every key goes through Triton, which compiles. So do all launches where Triton's interpreter runs
the kernels, where someone has hung a hook before the launch (``add_pre_run_hook``) or in the compiler's passes, and on
versions of Triton that :data:`SETTINGS` does not list: what a launch takes and looks at is no promise of Triton's.
"""

from __future__ import annotations

import functools
import inspect
import operator
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ..numerics.layout import ALIGNMENT
from .chip import MAX_CTAS

Grid = tuple[int, int, int]

_SINCE_3_6 = ("runtime.debug", "compilation.instrumentation_mode")
SETTINGS = {
    "3.6": _SINCE_3_6,
    "3.7": _SINCE_3_6,
    "3.8": _SINCE_3_6,
    "3.9": (*_SINCE_3_6, "compilation.fpsan_homomorphic_casts"),
}
"""The settings (``triton.knobs``) that Triton compiles a kernel anew for, for each version whose compiled kernels were
tried here. A test reads both in the source of the installed version."""

_SETTINGS = SETTINGS.get(".".join(triton.__version__.split(".")[:2]))
_read_settings = operator.attrgetter(*(_SETTINGS or _SINCE_3_6))

Observer = Callable[[Any, CompiledKernel | None, Grid, tuple[Any, ...]], None]
"""Is told of a launch: the kernel, its compiled form (``None`` if Triton's own launch has to be used), the grid, and
all arguments with the constexprs."""


@dataclass(frozen=True)
class KernelLaunch:
    """One launch.

    Attributes:
        kernel: A Triton or Gluon kernel.
        grid: CTAs along each axis.
        arguments: Runtime arguments in the kernel's order.
        constants: Values of the constexprs, in the kernel's order.
        keywords: The constexprs by name, and Triton's launch options.
    """

    kernel: Any
    grid: Grid
    arguments: tuple[Any, ...]
    constants: tuple[Any, ...]
    keywords: dict[str, Any]


class _Watch(threading.local):
    """Who observes the launches of this thread, and whether the next one is the first of a call."""

    observer: Observer | None = None
    is_first = False


class _Contexts(threading.local):
    """Devices whose CUDA context this thread has been given."""

    def __init__(self) -> None:
        self.devices: set[torch.device] = set()


_WATCH = _Watch()
_CONTEXTS = _Contexts()


class Launcher:
    """A Triton kernel whose constexprs and options are fixed.

    Safe to share between threads and devices; a kernel is compiled once for each device.

    Args:
        kernel: A ``triton.jit`` function whose runtime parameters come first and whose constexprs come last.
        constants: Value of every constexpr, by name.
        settled: Runtime parameters that every launch gives alike, as far as Triton can tell: tensors that were just
            allocated, of the same dtype each time; integers of 32 bits that the kernel does not specialise on.
        options: Triton's launch options: ``num_warps``, ``num_stages``, ``maxnreg``, ...

    Raises:
        ValueError: ``constants`` are not the kernel's constexprs, or these do not come last.
    """

    def __init__(
        self, kernel: Any, constants: Mapping[str, Any], *, settled: Collection[str] = (), **options: Any
    ) -> None:
        names = list(inspect.signature(kernel.fn).parameters)
        runtime = len(names) - len(constants)
        if set(names[runtime:]) != set(constants):
            raise ValueError(
                f"constants must be the last parameters of {kernel.fn.__name__}: "
                f"{sorted(names[max(runtime, 0) :])}; got {sorted(constants)}"
            )
        self._kernel = kernel
        self._keywords = {**constants, **options}
        self._constants = tuple(constants[name] for name in names[runtime:])
        self._runtime = runtime
        # What has to be looked at in each launch: positions, and whether Triton specialises there.
        self._open: tuple[tuple[int, bool], ...] = ()
        if isinstance(kernel, JITFunction):
            self._open = tuple(
                (index, not parameter.do_not_specialize)
                for index, parameter in enumerate(kernel.params[:runtime])
                if parameter.name not in settled
            )
        self._is_early = bool(options.get("launch_pdl"))
        self._compiled: dict[tuple[Any, ...], CompiledKernel] = {}

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        """Launch on the current device and stream.

        Args:
            grid: Programs along each axis; nothing happens if one of them is 0.
            arguments: The runtime arguments in the kernel's order: tensors, ``None``, integers, floats, tensor
                descriptors, and tuples of them.

        Raises:
            TypeError: There are more or fewer arguments than runtime parameters.
            RuntimeError: The first launch of a call is one that starts early (``launch_pdl``).
        """
        if len(arguments) != self._runtime:
            raise TypeError(f"{self._kernel.fn.__name__} takes {self._runtime} arguments, got {len(arguments)}")
        if 0 in grid:
            return
        builder = next((x for x in map(_builder_of, leaves(arguments)) if x is not None), None)
        if builder is not None:
            builder.launch(KernelLaunch(self._kernel, grid, arguments, self._constants, self._keywords))
            return
        if _WATCH.is_first:
            if self._is_early:
                raise RuntimeError(
                    f"{self._kernel.fn.__name__} starts before the launch before it has ended, and may read the call's "
                    "inputs at once; the call must first launch a kernel that starts after all earlier work"
                )
            _WATCH.is_first = False
        compiled = self._launch(grid, arguments)
        if _WATCH.observer is not None:
            _WATCH.observer(self._kernel, compiled, grid, (*arguments, *self._constants))

    def _launch(self, grid: Grid, arguments: tuple[Any, ...]) -> CompiledKernel | None:
        """Launch; return the compiled kernel if it may be launched without Triton's own launch."""
        if not launches_directly(self._kernel):
            self._kernel[grid](*arguments, **self._keywords)
            return None
        key = self._key(arguments)
        compiled = self._compiled.get(key)
        if compiled is not None:
            launch_compiled(compiled, grid, (*arguments, *self._constants), current_stream())
            return compiled
        launched = self._kernel[grid](*arguments, **self._keywords)
        if not isinstance(launched, CompiledKernel):
            return None
        self._compiled[key] = launched
        return launched

    def _key(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all that Triton may compile differently for; it may tell apart what Triton does not."""
        key: list[Any] = [torch.cuda.current_device(), *settings()]
        add = key.append
        for index, is_specialized in self._open:
            for argument in leaves(arguments[index]):
                kind = type(argument)
                if kind is int:
                    if not is_specialized:
                        add(int)
                    elif argument == 1:  # Triton makes a constant of it
                        add(-1)
                    else:
                        add(argument & (ALIGNMENT - 1))
                    if not -(2**31) <= argument < 2**31:
                        add((index, 64))
                elif argument is None or kind is float:
                    add(kind)
                elif isinstance(argument, Tensor):
                    add(argument.dtype)
                    misalignment = argument.data_ptr() & (ALIGNMENT - 1)
                    if misalignment:
                        add((index, misalignment))
                else:  # a descriptor; one of Gluon's has a layout
                    add(argument.base.dtype)
                    add((*argument.block_shape, argument.padding, getattr(argument, "layout", None)))
        return tuple(key)


def _builder_of(argument: Any) -> Any:
    """Return the plan being made that an argument belongs to: a planned tensor, or a descriptor of one."""
    return getattr(getattr(argument, "base", argument), "plan", None)


def direct_launcher(launch: KernelLaunch, arguments: Sequence[Any]) -> Callable[..., None] | None:
    """Launch through Triton, which compiles.

    Args:
        launch: The launch.
        arguments: Its runtime arguments with tensors in their places.

    Returns:
        What launches the compiled kernel from now on. It takes all arguments, constexprs included, addresses in place
        of tensors, and ``stream=``. ``None`` if only Triton itself may launch the kernel.
    """
    compiled = launch.kernel[launch.grid](*arguments, **launch.keywords)
    if not (launches_directly(launch.kernel) and isinstance(compiled, CompiledKernel)):
        return None
    runner: Callable[..., None] = compiled[launch.grid]
    return runner


def leaves(arguments: Any) -> Iterator[Any]:
    """Yield what possibly nested tuples of arguments hold."""
    if isinstance(arguments, tuple):
        for argument in arguments:
            yield from leaves(argument)
    else:
        yield arguments


def nested(arguments: tuple[Any, ...], values: Iterator[Any]) -> tuple[Any, ...]:
    """Return values in place of the leaves of ``arguments``, in tuples of the same types."""
    made = [nested(x, values) if isinstance(x, tuple) else next(values) for x in arguments]
    return type(arguments)(*made) if hasattr(arguments, "_fields") else tuple(made)


def blocks_of_heads(heads: int, blocks: int) -> Grid:
    """Return a grid of at least so many blocks for each head; only the first axis takes more than 65,535 programs."""
    layers = max(1, -(-blocks // MAX_CTAS))
    return heads, -(-blocks // layers), layers


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tell ``observer`` of every launch of this thread."""
    previous, _WATCH.observer = _WATCH.observer, observer
    try:
        yield
    finally:
        _WATCH.observer = previous


def settings() -> tuple[Any, ...]:
    """Return the settings of Triton's that it compiles a kernel anew for."""
    found: tuple[Any, ...] = _read_settings(triton.knobs)
    return found


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one for the launches of a call.

    A CPU, where the interpreter runs kernels, needs nothing. The first launch must not start early: once it runs, the
    inputs of the call are complete, whoever made them.
    """
    _WATCH.is_first = True
    if device.type != "cuda":
        return nullcontext()
    _bind_context(device)
    is_current = device.index is None or device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(device)


def _bind_context(device: torch.device) -> None:
    """Give this thread the context of a CUDA device, which a new thread has not before it first calls CUDA.

    Triton's own launch takes care of that, but too late: the driver encodes tensor descriptors before.
    """
    if device not in _CONTEXTS.devices:
        with torch.cuda.device(device):
            # Allowed while a graph is captured, as most calls are not.
            torch.cuda.Event().record()  # type: ignore[no-untyped-call]
        _CONTEXTS.devices.add(device)


def current_stream() -> int:
    """Return the current stream of the current device."""
    driver: Any = triton.runtime.driver.active
    return int(driver.get_current_stream(driver.get_current_device()))


def launch_compiled(compiled: CompiledKernel, grid: Grid, arguments: Sequence[Any], stream: int) -> None:
    """Launch a compiled kernel on the current device.

    Args:
        compiled: What Triton's launch returned.
        grid: Programs.
        arguments: All arguments, constexprs too; addresses may stand for tensors.
        stream: The current stream.
    """
    hooks = triton.knobs.runtime
    if _is_hooked(hooks.launch_enter_hook) or _is_hooked(hooks.launch_exit_hook):
        compiled[grid](*arguments)
    else:
        # As Triton launches, without collecting what hooks would be told.
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


def _is_hooked(hook: Any) -> bool:
    """Whether a hook of Triton's does anything: ``None``, a function, or a chain of functions."""
    return hook is not None and bool(getattr(hook, "calls", True))


def launches_directly(kernel: Any) -> bool:
    """Whether compiled kernels may be launched without Triton's own launch; warns where no kernel may be."""
    if not isinstance(kernel, JITFunction) or kernel.pre_run_hooks:
        return False
    if _SETTINGS is None:
        _warn_of_slow_launches()
        return False
    return getattr(triton.knobs.runtime, "add_stages_inspection_hook", None) is None  # from 3.7 on


@functools.cache
def _warn_of_slow_launches() -> None:
    """Warn, once, that this version of Triton was not tested."""
    first, *_, last = SETTINGS
    warnings.warn(
        f"dma_kernels was tested with Triton {first} to {last}, and this is {triton.__version__}: kernels are launched "
        f"by Triton's own launch, which takes the host about four times as long; install triton>={first},<={last}.*",
        stacklevel=2,
    )


def matrix_descriptor(tensor: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Describe a contiguous tensor as a matrix of its last dimension, copied in blocks; rows start at 16 bytes."""
    columns = tensor.shape[-1]
    return TensorDescriptor(tensor, [tensor.numel() // columns, columns], [columns, 1], [block_rows, block_columns])
