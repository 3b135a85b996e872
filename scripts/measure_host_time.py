"""Measure the host time of a warm eager prefill call: the Python code and the launches.

    python scripts/measure_host_time.py --out host-time.json

Calls come in bursts. The GPU finishes one before the next begins, so the host never waits for the queue.
Implementations take turns. The inputs are random, bf16, causal, with 32 query and 8 kv heads of 128 channels.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated, Any

import torch
import typer
from dma_eval.backends import Backend
from dma_eval.bench.inputs import random_inputs
from dma_eval.bench.prefill import parse_implementations, prepare
from dma_eval.bench.results import PrefillShape
from dma_eval.bench.timing import FAILURES, Run
from study import Out, Writer

SHAPES = [
    PrefillShape(batch=batch, length=length, query_heads=32, kv_heads=8, head_dim=128, is_causal=True)
    for batch, length in ((1, 128), (1, 1024), (1, 2048), (8, 1024))
]
IMPLEMENTATIONS = ["dma_mxfp:balanced", "fa3", "sdpa"]
CALLS = 20
"""Calls of a burst."""


def burst_microseconds(run: Run) -> float:
    """Return the host time per call of one burst."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    return 1e6 * (time.perf_counter() - start) / CALLS


def measure(shape: PrefillShape, implementations: list[Backend], bursts: int) -> dict[str, float]:
    """Return the median host time of a call by implementation; those whose package is missing are left out."""
    inputs = random_inputs(shape, torch.device("cuda"), torch.bfloat16)
    runs = {}
    for each in implementations:
        try:
            runs[each.label] = prepare(each, inputs).run
            burst_microseconds(runs[each.label])  # compiles
        except FAILURES as error:
            runs.pop(each.label, None)
            typer.echo(f"{each.label}: {error}", err=True)
    times: dict[str, list[float]] = {label: [] for label in runs}
    for _ in range(bursts):
        for label, run in runs.items():
            times[label].append(burst_microseconds(run))
    return {label: statistics.median(each) for label, each in times.items()}


def main(out: Out, bursts: Annotated[int, typer.Option(help="Bursts of each implementation.")] = 60) -> None:
    """Measure every shape."""
    writer = Writer(out)
    implementations = parse_implementations(IMPLEMENTATIONS)
    for shape in SHAPES:
        times: dict[str, Any] = {
            f"{label}_us": round(taken, 1) for label, taken in measure(shape, implementations, bursts).items()
        }
        writer.add({"shape": str(shape)} | times)


if __name__ == "__main__":
    typer.run(main)
