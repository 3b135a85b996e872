"""Compile the kernels of a call for any NVIDIA GPU, without one.

Inside :func:`compile_only` a Triton launch compiles for the given chip and returns. The compiled kernels are collected.
Tensors stay on the CPU and are not read. The interpreter permanently replaces the compiler in a process, so tests run
this file as a program (:mod:`compiled_calls`), which reads ``RECIPE:ARCH:HEAD_DIM[:OPTION]``. An option is a name in
``OPTIONS``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from dma_kernels import attention
from dma_kernels.prefill.plan import forget_plans
from dma_kernels.runtime import chip, launch
from prefill_cases import RECIPES
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("", "skip", "long", "long-skip", "short", "decode", "decode-63")},
    "padded": {"kv_range": torch.tensor([[0, 2_048]])},
    "mask": {"mask": torch.empty(1, 1, 2_048, 2_048, dtype=torch.bool)},
    "long-mask": {"mask": torch.empty(1, 1, 1, 65_536, dtype=torch.bool)},
    "decode-options": {
        "softcap": 50.0, "sinks": torch.empty(4), "window": 700, "kv_range": torch.tensor([[0, 2_048]]),
        "mask": torch.empty(1, 1, 1, 2_048, dtype=torch.bool),
    },
}  # fmt: skip
"""Options of a call by name. ``long`` ones run on the warp-specialized kernel, ``short`` has only high tiles,
``decode`` ones have one query or 63, and names that end in ``skip`` have a recipe that skips tiles."""

EIGHT_BIT_PRODUCT = r"\b(IGMMA|QGMMA|IMMA|QMMA|UTCQMMA|UTCIMMA|UTCOMMA|OMMA)\b"
"""Matrix instructions with operands of at most 8 bits, as the disassembler names them."""


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel and its resources. Its loop is the one over low tiles, which dominates the run time."""

    name: str
    ptx: str
    shared: int  # bytes of shared memory
    registers: int  # per thread
    stack: int  # bytes of local memory per thread; more than 0 means spilled registers
    loop_spills: int  # accesses to local memory in the loop
    loop_products: int  # matrix instructions in the loop
    loop_waits: int  # waits for matrix instructions in the loop


@contextmanager
def compile_only(arch: int, sms: int = 2) -> Iterator[list[Compiled]]:
    """Compile every launch for ``arch`` (90 is Hopper) and a number of SMs, and collect the results."""
    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.device_caches.clear()  # plans are not keyed by chip
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if not warmup:  # or else it is compiled together with other kernels, before it is launched
            ptx = kernel.asm["ptx"]
            resources = _resources(kernel.asm["cubin"], has_products="mma" in ptx)
            compiled.append(Compiled(self.__name__, ptx, kernel.metadata.shared, *resources))
        return kernel

    previous = driver._active  # the property would query a GPU
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", arch, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=0: 0,
            get_active_torch_device=lambda: torch.device("cpu"),
        )
    )
    try:
        with (
            mock.patch.object(JITFunction, "run", compile_launch),
            mock.patch.object(launch, "launches_directly", return_value=False),
            mock.patch.object(chip, "of", return_value=chip.Chip(arch, sms)),
            mock.patch.object(chip, "unsupported_reason", return_value=None),
        ):
            yield compiled
    finally:
        driver._active = previous


def _resources(cubin: bytes, *, has_products: bool) -> tuple[int, int, int, int, int]:
    """Return the fields of :class:`Compiled` from ``registers`` on, for a cubin's only kernel.

    A kernel without matrix instructions has no such loop; skipping its disassembly saves half a second.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        code = _cuobjdump("-sass", file.name) if has_products else ""
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    instructions = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.M)]
    loops = []
    for at, text in instructions:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < at:
            start = int(target[1], 16)
            body = [text for where, text in instructions if start <= where <= at]
            eight, any_width = (sum(bool(re.search(p, text)) for text in body) for p in (EIGHT_BIT_PRODUCT, r"MMA\b"))
            if any_width:
                loops.append((-eight, len(body), start, at, body))
    # A backward jump from out-of-line code spans whole loops.
    loops = [a for a in loops if not any(a[2] <= b[2] and b[3] <= a[3] and a is not b for b in loops)]
    # The loop over low tiles has the most 8-bit products, if any. Of its variants the unmasked one is the shortest.
    # Concurrent warpgroups have one each.
    products, length = min(loops, default=(0, 0))[:2]
    hot = [body for loop_products, n, *_, body in loops if loop_products == products and n <= 1.5 * length]
    spills, instructions, waits = (
        max((sum(bool(re.search(pattern, text)) for text in body) for body in hot), default=0)
        for pattern in (r"\b(LDL|STL)\b", r"MMA\b", r"WARPGROUP\.DEPBAR")
    )
    return int(registers), int(stack), spills, instructions, waits


def _cuobjdump(option: str, path: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def compile_call(recipe: str, arch: int, head_dim: int, option: str = "") -> list[Compiled]:
    """Compile a call with 4 query and 2 kv heads."""
    length = 65_536 if option.startswith("long") else 128 if option == "short" else 2_048
    queries = length if not option.startswith("decode") else 63 if option == "decode-63" else 1
    query = torch.empty(1, queries, 4, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    key = torch.empty(1, length, 2, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    with compile_only(arch) as compiled:
        forget_plans()  # plans are not keyed by chip
        attention(
            query, key, key, replace(RECIPES[recipe], skip_threshold=6.0 if option.endswith("skip") else None),
            q_offset=0, scale=0.125, backend="triton", **OPTIONS[option],
        )  # fmt: skip
    return compiled


def answer_calls(compile: Callable[..., list[Compiled]]) -> None:
    """Read calls, one per line with colon-separated arguments, and answer each with its kernels as a line of JSON."""
    for line in sys.stdin:
        arguments = [int(word) if word.isdecimal() else word for word in line.strip().split(":")]
        print(json.dumps([asdict(kernel) for kernel in compile(*arguments)]), flush=True)


if __name__ == "__main__":
    answer_calls(compile_call)
