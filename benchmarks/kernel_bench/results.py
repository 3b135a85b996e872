"""The result files of ``benchmarks/prefill.py`` and ``benchmarks/decode.py``: their schemas, as dataclasses.

Numbers that do not exist (after a failure, or on a CPU) are null.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dma_eval.bench.results import Shape, SpeedReport, SpeedResult


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Origin of queries, keys and values that a model computed."""

    model: str  # as it was given: Hub name, folder or GGUF file
    data: str  # the text that it read: file or dataset
    layers: tuple[int, ...]  # whose attention is timed; times are sums over them
    model_layers: int  # how many the model has
    model_head_dim: int  # its own; older files embed it in wider heads
    yarn: float | None = None  # factor by which YaRN extends its positions
    # Special tokens that every window begins with, as the tokenizer adds them. In files before version 8, only the
    # first window has them.
    begins_with: tuple[str, ...] = ()

    def __str__(self) -> str:
        yarn = "" if self.yarn is None else f", YaRN {self.yarn:g}"
        layers = f"{len(self.layers)} of {self.model_layers} layers"
        after = f" after {''.join(self.begins_with)}" if self.begins_with else ""
        return f"{Path(self.model).name}{yarn}, {layers}, {Path(self.data).name}{after}"


@dataclass(frozen=True, kw_only=True)
class PrefillShape(Shape):
    """As many queries as keys."""

    is_causal: bool  # whether a query attends to no key after its own position
    inputs: ModelInputs | None = None  # null for random normal numbers

    @property
    def flops(self) -> int:
        """Floating-point operations of both matrix products, except those that the mask hides."""
        pairs = self.length * self.length // (2 if self.is_causal else 1)
        return 4 * self.batch * self.query_heads * pairs * self.head_dim

    @property
    def family(self) -> str:
        """All of it but the length."""
        batch = "" if self.batch == 1 else f", batch {self.batch}"
        inputs = ", dense random inputs" if self.inputs is None else f", inputs of {self.inputs}"
        return f"{super().family}, {'causal' if self.is_causal else 'bidirectional'}{batch}{inputs}"

    def __str__(self) -> str:
        return f"{self.length:,} tokens, {self.family}"


@dataclass(frozen=True, kw_only=True)
class PrefillResult(SpeedResult):
    """One implementation on one shape. Inputs of a model have several layers; times are sums over them."""

    shape: PrefillShape
    milliseconds: float | None = None  # median time of a call; quantization is counted unless the label says otherwise
    milliseconds_fast: float | None = None  # the first quartile
    milliseconds_slow: float | None = None  # the third quartile
    repeats: int | None = None  # timed calls, of each layer
    graph_milliseconds: float | None = None  # median time as a CUDA graph; measured where a call is short
    graph_failure: str | None = None  # why a short call cannot be a graph
    # Median time where nothing else runs for a while, at the clock that the chip's power limit leaves to it: of a graph
    # where a call is short.
    sustained_milliseconds: float | None = None
    quantize_milliseconds: float | None = None  # median time of quantizing alone; null in files since 2026-11-29
    tflops: float | None = None  # 10 ** 12 floating-point operations per second, by ``milliseconds``
    # Norm of the difference from fp64 over the norm, on sampled query rows; the mean over layers.
    error: float | None = None
    error_with_outliers: float | None = None  # the same with outlier key channels, of random inputs
    # Share of low tiles, per block of 64 queries, that the recipe's ``skip_threshold`` skips, over all layers; null if
    # there is none.
    skipped_share: float | None = None
    extra_bytes: int | None = None  # most memory allocated during a call, the output left out; of the first layer
    input_bytes: int | None = None  # of query, key and value of one layer


@dataclass(frozen=True, kw_only=True)
class DecodeResult(SpeedResult):
    """One implementation on one shape."""

    shape: Shape
    # Median time of a step called from Python; storing the new key is counted except for ``sdpa`` and ``sdpa:flash``.
    milliseconds: float | None = None
    graph_milliseconds: float | None = None  # median time of the step as a CUDA graph; null where it cannot be one
    graph_failure: str | None = None  # why it cannot be one
    repeats: int | None = None  # timed calls from Python
    cache_bytes: int | None = None  # of the cache of the layer, with its room for more tokens
    bytes_ratio: float | None = None  # ``cache_bytes`` over the bytes of 16-bit keys and values
    read_bytes: int | None = None  # stored keys and values that a step attends to, each counted once
    bytes_per_second: float | None = None  # ``read_bytes`` over the time as a graph (of a call, where there is none)


@dataclass(frozen=True, kw_only=True)
class PrefillReport(SpeedReport):
    """What ``prefill.py`` measured."""

    schema_version: int = 9
    results: list[PrefillResult]  # by shape, then in the given order


@dataclass(frozen=True, kw_only=True)
class DecodeReport(SpeedReport):
    """What ``decode.py`` measured."""

    schema_version: int = 3
    # Bytes per second that a copy within the device reads and writes; null where it was not measured.
    copy_bytes_per_second: float | None = None
    results: list[DecodeResult]  # by shape, then in the given order
