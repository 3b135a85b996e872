"""How every benchmark measures speed, also the scripts of ``benchmarks``.

Implementations are interleaved, round after round, so that drift (clocks, other tenants) affects all of them equally.
Results are medians. On a CUDA device, stream events time a run. Large reads before it flush the L2 cache and let the
host run ahead, as it does inside a model. Launch overhead counts as far as the device waits for it. A GPU at its power
limit lowers its clock. Interleaved runs share one clock, so their times relate about as their cycles do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dma_eval.errors import UserError
from dma_eval.load.models import parse_device
from dma_eval.results import here_and_now

from .results import DeviceFacts

Run = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
FAILURES = (RuntimeError, ValueError, TypeError, AssertionError, ImportError, MemoryError, UserError)
"""What an implementation raises if it cannot compute a call. ``torch.OutOfMemoryError`` is a ``RuntimeError``."""
_READS = 4
"""Reads before a run. They take about 280 us on an H200, longer than the launches of any run here."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Repeated runs of one implementation, in milliseconds."""

    median: float
    fast: float  # the first quartile
    slow: float  # the third quartile
    repeats: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        fast, median, slow = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
        return cls(median=median, fast=fast, slow=slow, repeats=len(times))


def time_interleaved(
    runs: Mapping[Name, Run], device: torch.device, *, seconds: float, min_repeats: int = 3, max_repeats: int = 100
) -> dict[Name, Timing]:
    """Time compiled implementations by name, one run of each per round, in about ``seconds``."""
    clock = Clock(device)
    start = time.perf_counter()
    for run in runs.values():
        clock.record(run)
    clock.milliseconds()
    one_round = time.perf_counter() - start
    repeats = min(max(round(seconds / max(one_round, 1e-9)), min_repeats), max_repeats)
    for _ in range(repeats):
        for run in runs.values():
            clock.record(run)
    times = clock.milliseconds()
    return {name: Timing.of(times[index :: len(runs)]) for index, name in enumerate(runs)}


def capture(run: Run, device: torch.device) -> Run:
    """Return a replay of ``run`` as a CUDA graph. The replay keeps the tensors of ``run`` and its result alive."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()

    def replay(run: Run = run) -> object:  # a graph knows addresses only
        graph.replay()
        return result

    return replay


def stored_bytes(held: object) -> int:
    """Return the bytes of all tensors in nested containers, those that tensor subclasses are made of included."""
    if isinstance(held, Tensor):
        flatten = getattr(held, "__tensor_flatten__", None)
        return held.nbytes if flatten is None else sum(stored_bytes(getattr(held, name)) for name in flatten()[0])
    if isinstance(held, Mapping):
        return sum(map(stored_bytes, held.values()))
    return sum(map(stored_bytes, held)) if isinstance(held, tuple | list) else 0


def look(args: Any) -> tuple[torch.device, torch.dtype, dict[str, Any]]:
    """Seed PyTorch, and return the device, the dtype and the first fields of a report, as ``args`` say."""
    device = parse_device(args.device)
    torch.manual_seed(args.seed)
    facts = {"dtype": args.dtype, "device": look_at(device), "seed": args.seed}
    return device, getattr(torch, args.dtype), facts | here_and_now()


def look_at(device: torch.device) -> DeviceFacts:
    if device.type != "cuda":
        return DeviceFacts(name=device.type)
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
    )


class Clock:
    """Times runs: on a CUDA device by events, after ``reads`` large reads that replace the contents of the L2 cache."""

    def __init__(self, device: torch.device, reads: int = _READS) -> None:
        self._device = device
        self._reads = reads
        self._times: list[Callable[[], float]] = []
        if device.type == "cuda":
            cached = torch.cuda.get_device_properties(device).L2_cache_size
            self._large = torch.ones(max(cached, 1 << 26), dtype=torch.float32, device=device)  # four times the cache

    def record(self, run: Run) -> None:
        if self._device.type != "cuda":
            start = time.perf_counter()
            run()
            taken = 1e3 * (time.perf_counter() - start)
            self._times.append(lambda: taken)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            for _ in range(self._reads):
                self._large.sum()
            begin.record()
            run()
            end.record()
        self._times.append(partial(begin.elapsed_time, end))

    def milliseconds(self) -> list[float]:
        """Wait for all runs; return their times, and forget them."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        times, self._times = self._times, []
        return [read() for read in times]
