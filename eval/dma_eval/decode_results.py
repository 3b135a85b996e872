"""The results file of ``dma-hf bench decode``: its schema, as dataclasses.

The file is the JSON of a :class:`DecodeReport`: objects have the fields of the dataclasses below under the same names,
and every field is present. ``schema_version`` counts up when a field comes, goes or changes its meaning. Numbers that
do not exist (of a failed implementation, or on a CPU) are null.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .speed_results import SpeedReport

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """One new token against the cache of one layer.

    Attributes:
        length: Keys in the cache.
        batch: Sequences.
        head_dim: Of queries, keys and values.
        query_heads: Query heads.
        kv_heads: Key and value heads.
    """

    length: int
    batch: int
    head_dim: int
    query_heads: int
    kv_heads: int

    def cache_bytes(self, itemsize: int) -> int:
        """Return the bytes of all keys and values with elements of ``itemsize`` bytes."""
        return 2 * self.batch * self.kv_heads * self.length * self.head_dim * itemsize

    @property
    def family(self) -> str:
        """All of it but length and batch, for titles."""
        return f"head_dim {self.head_dim}, {self.query_heads}/{self.kv_heads} heads"


@dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """One implementation on one shape.

    Attributes:
        shape: The shape.
        label: The implementation: ``sdpa``, ``sdpa:flash``, ``sdpa:dynamic``, ``sdpa:quanto`` (or another backend of
            ``QuantizedCache``), or ``dma_mxfp:PRESET``.
        config: Its resolved configuration; null for any implementation but ``dma_mxfp``.
        failure: Why it did not run; null if it did. If it did not, the numbers below are null.
        milliseconds: Median time of a step called from Python; storing the new key is counted but for ``sdpa`` and
            ``sdpa:flash``.
        graph_milliseconds: Median time of the step as a CUDA graph; null where it cannot be one.
        repeats: Timed calls from Python.
        cache_bytes: Of the cache of the layer, with its room for more tokens.
        bytes_ratio: ``cache_bytes`` over the bytes of 16-bit keys and values.
        bytes_per_second: ``cache_bytes`` over the time as a graph (of a call, where there is none).
        speedup: Time of the shape's first implementation over this one's, likewise.
    """

    shape: DecodeShape
    label: str
    config: dict[str, Any] | None
    failure: str | None = None
    milliseconds: float | None = None
    graph_milliseconds: float | None = None
    repeats: int | None = None
    cache_bytes: int | None = None
    bytes_ratio: float | None = None
    bytes_per_second: float | None = None
    speedup: float | None = None


@dataclass(frozen=True, kw_only=True)
class DecodeReport(SpeedReport):
    """Everything that one run measured.

    Attributes:
        results: By shape, then in the order asked for.
    """

    schema_version: int = SCHEMA_VERSION
    results: list[DecodeResult]
