"""The result file of ``dma-hf bench``: its schema, and what is shown of it. Scripts of ``benchmarks`` extend it.

A file is the JSON of a :class:`BenchReport`. Objects have the fields of the dataclasses below, and every field is
present. ``schema_version`` increases when a field is added, removed or changes its meaning. Numbers that do not exist
(after a failure, or on a CPU) are null.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from dma_kernels.runtime.chip import resolve_backend

from dma_eval import console
from dma_eval.files import write_json
from dma_eval.results import Results
from dma_eval.show.pages import Columns, Page, Table, make_table, of

GIB = 1 << 30
Call = Literal["prompt", "step"]  # causal attention over a prompt, or one new token of each sequence over a cache


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """The device that was measured."""

    name: str  # of the device
    capability: str | None = None  # compute capability, such as ``9.0``; null for a CPU
    multiprocessors: int | None = None  # how many; null for a CPU, as the rest
    memory_bytes: int | None = None
    l2_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The attention of one layer."""

    length: int  # keys
    head_dim: int  # of queries, keys and values
    query_heads: int
    kv_heads: int  # key and value heads
    batch: int = 1  # sequences

    @property
    def family(self) -> str:
        """The shape without its length, for titles."""
        return f"head_dim {self.head_dim}, {self.query_heads}/{self.kv_heads} heads"

    def __str__(self) -> str:
        return f"{self.batch} x {self.length:,} keys, {self.family}"

    def cache_bytes(self, itemsize: int) -> int:
        """Return the bytes of all keys and values with elements of ``itemsize`` bytes."""
        return 2 * self.batch * self.kv_heads * self.length * self.head_dim * itemsize


@dataclass(frozen=True, kw_only=True)
class SpeedResult:
    """What was measured of one of those that are compared."""

    label: str  # its name, as asked for
    config: dict[str, Any] | None  # its resolved configuration; null for anything but ``dma_mxfp``
    failure: str | None = None  # Why it did not run; null if it did. If it did not, the numbers are null.
    speedup: float | None = None  # time of the first on its shape or context over this one's


@dataclass(frozen=True, kw_only=True)
class AttentionResult(SpeedResult):
    call: Call
    shape: Shape
    # Median time of a call, with quantization and the storing of a new key. On a GPU a step is a CUDA graph.
    milliseconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class GenerateResult(SpeedResult):
    context: int  # tokens of the prompt, in each sequence
    first_token_seconds: float | None = None  # from the call of ``generate`` to the first new token
    step_milliseconds: float | None = None  # median time between two tokens
    step_milliseconds_fast: float | None = None  # the first quartile
    step_milliseconds_slow: float | None = None  # the third quartile
    steps: int | None = None  # timed intervals between tokens
    graph_steps: int | None = None  # steps of the timed call that replayed a CUDA graph of ``dma_hf``
    tokens_per_second: float | None = None  # new tokens of all sequences, by ``step_milliseconds``
    cache_bytes: int | None = None  # what the cache holds
    peak_bytes: int | None = None  # most memory allocated while generating, weights left out


@dataclass(frozen=True, kw_only=True)
class SpeedReport(Results):
    """What the report of every benchmark begins with."""

    dtype: str  # data type of what is not quantized
    device: DeviceFacts


@dataclass(frozen=True, kw_only=True)
class BenchReport(SpeedReport):
    """What ``dma-hf bench`` measured."""

    schema_version: int = 7
    model: str  # the shape's name, or that of a real model
    weights: str | None  # what they were quantized to after loading (``fp8``)
    data: str | None  # text of a real model's prompts; null for random ones
    begins_with: list[str]  # special tokens that every prompt of a text begins with
    yarn: float | None  # factor by which YaRN extends a real model's positions
    parameters: int  # how many the model has
    weight_bytes: int  # what its weights take
    batch: int  # sequences
    new_tokens: int  # generated in each sequence
    attention: list[AttentionResult]  # by context, then by call; empty where heads are not plain
    results: list[GenerateResult]  # by context, then in the given order


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
