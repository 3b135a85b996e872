"""The kernels over a cache compiled ahead of time for chips that are not at hand: what runs, and what it takes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest
from compiled_calls import CompiledCalls

pytestmark = pytest.mark.slow

SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that a program may have (CUDA programming guide, technical specifications)."""

STEPS = [
    *(f"{format}:{arch}:128:128:1" for format in ("int8", "int4") for arch in SHARED_MEMORY),
    *(f"{format}:{arch}:256:256:16" for format in ("int8", "int4") for arch in (80, 90, 100, 120)),
    *(f"int4-equalized:{arch}:128:128:1" for arch in (80, 90, 100, 120)),
    "int4:90:80:96:1:softcap",
    "int8:90:128:128:1:fp16",
    "int4:80:128:128:1:fp16",
    "int8:80:64:64:16:sinks",
]
CHUNKS = [f"{format}:{arch}:128:128:200" for format in ("int8", "int4") for arch in (80, 90, 100, 120)]


@pytest.fixture(scope="module")
def kernels(compiled_by: Callable[[str], CompiledCalls]) -> CompiledCalls:
    return compiled_by("aot_decode.py")


@pytest.mark.parametrize("step", STEPS)
def test_a_step(step: str, kernels: CompiledCalls) -> None:
    """One kernel answers queries; another, which starts early, combines parts of heads and stores new keys."""
    decode, end = kernels[step]
    assert (decode["name"], end["name"]) == ("decode_kernel", "combine_kernel")
    arch = int(step.split(":")[1])
    for kernel, early in ((decode, "launch_dependents"), (end, "wait")):
        assert kernel["shared"] <= SHARED_MEMORY[arch], kernel["name"]
        assert (f"griddepcontrol.{early}" in kernel["ptx"]) == (arch >= 90), kernel["name"]
    assert end["stack"] == 0 or "256" in step
    assert decode["loop_spills"] == 0 or "256" in step


@pytest.mark.parametrize("step", [step for step in STEPS if step.endswith(":128:128:1")])
def test_what_a_tile_takes(step: str, kernels: CompiledCalls) -> None:
    """A tile takes its products, of integers, and 8 for lows, 16 raw keys 16; codes come in copies of 16 bytes.

    Rotated queries have more than 16 bits, so that their product with the lows takes 8 more.
    """
    ptx = kernels[step][0]["ptx"]
    kinds = re.findall(r"mma\.sync\.aligned\.(m16n8k\d+)\.row\.col\.(?:satfinite\.)?(\w+)\.", ptx)
    assert Counter(kinds) == {("m16n8k32", "s32"): 64, ("m16n8k16", "f32"): (16 if "equalized" in step else 8) + 16}
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", ptx)
    assert set(copies) == {"0x10"}


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_chunk(chunk: str, kernels: CompiledCalls) -> None:
    """Raw and dequantised keys in 16 bits by a kernel that spills nothing, then the portable prefill kernel."""
    names = [kernel["name"] for kernel in kernels[chunk]]
    assert names == ["restore_kernel", "append_kernel", "restore_kernel", "prefill_kernel"]
    assert kernels[chunk][0]["stack"] == 0
    stores = re.findall(r"st\.global(?:\.\w+)*", kernels[chunk][0]["ptx"])
    assert all(".v4" in store for store in stores)
