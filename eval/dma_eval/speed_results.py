"""The results file of ``dma-hf bench prefill``: its schema, as dataclasses.

The file is the JSON of a :class:`PrefillReport`: objects have the fields of the dataclasses below under the same
names, and every field is present. ``schema_version`` counts up when a field comes, goes or changes its meaning. Numbers
that do not exist (of a failed implementation, or on a CPU) are null.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .environment import Environment, collect
from .timing import DeviceFacts

SCHEMA_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The attention of one layer.

    Attributes:
        length: Queries, and keys.
        head_dim: Of queries, keys and values.
        query_heads: Query heads.
        kv_heads: Key and value heads.
        is_causal: Whether a query sees no key behind it.
        batch: Sequences.
    """

    length: int
    head_dim: int
    query_heads: int
    kv_heads: int
    is_causal: bool
    batch: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations of both matrix products, what a causal mask hides left out."""
        pairs = self.length * self.length // (2 if self.is_causal else 1)
        return 4 * self.batch * self.query_heads * pairs * self.head_dim

    @property
    def family(self) -> str:
        """All of it but the length, for titles."""
        heads = f"{self.query_heads}/{self.kv_heads} heads"
        mask = "causal" if self.is_causal else "bidirectional"
        batch = "" if self.batch == 1 else f", batch {self.batch}"
        return f"head_dim {self.head_dim}, {heads}, {mask}{batch}"


@dataclass(frozen=True, kw_only=True)
class PrefillResult:
    """One implementation on one shape.

    Attributes:
        shape: The shape.
        label: The implementation: ``sdpa``, ``sdpa:flash``, ``sdpa:cudnn``, ``flex``, or ``dma_mxfp:PRESET``.
        config: Its resolved configuration; null for any implementation but ``dma_mxfp``.
        failure: Why it did not run; null if it did. If it did not, the numbers below are null.
        milliseconds: Median time of a call; quantisation is counted.
        milliseconds_fast: The first quartile.
        milliseconds_slow: The third quartile.
        repeats: Timed calls.
        graph_milliseconds: Median time as a CUDA graph; measured where a call is short.
        quantize_milliseconds: Median time of quantising keys and values (and what else precedes the attention kernel)
            alone, already counted above; null for implementations that do not. On a CUDA device as a CUDA graph since
            version 2, called from Python before.
        quantize_copy_milliseconds: What moving the bytes that quantisation must read and write would take at the
            device's copy speed, which is that of a large copy.
        plain_copy_milliseconds: Median time of a copy that reads and writes as many bytes, beside the quantisation and
            timed likewise; since version 2.
        tflops: 10 ** 12 floating-point operations per second, by ``milliseconds``.
        speedup: Time of the shape's first implementation over this one's.
        error: Norm of the difference from fp64 over the norm, on sampled query rows.
        extra_bytes: Most memory allocated during a call, the output left out.
        input_bytes: Of query, key and value.
    """

    shape: Shape
    label: str
    config: dict[str, Any] | None
    failure: str | None = None
    milliseconds: float | None = None
    milliseconds_fast: float | None = None
    milliseconds_slow: float | None = None
    repeats: int | None = None
    graph_milliseconds: float | None = None
    quantize_milliseconds: float | None = None
    quantize_copy_milliseconds: float | None = None
    plain_copy_milliseconds: float | None = None
    tflops: float | None = None
    speedup: float | None = None
    error: float | None = None
    extra_bytes: int | None = None
    input_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class SpeedReport:
    """What the report of every benchmark begins with.

    Attributes:
        schema_version: Version of this schema.
        created: Date and time in UTC, ISO 8601.
        command: The command line.
        seed: Seed of PyTorch's random numbers.
        dtype: Data type of what is not quantised.
        environment: Versions and devices.
        device: The device.
    """

    schema_version: int
    created: str
    command: str
    seed: int
    dtype: str
    environment: Environment
    device: DeviceFacts


@dataclass(frozen=True, kw_only=True)
class PrefillReport(SpeedReport):
    """Everything that one run measured.

    Attributes:
        results: By shape, then in the order asked for.
    """

    schema_version: int = SCHEMA_VERSION
    results: list[PrefillResult]


def write_speed_report(report: SpeedReport, path: Path) -> None:
    """Write a report of any benchmark as JSON (RFC 8259: a NaN is an error); an interruption leaves an earlier one."""
    text = json.dumps(asdict(report), indent=1, allow_nan=False) + "\n"
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def report_writer(kind: type[SpeedReport], path: Path | None, **fields: Any) -> Callable[..., None]:
    """Return what writes a report as far as it has come, so that an interruption keeps what there is.

    Args:
        kind: Of the report.
        path: Where it goes; ``None`` to write nothing.
        fields: Of the report, those that stay. The date and the environment are added; the others are what each writing
            is given.
    """
    created, environment = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), collect()

    def write(**others: Any) -> None:
        if path is not None:
            write_speed_report(kind(created=created, environment=environment, **fields, **others), path)

    return write
