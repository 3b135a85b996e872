"""Every compute path compiled ahead of time: matrix instructions, registers and shared memory on each chip."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest
from compiled_calls import CompiledCalls
from dma_kernels.runtime.chip import triton_version

pytestmark = pytest.mark.slow

SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that a CTA may have (CUDA programming guide, technical specifications)."""

# Matrix instructions in PTX, as regular expressions: of Hopper, of Ampere, Ada and consumer Blackwell, of Blackwell.
S8, FP8, FP8_E5M2, BF16 = (
    rf"wgmma.mma_async.*{kind}" for kind in (r"s32\.s8\.s8", r"f32\.e4m3\.e4m3", r"f32\.e5m2\.e5m2", "bf16")
)
MMA_S8, MMA_FP8, MMA_FP8_E5M2, MMA_BF16 = (
    rf"mma.sync.*{kind}" for kind in (r"s8\.s8", r"e4m3\.e4m3", r"e5m2\.e5m2", "bf16")
)
MMA_NVFP4, MMA_MXFP4, MMA_MXFP8 = (
    rf"mma.sync.*kind::{kind}"
    for kind in (r"mxf4nvf4\.block", r"mxf4nvf4\.block_scale.*ue8m0", r"mxf8f6f4\.block_scale")
)
TC_I8, TC_F16, TC_F8, TC_MXF4, TC_NVF4, TC_MXF8 = (
    rf"tcgen05.mma.*kind::{kind}"
    for kind in ("i8", "f16", "f8f6f4", r"mxf4\.block_scale", r"mxf4nvf4\.block_scale", r"mxf8f6f4\.block_scale")
)
CALLS = {
    "int8:80:128:skip": ([MMA_S8, MMA_BF16], 2),
    "paper:80:128": ([MMA_BF16], 2),
    "int8:89:128": ([MMA_S8, MMA_FP8, MMA_BF16], 2),
    "paper:89:128": ([MMA_FP8_E5M2], 2),
    "int8:90:128:short": ([BF16], 2),
    "int8:90:80": ([S8, FP8], 2),
    "nvfp4-keys:90:80": ([BF16], 2),
    "int8:90:64:mask": ([S8, FP8], 2),
    "int8:90:128:skip": ([S8, FP8], 2),
    "int8-pv16:90:128": ([S8, BF16], 2),
    "paper:90:64": ([FP8_E5M2, BF16], 2),
    "fp4:90:128:padded": ([BF16, FP8], 16),  # reads bounds back, which are scalars
    "nvfp4-keys:90:64": ([BF16], 3),
    "int8:90:128:long": ([S8, FP8, BF16], 2),
    "int8:90:256:long-mask": ([S8, FP8], 6),  # the output takes half of the registers
    "int8:90:64:long-skip": ([S8, FP8], 30),  # the branch around a tile, without a free register
    "paper:90:128:long": ([FP8_E5M2, BF16], 4),
    "fp4:90:128:long-skip": ([BF16, FP8], 2),
    "int8:100:128": ([TC_I8, TC_F8, TC_F16], 2),
    "paper:100:128": ([TC_MXF4, TC_MXF8], 2),
    "paper:100:256": ([TC_F8, TC_F16], 2),
    "fp4:100:128:skip": ([TC_NVF4], 5),  # depends on the order of the kernel's parameters
    "int8:120:128": ([MMA_S8, MMA_FP8], 2),
    "paper:120:128": ([MMA_MXFP4, MMA_MXFP8], 2),
    "fp4:120:128": ([MMA_NVFP4, MMA_BF16, MMA_FP8], 2),
}
"""Of a call, RECIPE:ARCH:HEAD_DIM[:OPTION]: matrix instructions, and most spills in the loop over low tiles.

Every compute path of a chip, each kernel on Hopper, and masks, padding and skipping, which change its loop most. One or
two scalars may be spilled among some 550 instructions; a spilled tile would take 32 reads and writes.
"""

