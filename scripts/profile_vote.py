"""Profile what the vote of tile skipping costs on random inputs, where no tile is skipped, with Nsight Compute.

    python scripts/profile_vote.py --out vote-profile.json

A threshold of infinity compiles no vote, as without a threshold.
"""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from dma_eval.bench.inputs import random_inputs
from dma_eval.bench.results import PrefillShape
from dma_kernels import attention
from study import Writer

import dma_hf

SHAPES = [
    PrefillShape(batch=batch, length=length, query_heads=32, kv_heads=8, head_dim=dim, is_causal=True)
    for batch, length, dim in ((1, 32768, 128), (1, 32768, 64), (4, 8192, 128))
]
THRESHOLDS = (None, math.inf, 6.0)
KERNELS = "regex:prefill_warp_specialized|prefill_multi_cta"
STALLS = (
    *("barrier", "branch_resolving", "dispatch_stall", "gmma", "long_scoreboard", "math_pipe_throttle", "mio_throttle"),
    *("no_instruction", "not_selected", "selected", "short_scoreboard", "wait"),
)
METRICS = {
    "nanoseconds": "gpu__time_duration.sum",
    "cycles": "smsp__cycles_active.avg",
    "instructions": "smsp__inst_executed.sum",
    **{f"{pipe}_instructions": f"smsp__inst_executed_pipe_{pipe}.sum" for pipe in ("alu", "fma", "xu", "lsu", "adu")},
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    **{f"stalled_{stall}": f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio" for stall in STALLS},
}
"""Nsight Compute's metrics by their names in the result. ``stalled_…`` are warps per issued instruction."""


def call_kernels() -> None:
    """Call the kernel of every shape and threshold once under the profiler."""
    for shape, threshold in product(SHAPES, THRESHOLDS):
        tensors = random_inputs(shape, torch.device("cuda"), torch.bfloat16).tensors
        recipe = replace(dma_hf.PRESETS["balanced"].recipe, skip_threshold=threshold)
        attention(*tensors, recipe)  # compiles
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        attention(*tensors, recipe)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def write(printed: str, writer: Writer) -> None:
    """Write a result for every profiled call, from what ``ncu`` printed."""
    lines = [line for line in printed.splitlines() if line.startswith('"')]
    calls = [call for call in csv.DictReader(lines) if call["ID"]]  # the first row has units
    for (shape, threshold), call in zip(product(SHAPES, THRESHOLDS), calls, strict=True):
        values = {name: float(call[metric].replace(",", "")) for name, metric in METRICS.items()}
        writer.add({"shape": str(shape), "skip_threshold": str(threshold), "kernel": call["Kernel Name"], **values})


def main(out: Annotated[Path | None, typer.Option(help="JSON file of the results.")] = None) -> None:
    """Profile every shape. Without --out only call the kernels, as under the profiler."""
    if out is None:
        call_kernels()
        return
    command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "-k", KERNELS, "--csv", "--page", "raw"]
    command += ["--metrics", ",".join(METRICS.values()), sys.executable, __file__]
    write(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout, Writer(out))


if __name__ == "__main__":
    typer.run(main)
