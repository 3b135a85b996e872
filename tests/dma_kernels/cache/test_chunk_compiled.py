"""The kernels of a chunk over a cache, compiled ahead of time for chips that are not at hand."""

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

SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that a program may have (CUDA programming guide, technical specifications)."""

Kernels = dict[str, list[dict[str, Any]]]

CHUNKS = [
    "kv4:80:128:128",
    "kv4:90:128:128",
    "kv4:90:64:64",
    "kv4:100:128:128",
    "kv4:120:128:128",
    "kv8:80:128:128",
    "kv8:90:128:128",
    "kv8:90:64:64",
    "k8v4:90:128:128",
]
BODIES = [
    f"{recipe}:{arch}:{dims}:body"
    for arch in (80, 90, 100, 120)
    for recipe, dims in (
        ("kv4", "64:64"),
        ("kv4", "128:128"),
        ("kv4", "192:128"),
        ("kv4", "256:256"),
        ("kv4-q8", "80:96"),
        ("kv8", "128:128"),
        ("e4m3-q16", "128:128"),
        ("blocks", "128:128"),
    )
]


@pytest.fixture(scope="module")
def compiled() -> Kernels:
    """The kernels of every chunk, compiled in a process of its own, without the interpreter."""
    program = Path(__file__).parents[2] / "support" / "aot_chunk.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, program, *CHUNKS, *BODIES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    kernels: Kernels = json.loads(done.stdout)
    return kernels


@pytest.mark.parametrize("chunk", CHUNKS)
def test_what_is_launched(chunk: str, compiled: Kernels) -> None:
    # Ampere has no units for values in E4M3.
    needed = [] if chunk.startswith("kv8:90") else ["dequantize_kernel"]
    names = [kernel["name"] for kernel in compiled[chunk]]
    assert names == ["high_tiles_kernel", "_append_kernel", *needed, "prefill_kernel"]
    assert all(kernel["shared"] <= SHARED_MEMORY[int(chunk.split(":")[1])] for kernel in compiled[chunk])


@pytest.mark.parametrize("chunk", CHUNKS)
def test_nothing_is_spilled_that_counts(chunk: str, compiled: Kernels) -> None:
    """No register of the kernels around attention, and of attention none in the loop over low tiles."""
    for kernel in compiled[chunk]:
        assert kernel["loop_spills"] == 0, kernel["name"]
        assert kernel["stack"] == 0 or kernel["name"] == "prefill_kernel"


@pytest.mark.parametrize("body", BODIES)
def test_dequantising_fits(body: str, compiled: Kernels) -> None:
    """No register is spilled, and programs share a multiprocessor, but for the widest heads."""
    (kernel,) = compiled[body]
    assert kernel["name"] == "dequantize_kernel"
    assert kernel["stack"] == 0
    programs = 1 if "256" in body else 2
    assert programs * 16 * 32 * kernel["registers"] <= 65_536
    assert kernel["shared"] <= 101_376 // 2


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_results_are_stored_16_bytes_at_a_time(arch: int, compiled: Kernels) -> None:
    (kernel,) = compiled[f"kv4:{arch}:128:128:body"]
    stores = re.findall(r"st\.global(?:\.\w+)*", kernel["ptx"])
    assert stores
    assert all(".v4" in store for store in stores)
