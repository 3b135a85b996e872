"""The timing that benchmarks share, on a CPU."""

from __future__ import annotations

import json
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from dma_eval.bench.results import BenchReport
from dma_eval.bench.timing import Timing, time_interleaved
from dma_eval.files import parse
from kernel_bench.results import DecodeReport, PrefillReport
from kernel_bench.timing import time_isolated

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


def recorder(name, calls):
    return lambda: calls.append(name)


def test_runs_take_turns():
    calls = []
    timings = time_interleaved({n: recorder(n, calls) for n in "abc"}, CPU, seconds=0.0, min_repeats=4)
    assert "".join(calls) == "abc" * 5  # a round to estimate with, and four
    assert {timing.repeats for timing in timings.values()} == {4}


def test_repeats_fill_the_time_within_limits():
    def repeats(seconds):
        return time_interleaved({"run": lambda: time.sleep(0.01)}, CPU, seconds=seconds, max_repeats=8)["run"].repeats

    assert repeats(0.0) == 3
    assert repeats(100.0) == 8


def test_quartiles(monkeypatch):
    clock = iter([0.0, 0.0, 0.001, 0.0] + [t for seconds in (5, 1, 4, 2, 3) for t in (0.0, 1e-3 * seconds)])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timings = time_interleaved({"run": lambda: None}, CPU, seconds=0.0, min_repeats=5)
    assert timings["run"] == Timing(
        median=pytest.approx(3.0), fast=pytest.approx(2.0), slow=pytest.approx(4.0), repeats=5
    )


def test_an_isolated_time_is_the_median_of_the_second_half(monkeypatch):
    clock = iter([t for milliseconds in (9, 8, 7, 3, 5, 4) for t in (0.0, 1e-3 * milliseconds)])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert time_isolated([lambda: None], CPU, seconds=0.06, milliseconds=10.0) == pytest.approx(4.0)
    assert next(clock, None) is None


REPORTS = {"prefill": PrefillReport, "decode": DecodeReport, "generate": BenchReport, "first": BenchReport}


@pytest.mark.parametrize(
    "path", sorted(path for kind in REPORTS for path in BENCHMARKS.rglob(f"{kind}-*.json")), ids=lambda path: path.stem
)
def test_committed_results_have_every_field_of_the_schema(path):
    kind = REPORTS[path.stem.partition("-")[0]]
    report = parse(kind, path.read_bytes())
    assert report.results
    assert report.schema_version == kind.schema_version
    assert json.loads(path.read_text()).keys() == {field.name for field in fields(kind)}
