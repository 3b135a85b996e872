"""The results files of ``dma-hf bench``: their schemas, as dataclasses.

A file is the JSON of a :class:`PrefillReport`, :class:`DecodeReport`, :class:`GenerateReport` or :class:`ServeReport`.
Objects have the fields of the dataclasses below, and every field is present. ``schema_version`` increases when a field
is added, removed or changes its meaning. Numbers that do not exist (after a failure, or on a CPU) are null.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from dma_eval.results import Results


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


@dataclass(frozen=True, kw_only=True)
class DecodeShape(Shape):
    """One new token of each sequence against the keys of a cache."""

    def cache_bytes(self, itemsize: int) -> int:
        """Return the bytes of all keys and values with elements of ``itemsize`` bytes."""
        return 2 * self.batch * self.kv_heads * self.length * self.head_dim * itemsize

    def __str__(self) -> str:
        return f"{self.batch} x {self.length:,} keys, {self.family}"


def document_lengths(length: int, documents: int) -> list[int]:
    """Return the lengths of so many documents that fill a sequence, equal to one token."""
    ends = [length * index // documents for index in range(documents + 1)]
    return [end - begin for begin, end in pairwise(ends)]


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Origin of queries, keys and values that a model computed."""

    model: str  # as it was given: Hub name, folder or GGUF file
    data: str  # the text that it read: file or dataset
    layers: tuple[int, ...]  # whose attention is timed; times are sums over them
    model_layers: int  # how many the model has
    model_head_dim: int  # its own; in wider heads the same scores are embedded
    yarn: float | None = None  # factor by which YaRN extends its positions
    # Special tokens that every window begins with, as the tokenizer adds them. Since version 8; before, only the first.
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
    inputs: ModelInputs | None = None  # null for random normal numbers; since version 5
    # Packed in each sequence, about equally long; a query attends to its own document only. Since version 5.
    documents: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations of both matrix products, except those that the mask hides."""
        squares = sum(length * length for length in document_lengths(self.length, self.documents))
        pairs = squares // (2 if self.is_causal else 1)
        return 4 * self.batch * self.query_heads * pairs * self.head_dim

    @property
    def family(self) -> str:
        """All of it but the length."""
        batch = "" if self.batch == 1 else f", batch {self.batch}"
        inputs = "" if self.inputs is None else f", inputs of {self.inputs}"
        packed = "" if self.documents == 1 else f", {self.documents} packed documents"
        return f"{super().family}, {'causal' if self.is_causal else 'bidirectional'}{packed}{batch}{inputs}"

    def __str__(self) -> str:
        return f"{self.length:,} tokens, {self.family}"


@dataclass(frozen=True, kw_only=True)
class SpeedResult:
    """What was measured of one of those that are compared."""

    label: str  # its name, as asked for
    config: dict[str, Any] | None  # its resolved configuration; null for anything but ``dma_mxfp``
    failure: str | None = None  # Why it did not run; null if it did. If it did not, the numbers are null.
    # Time of the first that is compared on its shape, context or set of requests over this one's: ``milliseconds``, of
    # a graph in decoding; ``step_milliseconds``; ``seconds``.
    speedup: float | None = None


@dataclass(frozen=True, kw_only=True)
class PrefillResult(SpeedResult):
    """One implementation on one shape. Inputs of a model have several layers; times are sums over them."""

    shape: PrefillShape
    milliseconds: float | None = None  # median time of a call; quantization is counted unless the label says otherwise
    milliseconds_fast: float | None = None  # the first quartile
    milliseconds_slow: float | None = None  # the third quartile
    repeats: int | None = None  # timed calls, of each layer
    graph_milliseconds: float | None = None  # median time as a CUDA graph; measured where a call is short
    graph_failure: str | None = None  # why a short call cannot be a graph; since version 3
    # Median time where nothing else runs for a while, at the clock that the chip's power limit leaves to it: of a graph
    # where a call is short; since version 4.
    sustained_milliseconds: float | None = None
    # Median time of quantizing keys and values (and what else precedes the attention kernel) alone, already counted
    # above; null for implementations that do not. On a CUDA device as a CUDA graph since version 2.
    quantize_milliseconds: float | None = None
    tflops: float | None = None  # 10 ** 12 floating-point operations per second, by ``milliseconds``
    # Norm of the difference from fp64 over the norm, on sampled query rows; the mean over layers.
    error: float | None = None
    error_with_outliers: float | None = None  # the same with outlier key channels, of random inputs; since version 3
    # Share of low tiles, per block of 64 queries, that the recipe's ``skip_threshold`` skips, over all layers; null if
    # there is none. Since version 5.
    skipped_share: float | None = None
    extra_bytes: int | None = None  # most memory allocated during a call, the output left out; of the first layer
    input_bytes: int | None = None  # of query, key and value of one layer


@dataclass(frozen=True, kw_only=True)
class DecodeResult(SpeedResult):
    """One implementation on one shape."""

    shape: DecodeShape
    # Median time of a step called from Python; storing the new key is counted except for ``sdpa`` and ``sdpa:flash``.
    milliseconds: float | None = None
    graph_milliseconds: float | None = None  # median time of the step as a CUDA graph; null where it cannot be one
    graph_failure: str | None = None  # why it cannot be one; since version 2
    repeats: int | None = None  # timed calls from Python
    cache_bytes: int | None = None  # of the cache of the layer, with its room for more tokens
    bytes_ratio: float | None = None  # ``cache_bytes`` over the bytes of 16-bit keys and values
    # Stored keys and values that a step attends to, each counted once; since version 3.
    read_bytes: int | None = None
    # ``read_bytes`` over the time as a graph (of a call, where there is none). Before version 3 it was ``cache_bytes``.
    bytes_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class GenerateResult(SpeedResult):
    """One attention and cache at one length of context."""

    context: int  # tokens of the prompt, in each sequence
    first_token_seconds: float | None = None  # from the call of ``generate`` to the first new token
    step_milliseconds: float | None = None  # median time between two tokens
    step_milliseconds_fast: float | None = None  # the first quartile
    step_milliseconds_slow: float | None = None  # the third quartile
    steps: int | None = None  # timed intervals between tokens
    graph_steps: int | None = None  # steps of the timed call that replayed a CUDA graph of ``dma_hf``; since version 6
    tokens_per_second: float | None = None  # new tokens of all sequences, by ``step_milliseconds``
    cache_bytes: int | None = None  # what the cache holds
    peak_bytes: int | None = None  # most memory allocated while generating, weights left out


@dataclass(frozen=True, kw_only=True)
class LongestContext:
    """How many tokens fit."""

    label: str  # ``ATTENTION+CACHE``
    # The longest context over which one more token could be computed, all sequences of one length; to a sixteenth, and
    # not beyond the model's positions. The cache is filled without computing the context.
    tokens: int


@dataclass(frozen=True, kw_only=True)
class RequestFigures:
    """Times of a set of requests: their medians and 99th percentiles."""

    requests: str  # the set, as ``COUNTxPROMPT+NEW``; a length may be a range
    seconds: float | None = None  # from the first request to the last token of the last one
    tokens_per_second: float | None = None  # new tokens of all requests
    first_token_seconds: float | None = None  # from sending a request, its waiting counted
    first_token_seconds_p99: float | None = None
    between_tokens_milliseconds: float | None = None  # between two tokens of a request
    between_tokens_milliseconds_p99: float | None = None


@dataclass(frozen=True, kw_only=True)
class ServeResult(RequestFigures, SpeedResult):
    """One attention and cache on one set of requests, which arrive at the same time.

    Times of tokens are those of requests that were never evicted. vLLM gives only the mean between the tokens of each.
    """

    most_at_once: int | None = None  # requests that had pages at once; evicted ones counted from when they came back
    evicted: int | None = None  # requests that lost their pages to others, and were computed again
    cache_bytes: int | None = None  # of the paged cache
    cache_bytes_per_token: float | None = None  # that a token takes in pages, of all layers
    cache_bytes_per_request: int | None = None  # that a request takes beside them, whatever its length


@dataclass(frozen=True, kw_only=True)
class UrlResult(RequestFigures):
    """A server on one set of requests, which arrive at one rate. Figures are of the completed requests.

    Times are of pieces of text, which are tokens for most servers.
    """

    rate: float | None  # requests per second, the mean of a Poisson process; null if all are sent at once
    completed: int  # requests without an error
    errors: dict[str, int]  # number of requests, by message
    prompt_tokens: int  # of all requests, as the server counts them
    new_tokens: int  # likewise


@dataclass(frozen=True, kw_only=True)
class SpeedReport(Results):
    """What the report of every benchmark begins with."""

    dtype: str  # data type of what is not quantized
    device: DeviceFacts


@dataclass(frozen=True, kw_only=True)
class PrefillReport(SpeedReport):
    """What ``dma-hf bench prefill`` measured."""

    schema_version: int = 8  # version 7 left out times and skipped shares of single layers
    results: list[PrefillResult]  # by shape, then in the given order


@dataclass(frozen=True, kw_only=True)
class DecodeReport(SpeedReport):
    """What ``dma-hf bench decode`` measured."""

    schema_version: int = 3
    # Bytes per second that a copy within the device reads and writes; null on a CPU. Since version 3.
    copy_bytes_per_second: float | None = None
    results: list[DecodeResult]  # by shape, then in the given order


@dataclass(frozen=True, kw_only=True)
class GenerateReport(SpeedReport):
    """What ``dma-hf bench generate`` measured.

    Since version 6 the timed call of ``generate`` repeats an earlier one. Before, it got a cache as an argument.
    """

    schema_version: int = 6
    model: str  # the shape's name, or that of a real model
    weights: str | None = None  # what they were quantized to after loading (``fp8``); since version 3
    data: str | None = None  # text of a real model's prompts; null for random ones; since version 2
    # Special tokens that every prompt of a text begins with. Since version 5; before, only the first had them.
    begins_with: list[str] = field(default_factory=list)
    yarn: float | None = None  # factor by which YaRN extends a real model's positions; since version 2
    parameters: int  # how many the model has
    weight_bytes: int  # what its weights take
    batch: int  # sequences
    new_tokens: int  # generated in each sequence
    results: list[GenerateResult]  # by context, then in the given order
    longest: list[LongestContext]  # if it was asked for


@dataclass(frozen=True, kw_only=True)
class ServeReport(SpeedReport):
    """What ``dma-hf bench serve`` measured."""

    schema_version: int = 1
    model: str  # the shape's name, or that of a real model
    layers: int  # how many it has, which may be fewer than its name's
    parameters: int
    weight_bytes: int
    cache_gib: float | None  # for the paged cache; null for what Transformers found free, on a CPU what is needed
    results: list[ServeResult]  # by set of requests, then in the given order


@dataclass(frozen=True, kw_only=True)
class UrlReport(Results):
    """What ``dma-hf bench serve --url`` measured. The environment is that of the client."""

    schema_version: int = 1
    url: str  # of the server
    model: str  # its name there
    extra_body: dict[str, Any]  # further fields of every request
    results: list[UrlResult]  # by set of requests, then by rate
