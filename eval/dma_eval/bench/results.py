"""The result file of ``dma-hf bench``: its schema, as dataclasses. Scripts of ``benchmarks`` extend it.

A file is the JSON of a :class:`BenchReport`. Objects have the fields of the dataclasses below, and every field is
present. ``schema_version`` increases when a field is added, removed or changes its meaning. Numbers that do not exist
(after a failure, or on a CPU) are null.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dma_eval.results import Results

Call = Literal["prompt", "step"]
"""Causal attention over a prompt, or one new token of each sequence over a cache."""


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
