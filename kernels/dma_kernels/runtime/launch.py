"""Launches of Triton kernels, and all that this package uses of Triton beside its documented interface.

A kernel is launched as ``kernel[grid](...)`` the first time, which compiles it, and as ``compiled[grid](...)`` from
then on (:mod:`dma_kernels.runtime.plan`), which spares the host binding and specialising 70 arguments. Triton documents
both. Three things it does not promise: that an address may stand for a tensor, that constexprs are passed along, and
for which settings it would compile anew. They are as expected in the versions that :data:`SETTINGS` lists, and a test
reads them in the source of the installed one. Other versions launch as ``kernel[grid](...)`` every time, with a
warning; so do kernels with a hook before the launch (``add_pre_run_hook``) or in the compiler's passes.
"""

from __future__ import annotations

import functools
import inspect
import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from .chip import MAX_CTAS

Grid = tuple[int, int, int]

_SINCE_3_6 = ("runtime.debug", "compilation.instrumentation_mode")
SETTINGS = {
    "3.6": _SINCE_3_6,
    "3.7": _SINCE_3_6,
    "3.8": _SINCE_3_6,
    "3.9": (*_SINCE_3_6, "compilation.fpsan_homomorphic_casts"),
}
"""The settings (``triton.knobs``) that Triton compiles a kernel anew for, by tested version."""

_SETTINGS = SETTINGS.get(".".join(triton.__version__.split(".")[:2]))
_read_settings = operator.attrgetter(*(_SETTINGS or _SINCE_3_6))


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


class Launcher:
    """A kernel whose constexprs and options are fixed.

    Args:
        kernel: A Triton or Gluon kernel whose runtime parameters come first and whose constexprs come last.
        constants: Value of every constexpr, by name.
        options: Triton's launch options: ``num_warps``, ``num_stages``, ``maxnreg``, ...

    Raises:
        ValueError: ``constants`` are not the kernel's constexprs, or these do not come last.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any], **options: Any) -> None:
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

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        """Launch on the current device and stream; or add the launch to the plan that planned tensors belong to.

        Args:
            grid: CTAs along each axis; nothing happens if one of them is 0.
            arguments: The runtime arguments in the kernel's order: tensors, ``None``, integers, floats, tensor
                descriptors, and tuples of them.

        Raises:
            TypeError: There are more or fewer arguments than runtime parameters.
        """
        if len(arguments) != self._runtime:
            raise TypeError(f"{self._kernel.fn.__name__} takes {self._runtime} arguments, got {len(arguments)}")
        if 0 in grid:
            return
        builder = next((found for found in map(_builder_of, leaves(arguments)) if found is not None), None)
        if builder is not None:
            builder.launch(KernelLaunch(self._kernel, grid, arguments, self._constants, self._keywords))
        else:
            self._kernel[grid](*arguments, **self._keywords)


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


def leaves(argument: Any) -> Iterator[Any]:
    """Yield what possibly nested tuples of arguments hold."""
    if isinstance(argument, tuple):
        for each in argument:
            yield from leaves(each)
    else:
        yield argument


def map_leaves(function: Callable[[Any], Any], argument: Any) -> Any:
    """Return an argument with a function applied to what its tuples hold; the types of the tuples stay."""
    if not isinstance(argument, tuple):
        return function(argument)
    made = [map_leaves(function, each) for each in argument]
    return type(argument)(*made) if hasattr(argument, "_fields") else tuple(made)


class _BoundDevices(threading.local):
    """Devices whose CUDA context this thread has been given."""

    def __init__(self) -> None:
        self.devices: set[torch.device] = set()


_BOUND = _BoundDevices()


def blocks_of_heads(heads: int, blocks: int) -> Grid:
    """Return a grid of at least so many blocks for each head; only the first axis takes more than 65,535 CTAs."""
    layers = max(1, -(-blocks // MAX_CTAS))
    return heads, -(-blocks // layers), layers


def settings() -> tuple[Any, ...]:
    """Return the settings that Triton compiles a kernel anew for."""
    found: tuple[Any, ...] = _read_settings(triton.knobs)
    return found


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one for the launches of a call.

    A CPU, where the interpreter runs kernels, needs nothing.
    """
    if device.type != "cuda":
        return nullcontext()
    _bind_context(device)
    is_current = device.index is None or device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(device)


def _bind_context(device: torch.device) -> None:
    """Give this thread the context of a CUDA device, which a new thread lacks before its first call of CUDA.

    Triton's own launch takes care of that too late: the driver encodes tensor descriptors before it.
    """
    if device not in _BOUND.devices:
        with torch.cuda.device(device):
            # Allowed while a graph is captured, as most calls are not.
            torch.cuda.Event().record()  # type: ignore[no-untyped-call]
        _BOUND.devices.add(device)


def current_stream() -> int:
    """Return the current stream of the current device."""
    driver: Any = triton.runtime.driver.active
    return int(driver.get_current_stream(driver.get_current_device()))


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