if triton_version() < (3, 9):
    # Data-centre Blackwell has neither block-scaled products nor INT8 in tensor memory, and more scalars are spilled.
    CALLS |= {
        "int8:90:80": ([S8, FP8], 4),
        "int8:90:64:mask": ([S8, FP8], 16),
        "int8:100:128": ([MMA_S8, TC_F8, TC_F16], 9),
        "paper:100:128": ([TC_F8, TC_F16], 2),
        "fp4:100:128:skip": ([TC_F16, TC_F8], 5),
        "int8:120:128": ([MMA_S8, MMA_FP8], 3),
    }

LONG = [call for call in CALLS if ":long" in call]
"""Calls of the warp-specialized kernel."""

SHORT = [call for call in CALLS if re.fullmatch(r"[\w-]+:90:(64|96|128)(:(padded|mask|skip))?", call)]
"""Calls of the one-warpgroup kernel."""


def calls(names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("call", [*names])


@pytest.fixture(scope="module")
def compiled(compiled_by: Callable[[str], CompiledCalls]) -> CompiledCalls:
    return compiled_by("aot.py")


@calls(CALLS)
def test_a_call_uses_the_matrix_instructions_and_fits_in_the_memory_of_the_chip(
    call: str, compiled: CompiledCalls
) -> None:
    attention = compiled[call][-1]
    kind = "warp_specialized_kernel" if call in LONG else "one_warpgroup_kernel" if call in SHORT else "kernel"
    assert attention["name"] == f"prefill_{kind}"
    units, most_spills = CALLS[call]
    for unit in units:
        assert re.search(unit, attention["ptx"]), f"no {unit} in the PTX"
    for kernel in compiled[call]:
        assert kernel["shared"] <= SHARED_MEMORY[int(call.split(":")[1])], kernel["name"]
    assert attention["loop_spills"] <= most_spills


@calls(CALLS)
def test_ctas_launched_early_write_nothing_before_they_wait(call: str, compiled: CompiledCalls) -> None:
    names = [kernel["name"] for kernel in compiled[call]]
    use_pdl = int(call.split(":")[1]) >= 90 and "quantize_kernel" in names and "query_global_scale_kernel" not in names
    for kernel in compiled[call]:
        before, *after = kernel["ptx"].split("griddepcontrol.wait")
        name = kernel["name"]
        waits = name in ("prefill_warp_specialized_kernel", "prefill_one_warpgroup_kernel") or (
            use_pdl and name == "quantize_q_kernel"
        )
        assert len(after) == int(waits), name
        assert not after or not re.search(r"\b(st\.global|red\.|atom\.)", before), name
        # Unquantized queries are the caller's, so their load may precede the wait. A packed bitmask's may not.
        is_asked = name == "prefill_one_warpgroup_kernel" and not {"quantize_q_kernel", "pack_mask_kernel"} & set(names)
        assert not after or before.count("cp.async.bulk") == is_asked, name


@calls([*SHORT, "int8:90:80"])
def test_three_ctas_share_a_hopper_sm(call: str, compiled: CompiledCalls) -> None:
    kernel = compiled[call][-1]
    ctas = 4 if call.split(":")[2] == "64" else 3
    assert ctas * 4 * 32 * kernel["registers"] <= 65_536
    assert ctas * (kernel["shared"] + 1024) <= 233_472  # CUDA reserves 1 KB per CTA


@calls(["nvfp4-keys:90:80", "nvfp4-keys:90:64"])
def test_two_ctas_with_16_bit_operands_share_a_hopper_sm(call: str, compiled: CompiledCalls) -> None:
    """Of the attention kernel, and of its quantizer: with a whole tile per CTA only one fitted, and it spilled."""
    name = "prefill_kernel" if call.endswith(":80") else "quantize_kernel"
    (kernel,) = [kernel for kernel in compiled[call] if kernel["name"] == name]
    assert 2 * 8 * 32 * kernel["registers"] <= 65_536
    assert 2 * (kernel["shared"] + 1024) <= 233_472
    assert kernel["stack"] == 0 or name == "prefill_kernel"


@calls(LONG)
def test_the_warp_specialized_kernel_loads_by_tma_and_divides_the_registers(call: str, compiled: CompiledCalls) -> None:
    kernel = compiled[call][-1]
    assert "cp.async.bulk.tensor" in kernel["ptx"]
    assert "cp.async.cg" not in kernel["ptx"]
    # Registers at launch (640, 512 or 384 threads), of the producer warp and of the consumer warpgroups.
    groups = 4 if call.startswith("int8:90:64:") else 2 if int(call.split(":")[2]) > 128 else 3
    start, *later = {2: (168, 24, 240), 3: (128, 24, 160, 168), 4: (96, 24, 112, 120)}[groups]
    assert kernel["registers"] == start
    for registers in later:
        assert re.search(rf"setmaxnreg\.\w+\.sync\.aligned\.u32\s+{registers};", kernel["ptx"])


@calls(LONG + SHORT)
def test_each_product_is_waited_for_once(call: str, compiled: CompiledCalls) -> None:
    """With too few registers, the assembler makes every instruction of a product wait for the previous one."""
    kernel = compiled[call][-1]
    assert 0 < 2 * kernel["loop_waits"] <= kernel["loop_products"]


@calls(call for call in LONG if call.endswith("skip"))
def test_the_warps_of_a_warpgroup_meet_between_two_votes(call: str, compiled: CompiledCalls) -> None:
    """Every wait for a stage has a barrier of the warpgroup before it; those for the queries precede the votes."""
    lines = [line.strip() for line in compiled[call][-1]["ptx"].splitlines()]
    lines = [line for line in lines if line and not line.startswith(("//", ".loc"))]
    waits = [i for i, line in enumerate(lines) if line.startswith("mbarrier.try_wait")]
    apart = [i for i in waits if not any(re.match(r"bar\.sync\s+\d+, 128;", line) for line in lines[i - 12 : i])]
    groups = len({match for line in lines for match in re.findall(r"bar\.arrive (\d+), 128;", line)})
    assert 2 <= groups <= 4
    assert len(apart) == groups * (2 if call.startswith("fp4") else 1)
    assert len(waits) > len(apart)


@calls(LONG)
def test_no_store_overlaps_a_barrier(call: str, compiled: CompiledCalls) -> None:
    """A CTA with an overwritten barrier faults when the GPU switches to another process and back."""
    kernel = compiled[call][-1]
    ptx = kernel["ptx"]
    assert kernel["name"] == "prefill_warp_specialized_kernel"
    offsets = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    registers = re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", ptx)
    assert len(registers) == ptx.count("mbarrier.init")
    barriers = {int(offsets[register]) + byte for register in registers for byte in range(8)}
    assert len(barriers) == 8 * len(registers) >= 8 * 3  # queries, and the full barriers of at least two stages
    stores = re.findall(r"st\.shared(?:\.v(\d))?\.b(\d+)\s+\[global_smem(?:\+(\d+))?\]", ptx)
    stored = {
        int(offset or 0) + byte for count, bits, offset in stores for byte in range(int(count or 1) * int(bits) // 8)
    }
    assert stored  # the arguments of the warpgroups
    assert not stored & barriers


@calls(["balanced:80:64:decode-options", "balanced:90:128:decode", "balanced:100:128:decode-63"])
def test_a_short_call_fits_in_shared_memory_and_spills_nothing(call: str, compiled: CompiledCalls) -> None:
    """One kernel attends; the other, by programmatic dependent launch, combines splits."""
    split, combine = compiled[call]
    assert (split["name"], combine["name"]) == ("split_kv_kernel", "combine_splits_kernel")
    arch = int(call.split(":")[1])
    for kernel, early in ((split, "launch_dependents"), (combine, "wait")):
        assert kernel["shared"] <= SHARED_MEMORY[arch]
        assert kernel["loop_spills"] == 0
        assert kernel["stack"] == 0
        assert (f"griddepcontrol.{early}" in kernel["ptx"]) == (arch >= 90)
    if call.endswith(":decode"):  # keys and values are copied in 16 bytes
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", split["ptx"])
        assert set(copies) == {"0x10"}
