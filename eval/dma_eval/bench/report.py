"""What is written and shown of a benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from dma_kernels.runtime.chip import resolve_backend

from dma_eval import console
from dma_eval.files import write_json
from dma_eval.show.pages import Columns, Page, Table, make_table, of

from .results import AttentionResult, BenchReport, GenerateResult, SpeedReport, SpeedResult

GIB = 1 << 30


def record(path: Path | None, report: SpeedReport, results: list[Any], found: Iterable[Any]) -> None:
    """Append what is found to a list of the report, and write the report after each."""
    for result in found:
        results.append(result)
        if path is not None:
            write_json(report, path, indent=1)


def finish(
    path: Path | None, report: SpeedReport, title: str, tables: list[Table], results: Sequence[SpeedResult]
) -> int:
    """Show tables and failures, and name the file. Return 1 if nothing ran on some shape or context, else 0."""
    console.print_page(Page(title, tables, warnings=failures(results) + _reference_runs(report, results)))
    if path is not None:
        console.print_wrote(path)
    ran = {place_of(result) for result in results if result.failure is None}
    return 0 if all(place_of(result) in ran for result in results) else console.FAILED


def tables(report: BenchReport, title: str) -> list[Table]:
    """Return the tables of attention and of all runs."""
    shown = []
    if report.attention:
        attention: Columns = {
            "attention": lambda r: r.label,
            "call": lambda r: r.call,
            "keys": lambda r: f"{r.shape.length:,}",
            "ms": of("milliseconds", ",.3f"),
            "speed": of("speedup", ".2f", "x"),
        }
        shape = report.attention[0].shape
        shown.append(
            make_table(attention, report.attention, f"One layer, batch {shape.batch}, {shape.family}, random inputs")
        )
    runs: Columns = {
        "run": lambda r: r.label,
        "context": lambda r: f"{r.context:,}",
        "first token": of("first_token_seconds", ".3f", " s"),
        "step": of("step_milliseconds", ".2f", " ms"),
        "graph steps": of("graph_steps", ".0f"),
        "tokens/s": of("tokens_per_second", ",.1f"),
        "speed": of("speedup", ".2f", "x"),
        "cache": of("cache_bytes", ",.2f", " GiB", factor=1 / GIB),
        "peak": of("peak_bytes", ",.2f", " GiB", factor=1 / GIB),
    }
    return [*shown, make_table(runs, report.results, f"generate: {title}")]


def place_of(result: Any) -> str:
    """Return what a result was measured on: its shape, or its context."""
    if isinstance(result, GenerateResult):
        return f"{result.context:,} tokens"
    return f"{result.call}, {result.shape}" if isinstance(result, AttentionResult) else str(result.shape)


def failures(results: Sequence[SpeedResult]) -> list[str]:
    """Return what did not run, or cannot be a CUDA graph, and why, once for all shapes that share the reason."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        graph = getattr(result, "graph_failure", None)
        for what, reason in (("did not run", result.failure), ("cannot be a CUDA graph", graph)):
            if reason is not None:
                reasons.setdefault((result.label, what, reason), []).append(place_of(result))
    return [
        f"{label} {what}: {reason} ({places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''})"
        for (label, what, reason), places in reasons.items()
    ]


def _reference_runs(report: SpeedReport, results: Sequence[SpeedResult]) -> list[str]:
    """Return a warning that names what the PyTorch reference computed: its speed is not that of the kernels."""
    device = torch.device("cpu" if report.device.capability is None else "cuda")
    ran = {result.label: result.config["backend"] for result in results if result.config and not result.failure}
    dtype = getattr(torch, report.dtype)
    labels = [label for label, backend in ran.items() if resolve_backend(backend, device, dtype) == "reference"]
    where = f"({device.type}, {report.dtype}); kernels need a CUDA device, and bfloat16 or float16"
    return [f"{', '.join(labels)} ran in the PyTorch reference, not in the kernels {where}"] if labels else []
