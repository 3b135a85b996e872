"""The cache kernels compiled ahead of time for several GPUs: instructions, registers and shared memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest
from compiled_calls import CompiledCalls
from sampling import sampled

pytestmark = pytest.mark.slow

SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that a CTA may have (CUDA programming guide, technical specifications)."""

STEPS = [
    *(f"{format}:{arch}:128:128:1" for format in ("int8", "int4") for arch in SHARED_MEMORY),
    *(f"{format}:{arch}:256:256:16" for format in ("int8", "int4") for arch in (80, 90, 100, 120)),
    *(f"int4-equalized:{arch}:128:128:1" for arch in (80, 90, 100, 120)),
    "int4:90:80:96:1:softcap",
    "int8:90:128:128:1:fp16",
    "int4:80:128:128:1:fp16",
    "int8:80:64:64:16:sinks",
    *(f"int8:{arch}:256:256:1:many" for arch in (80, 90, 120)),
]
CHUNKS = [f"{format}:{arch}:128:128:200" for format in ("int8", "int4") for arch in (80, 90, 100, 120)]
IN_CI = {
    *("int8:80:128:128:1", "int4:90:128:128:1", "int8:100:128:128:1", "int4:120:128:128:1"),
    *("int4-equalized:90:128:128:1", "int8:90:256:256:16", "int4:90:128:128:200"),
}
"""Chips, both formats, and what changes the loop: rotated queries, wide heads and many columns, a chunk."""


@pytest.fixture(scope="module")
def kernels(compiled_by: Callable[[str], CompiledCalls]) -> CompiledCalls:
    return compiled_by("aot_decode.py")


@pytest.mark.parametrize("step", sampled(STEPS, IN_CI.__contains__))
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


@pytest.mark.parametrize("step", sampled((x for x in STEPS if x.endswith(":128:128:1")), IN_CI.__contains__))
def test_a_tile_takes_the_expected_instructions(step: str, kernels: CompiledCalls) -> None:
    """A low tile takes 64 integer MMAs and 8 for zero points; 16 high keys take 16; codes are copied in 16 bytes.

    Rotated queries have more than 16 bits: their product with the zero points takes 8 more.
    """
    ptx = kernels[step][0]["ptx"]
    kinds = re.findall(r"mma\.sync\.aligned\.(m16n8k\d+)\.row\.col\.(?:satfinite\.)?(\w+)\.", ptx)
    assert Counter(kinds) == {("m16n8k32", "s32"): 64, ("m16n8k16", "f32"): (16 if "equalized" in step else 8) + 16}
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", ptx)
    assert set(copies) == {"0x10"}


@pytest.mark.parametrize("chunk", sampled(CHUNKS, IN_CI.__contains__))
def test_a_chunk_restores_then_runs_the_portable_kernel(chunk: str, kernels: CompiledCalls) -> None:
    """The restore kernel spills no registers."""
    names = [kernel["name"] for kernel in kernels[chunk]]
    assert names == ["restore_kernel", "append_kernel", "restore_kernel", "prefill_kernel"]
    assert kernels[chunk][0]["stack"] == 0
    stores = re.findall(r"st\.global(?:\.\w+)*", kernels[chunk][0]["ptx"])
    assert all(".v4" in store for store in stores)
