"""Timing of kernels: beside interleaved runs, isolated ones; graphs, memory and the copy bandwidth of a device."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from dma_eval.bench.timing import FAILURES, Clock, Run, capture, time_interleaved
from dma_eval.errors import one_line
from torch import Tensor

Name = TypeVar("Name")
COPY_SECONDS = 0.5


def time_isolated(runs: Sequence[Run], device: torch.device, *, seconds: float, milliseconds: float) -> float:
    """Repeat runs that take about so many ``milliseconds`` together, and return the median time of the second half.

    On an H200, 0.8 ``seconds`` give the same times as 1.5.
    """

    def chain() -> None:
        for run in runs:
            run()

    clock = Clock(device, reads=0)
    for _ in range(max(4, round(1e3 * seconds / milliseconds))):
        clock.record(chain)
    times = clock.milliseconds()
    return statistics.median(times[len(times) // 2 :])


def copy_bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Return the bytes per second that a copy of ``size`` bytes within a device reads and writes."""
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    timing = time_interleaved({"copy": lambda: target.copy_(source)}, device, seconds=COPY_SECONDS)["copy"]
    return 2e3 * size / timing.median


def captured(runs: Mapping[Name, Run], device: torch.device) -> tuple[dict[Name, Run], dict[Name, str]]:
    """Return CUDA graph replays of the runs, and the reason for each run that cannot be captured; nothing on a CPU."""
    replays: dict[Name, Run] = {}
    refusals: dict[Name, str] = {}
    for name, run in runs.items() if device.type == "cuda" else ():
        try:
            replays[name] = capture(run, device)
        except FAILURES as error:
            torch.cuda.synchronize(device)
            refusals[name] = one_line(error)
    return replays, refusals


def extra_memory(run: Run, device: torch.device) -> int | None:
    """Return the most memory that is allocated during a run, its result left out (``None`` on a CPU)."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    assert isinstance(result, Tensor)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - result.nbytes
