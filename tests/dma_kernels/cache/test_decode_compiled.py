"""The cache kernels compiled ahead of time for several GPUs: instructions, registers and shared memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest
from compiled_calls import CompiledCalls

pytestmark = pytest.mark.slow

SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that a CTA may have (CUDA programming guide, technical specifications)."""

STEPS = [
    *("int8:80:128:128:1", "int4:90:128:128:1", "int8:100:128:128:1", "int4:120:128:128:1"),
    *("int4-equalized:90:128:128:1", "int8:90:256:256:16"),
]
"""Chips, both formats, and what changes the loop: rotated queries, wide heads and many columns."""


@pytest.fixture(scope="module")
def kernels(compiled_by: Callable[[str], CompiledCalls]) -> CompiledCalls:
    return compiled_by("aot_decode.py")


@pytest.mark.parametrize("step", STEPS)
def test_a_step_fits_in_shared_memory_and_its_loop_spills_nothing(step: str, kernels: CompiledCalls) -> None:
    """One kernel attends; the other, by programmatic dependent launch, combines splits and stores new KV."""
    decode, combine = kernels[step]
    assert (decode["name"], combine["name"]) == ("decode_kernel", "combine_kernel")
    arch = int(step.split(":")[1])
    for kernel, early in ((decode, "launch_dependents"), (combine, "wait")):
        assert kernel["shared"] <= SHARED_MEMORY[arch], kernel["name"]
        assert (f"griddepcontrol.{early}" in kernel["ptx"]) == (arch >= 90), kernel["name"]
    assert combine["stack"] == 0 or "256" in step
    assert decode["loop_spills"] == 0 or "256" in step


@pytest.mark.parametrize("step", STEPS[:-1])
def test_a_tile_takes_the_expected_instructions(step: str, kernels: CompiledCalls) -> None:
    """A low tile takes 64 integer MMAs and 8 for zero points; 16 high keys take 16; codes are copied in 16 bytes.

    Rotated queries have more than 16 bits: their product with the zero points takes 8 more.
    """
    ptx = kernels[step][0]["ptx"]
    kinds = re.findall(r"mma\.sync\.aligned\.(m16n8k\d+)\.row\.col\.(?:satfinite\.)?(\w+)\.", ptx)
    assert Counter(kinds) == {("m16n8k32", "s32"): 64, ("m16n8k16", "f32"): (16 if "equalized" in step else 8) + 16}
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", ptx)
    assert set(copies) == {"0x10"}


def test_a_chunk_restores_then_runs_the_portable_kernel(kernels: CompiledCalls) -> None:
    """The restore kernel spills no registers."""
    restore, *others = kernels["int4:90:128:128:200"]
    assert [kernel["name"] for kernel in others] == ["append_kernel", "restore_kernel", "prefill_kernel"]
    assert (restore["name"], restore["stack"]) == ("restore_kernel", 0)
    assert all(".v4" in store for store in re.findall(r"st\.global(?:\.\w+)*", restore["ptx"]))
