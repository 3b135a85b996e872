"""Compile what a call would launch, for any NVIDIA chip and without one.

Inside :func:`compile_only` a Triton launch compiles for the chip in question and returns; the launches' compiled
kernels are collected. Tensors stay on the CPU and are not read.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from dma_kernels import fused
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that a program may have (CUDA programming guide, technical specifications)."""


class _CompileOnlyDriver:
    """The part of a Triton driver that compiling asks for."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel and what the assembler says of it.

    Attributes:
        name: The kernel's name.
        ptx: Its PTX.
        shared: Bytes of shared memory.
        registers: Registers of a thread.
        stack: Bytes of local memory of a thread; more than 0 are spilled registers.
    """

    name: str
    ptx: str
    shared: int
    registers: int
    stack: int


@contextmanager
def compile_only(arch: int) -> Iterator[list[Compiled]]:
    """Compile every launch for ``arch`` (90 is Hopper) and collect the results."""
    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.device_caches.clear()  # they do not know the chip
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        registers, stack = _resources(kernel.asm["cubin"])
        compiled.append(Compiled(self.__name__, kernel.asm["ptx"], kernel.metadata.shared, registers, stack))
        return kernel

    previous = driver._active  # the property would look for a chip
    driver.set_active(_CompileOnlyDriver(arch))
    try:
        with (
            mock.patch.object(JITFunction, "run", compile_launch),
            mock.patch.object(fused, "device_arch", lambda device: arch),
            mock.patch.object(fused, "is_interpreted", lambda: False),
        ):
            yield compiled
    finally:
        driver._active = previous


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the stack bytes of a thread that a cubin's only kernel needs."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    return int(registers), int(stack)
