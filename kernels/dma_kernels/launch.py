"""Launches of Triton kernels that cost little Python time.

Triton's own launch binds every argument, specialises on each, makes a string of it all to look the kernel up, and
compares every global constant that the kernel uses: 50 to 90 microseconds for a kernel of 70 parameters. A
:class:`Launcher` fixes the constexprs and the options once, keys on what can still differ, and launches the compiled
kernel itself, which Triton offers as ``kernel[grid](*arguments)``; Triton's hooks and profilers see it as ever.

The first launch of every key goes through Triton, which compiles. So do all launches where Triton's interpreter runs
the kernels, or where someone has hung a hook before the launch (``add_pre_run_hook``).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

Grid = tuple[int, int, int]

_ALIGNMENT = 16
"""Triton compiles other code for pointers (in bytes) and integers that this divides."""


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
        self._compiled: dict[tuple[Any, ...], CompiledKernel] = {}

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        """Launch on the current device and stream.

        Args:
            grid: Programs along each axis; nothing happens if one of them is 0.
            arguments: The runtime arguments in the kernel's order: tensors, ``None``, integers, floats, and tensor
                descriptors.

        Raises:
            TypeError: There are more or fewer arguments than runtime parameters.
        """
        if len(arguments) != self._runtime:
            raise TypeError(f"{self._kernel.fn.__name__} takes {self._runtime} arguments, got {len(arguments)}")
        if 0 in grid:
            return
        if not launches_directly(self._kernel):
            self._kernel[grid](*arguments, **self._keywords)
            return
        key = self._key(arguments)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments, *self._constants)
            return
        launched = self._kernel[grid](*arguments, **self._keywords)
        if isinstance(launched, CompiledKernel):
            self._compiled[key] = launched

    def _key(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all that Triton may compile differently for; it may tell apart what Triton does not."""
        knobs = triton.knobs
        key = [torch.cuda.current_device(), knobs.runtime.debug, knobs.compilation.instrumentation_mode]
        add = key.append
        for index, is_specialized in self._open:
            argument = arguments[index]
            kind = type(argument)
            if kind is int:
                if not is_specialized:
                    add(int)
                elif argument == 1:  # Triton makes a constant of it
                    add(-1)
                else:
                    add(argument & (_ALIGNMENT - 1))
                if not -(2**31) <= argument < 2**31:
                    add((index, 64))
            elif argument is None or kind is float:
                add(kind)
            elif kind is TensorDescriptor:
                add(argument.base.dtype)
                add((*argument.block_shape, argument.padding))
            else:
                add(argument.dtype)
                misalignment = argument.data_ptr() & (_ALIGNMENT - 1)
                if misalignment:
                    add((index, misalignment))
        return tuple(key)


def launches_directly(kernel: Any) -> bool:
    """Whether compiled kernels may be launched without Triton's own launch."""
    return isinstance(kernel, JITFunction) and not kernel.pre_run_hooks


def matrix_descriptor(tensor: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Describe a contiguous tensor as a matrix of its last dimension, copied in blocks; rows start at 16 bytes."""
    columns = tensor.shape[-1]
    return TensorDescriptor(tensor, [tensor.numel() // columns, columns], [columns, 1], [block_rows, block_columns])
