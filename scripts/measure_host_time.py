"""Measure the host time of a warm eager prefill call.

    python scripts/measure_host_time.py --out host-time.json

Calls come in bursts. The GPU finishes one before the next begins, so the host never waits for the queue.
Implementations take turns. The inputs are random, bf16, causal, with 32 query and 8 kv heads of 128 channels.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from dma_eval.bench.timing import FAILURES, Run
from dma_eval.load.backends import Backend
from dma_eval.results import here_and_now

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from kernel_bench.command import parse_compared
from kernel_bench.inputs import random_inputs
from kernel_bench.results import PrefillShape
from prefill import PEERS, prepare

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


def write(results: list[dict[str, Any]], out: Path) -> None:
    """Write the results so far, one on a line, and print the last one."""
    facts = here_and_now()
    report = facts | {"environment": asdict(facts["environment"]), "results": results}
    out.write_text(json.dumps(report).replace(', {"', ',\n{"') + "\n", encoding="utf-8")
    typer.echo(" ".join(f"{key}={value}" for key, value in results[-1].items()))


def main(
    out: Annotated[Path, typer.Option(help="JSON file of the results.")],
    bursts: Annotated[int, typer.Option(help="Bursts of each implementation.")] = 60,
) -> None:
    """Measure every shape."""
    results: list[dict[str, Any]] = []
    implementations = parse_compared(IMPLEMENTATIONS, "IMPLEMENTATIONS", tuple(PEERS), caches=False)
    for each in SHAPES:
        times = measure(each, implementations, bursts)
        results.append({"shape": str(each)} | {f"{label}_us": round(taken, 1) for label, taken in times.items()})
        write(results, out)


if __name__ == "__main__":
    typer.run(main)
