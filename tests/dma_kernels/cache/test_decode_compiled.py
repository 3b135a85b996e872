"""The decode kernel compiled ahead of time for chips that are not at hand: its units, and what it takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that a program may have (CUDA programming guide, technical specifications)."""

# The matrix instructions of each step, as regular expressions: RECIPE:ARCH:HEAD_DIM:QUERIES[:OPTION]. On Hopper
# Triton 3.6 multiplies E4M3 numbers with 8 columns as fp16 numbers, which decoding, bound by memory, does not notice.
UNITS = {
    "kv8:80:128:1": [r"mma.sync.*s8\.s8", "mma.sync.*bf16"],
    "kv8:89:128:1": [r"mma.sync.*s8\.s8", r"mma.sync.*e4m3\.e4m3"],
    "kv8:90:128:1": [r"(mma.sync|wgmma).*s8\.s8", r"(mma.sync|wgmma).*(e4m3\.e4m3|f16\.f16)"],
    "kv8:90:128:16": [r"(mma.sync|wgmma).*s8\.s8", r"(mma.sync|wgmma).*e4m3\.e4m3"],
    "kv8:90:128:1:softcap": [r"(mma.sync|wgmma).*s8\.s8"],
    "kv8:90:128:1:sinks": [r"(mma.sync|wgmma).*s8\.s8"],
    "kv8:80:128:1:softcap": [r"mma.sync.*s8\.s8"],
    "kv8-q16:90:64:1": [r"(mma.sync|wgmma).*s8\.s8"],
    "kv8:100:128:1": [r"mma.sync.*s8\.s8", r"mma.sync.*f16\.f16"],
    "kv8:100:256:1": [r"mma.sync.*s8\.s8", r"mma.sync.*f16\.f16"],
    "kv8:100:256:16": [r"(mma.sync|tcgen05.mma).*(s8\.s8|kind::i8)"],
    "kv8:120:128:1": [r"mma.sync.*s8\.s8", r"mma.sync.*e4m3\.e4m3"],
    "kv4:80:128:1": [r"mma.sync.*f16\.f16"],
    "kv4:90:128:1": [r"mma.sync.*f16\.f16"],
    "kv4:90:128:1:softcap": [r"mma.sync.*f16\.f16"],
    "kv4:90:128:16": [r"(mma.sync|wgmma).*f16\.f16"],
    "kv4:100:128:1": [r"mma.sync.*f16\.f16"],
    "kv4:100:256:1": [r"mma.sync.*f16\.f16"],
    "kv4:120:256:1": [r"mma.sync.*f16\.f16"],
}
PLAIN = ("kv8:90:128:1", "kv4:90:128:1", "kv8:80:128:1", "kv4:80:128:1", "kv4:100:128:1", "kv8:120:128:1")
NOT_PLAIN = ("kv8:90:128:1:softcap", "kv8:90:128:1:sinks", "kv8:80:128:1:softcap", "kv4:90:128:1:softcap")


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[dict[str, Any]]]:
    """The kernels of every step, compiled in a process of its own, without the interpreter."""
    program = Path(__file__).parents[2] / "support" / "aot_decode.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, program, *UNITS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def compiled(kernels: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The second kernel of every step: the one that attends."""
    return {step: found[1] for step, found in kernels.items()}


@pytest.mark.parametrize("step", UNITS)
def test_new_keys_are_stored_on_every_chip(step: str, kernels: dict[str, list[dict[str, Any]]]) -> None:
    append = kernels[step][0]
    assert append["name"] == "_append_kernel"
    assert append["shared"] <= SHARED_MEMORY[int(step.split(":")[1])]


@pytest.mark.parametrize("step", UNITS)
def test_products_run_on_the_units_of_the_chip(step: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[step]["name"] == "decode_kernel"
    for unit in UNITS[step]:
        assert re.search(unit, compiled[step]["ptx"]), f"no {unit} in the PTX"


@pytest.mark.parametrize("step", UNITS)
def test_shared_memory_is_within_the_chips_limit(step: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[step]["shared"] <= SHARED_MEMORY[int(step.split(":")[1])]


@pytest.mark.parametrize("step", PLAIN + NOT_PLAIN)
def test_no_register_is_spilled(step: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[step]["stack"] == 0


@pytest.mark.parametrize("step", ["kv8:90:128:1", "kv4:90:128:1", "kv4:80:128:1"])
def test_codes_come_by_asynchronous_copies_of_16_bytes(step: str, compiled: dict[str, dict[str, Any]]) -> None:
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", compiled[step]["ptx"])
    assert len(copies) >= 16


def test_4_bit_codes_become_numbers_by_masks_and_one_product(compiled: dict[str, dict[str, Any]]) -> None:
    """Per eight codes one low mask, one high mask, and four products of pairs."""
    ptx = compiled["kv4:90:128:1"]["ptx"]
    unpacked = len(re.findall(r"and\.b32 low,", ptx))
    assert unpacked >= 64
    assert len(re.findall(r"mul\.rn\.f16x2", ptx)) == 4 * unpacked


def test_programs_share_a_hopper_multiprocessor_as_tuning_counts(compiled: dict[str, dict[str, Any]]) -> None:
    for step, programs, warps in (("kv8:90:128:1", 2, 4), ("kv4:90:128:1", 4, 2)):
        registers = -(-compiled[step]["registers"] // 8) * 8
        assert programs * warps * 32 * registers <= 65_536
        assert programs * (compiled[step]["shared"] + 1024) <= 233_472  # CUDA keeps 1 KB for each program
