"""The results file: its schema, as dataclasses, with reading and writing.

``results.json`` is the JSON of a :class:`Report`: objects have the fields of the dataclasses below under the same
names, and every field is present. ``schema_version`` counts up when a field comes, goes or changes its meaning. Numbers
that do not exist (of a failed backend, or without a reference) are null. ``sections.py`` has the dataclasses of the
sections on tasks, fidelity and retrieval.

Version 2 added ``tasks``, ``fidelity``, ``retrieval`` and ``part_seconds``; files of version 1 are read as having none
of them. A reader refuses all other versions.
"""

from __future__ import annotations

import json
import types
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from .environment import Environment
from .errors import UserError
from .sections import Divergence, HeadErrors, RetrievalSection, TaskSection

SCHEMA_VERSION = 2
ADDED: dict[int, dict[str, Any]] = {1: {"tasks": [], "fidelity": [], "retrieval": [], "part_seconds": {}}}
"""What the version after each older one added to a report, and its value there."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The model that was measured.

    Attributes:
        name: As it was asked for: Hub name, folder or GGUF file.
        revision: Hub revision asked for; null for the default.
        commit: Hub commit that was loaded, where the model came from the Hub.
        architecture: Class of the model.
        parameters: Number of parameters.
        layers: Decoder layers.
        query_heads: Query heads per layer.
        kv_heads: Key and value heads per layer.
        head_dim: Dimension of a head.
        max_context: Positions that the configuration allows.
        dtype: Data type of the weights.
        device: Device of the model's first parameter.
        device_map: Device map asked for.
    """

    name: str
    revision: str | None
    commit: str | None
    architecture: str
    parameters: int
    layers: int | None
    query_heads: int | None
    kv_heads: int | None
    head_dim: int | None
    max_context: int | None
    dtype: str
    device: str
    device_map: str | None


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """The text that was measured on.

    Attributes:
        name: File or dataset.
        config: Configuration of the dataset.
        split: Split of the dataset.
        column: Column of the dataset.
        sha256: Hash of the whole text in UTF-8.
        characters: Length of the whole text.
        tokens: Length of the whole text in tokens.
    """

    name: str
    config: str | None
    split: str | None
    column: str | None
    sha256: str
    characters: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class BackendResult:
    """One attention backend in a perplexity section. The reference is the section's first backend.

    Attributes:
        label: Its name in tables and plots, unique in the section.
        implementation: Its name in Transformers.
        config: Its resolved configuration; null for any implementation but ``dma_mxfp``.
        failure: Why it was stopped; null if it ran to the end. If it was stopped, the numbers below are null or empty.
        perplexity: exp(``nll``).
        nll: Mean negative log-likelihood per scored token, in nats.
        change_percent: Change of the perplexity against the reference.
        change_stderr: Standard error of ``change_percent``, from the differences token by token, taken as independent.
        kl_mean: Mean of KL(reference || backend) per scored token, in nats.
        kl_p99: Its 99th percentile over tokens.
        kl_max: Its maximum over tokens.
        top1_agreement: Share of scored tokens at which the most likely token is the reference's.
        tokens_per_second: Tokens that one process reads per second of forward passes; its first pass does not count
            where there are others.
        forward_seconds: Seconds of each forward pass; the first one warms up.
        peak_memory_bytes: Memory in use with the model loaded, plus the most that a forward pass added; of several
            processes, the one that uses most.
        fallbacks: How often something ran with other attention than this backend, by reason. Empty is good.
        window_nll: Mean ``nll`` of each window.
        position_nll: Mean ``nll`` in each position bucket of the section; null where no token is scored.
        position_kl: Mean KL in each position bucket.
    """

    label: str
    implementation: str
    config: dict[str, Any] | None
    failure: str | None
    perplexity: float | None = None
    nll: float | None = None
    change_percent: float | None = None
    change_stderr: float | None = None
    kl_mean: float | None = None
    kl_p99: float | None = None
    kl_max: float | None = None
    top1_agreement: float | None = None
    tokens_per_second: float | None = None
    forward_seconds: list[float] = field(default_factory=list)
    peak_memory_bytes: int | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    window_nll: list[float] = field(default_factory=list)
    position_nll: list[float | None] = field(default_factory=list)
    position_kl: list[float | None] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PerplexitySection:
    """Backends compared on the same windows of one text.

    Attributes:
        data: The text.
        context: Tokens per window.
        stride: Distance of two windows; less than ``context`` if they overlap.
        batch_size: Windows per forward pass.
        windows: Number of windows.
        tokens_scored: Tokens that each backend predicted and was scored on.
        memory_kind: What ``peak_memory_bytes`` counts: ``cuda_allocated`` (PyTorch, exact, all GPUs) or ``process_rss``
            (resident set of the process, sampled).
        position_edges: Edges of the position buckets: bucket i holds the tokens at ``position_edges[i]`` to
            ``position_edges[i + 1] - 1`` of their windows.
        backends: In the order asked for; the first is the reference.
    """

    data: DataInfo
    context: int
    stride: int
    batch_size: int
    windows: int
    tokens_scored: int
    memory_kind: str
    position_edges: list[int]
    backends: list[BackendResult]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A text that one backend continued, greedily and with the KV cache.

    Attributes:
        label: The backend.
        prompt_tokens: Length of the prompt.
        prompt_end: The last characters of the prompt.
        continuation: What the model wrote.
        tokens: The tokens of it.
        same_tokens: How many of them, from the first on, are those of the first backend.
        seconds: Time of prefill and decoding.
    """

    label: str
    prompt_tokens: int
    prompt_end: str
    continuation: str
    tokens: list[int]
    same_tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FidelitySection:
    """Backends against SDPA in fp32 on the same text.

    Attributes:
        tokens: Token by token; the first backend is SDPA with the weights in fp32.
        dtype: Data type of the other backends.
        bucket_edges: Edges of the position buckets below.
        bucket_change: Change of the perplexity in percent in each position bucket, by backend; null where no token is
            scored.
        head_windows: Windows that the errors of heads were taken over.
        heads: Errors by layer and head, of every backend that can be run layer by layer.
        prompt_tokens: Length of each prompt of the greedy continuations.
        new_tokens: Tokens generated after each.
        divergence: Where greedy continuations part; one entry per backend.
    """

    tokens: PerplexitySection
    dtype: str
    bucket_edges: list[int]
    bucket_change: dict[str, list[float | None]]
    head_windows: int
    heads: list[HeadErrors]
    prompt_tokens: int
    new_tokens: int
    divergence: list[Divergence]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that one run measured.

    Attributes:
        schema_version: Version of this schema.
        created: Date and time in UTC, ISO 8601.
        command: The command line.
        seed: Seed of PyTorch's random numbers.
        environment: Versions and devices.
        model: The model.
        perplexity: One section per text and context.
        generations: Continuations, where some were made.
        tasks: One section per evaluation on lm-eval tasks.
        fidelity: One section per comparison with SDPA in fp32.
        retrieval: One section per kind of retrieval.
        part_seconds: Wall-clock seconds of the parts of the run, by name.
    """

    schema_version: int = SCHEMA_VERSION
    created: str
    command: str
    seed: int
    environment: Environment
    model: ModelInfo
    perplexity: list[PerplexitySection] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    tasks: list[TaskSection] = field(default_factory=list)
    fidelity: list[FidelitySection] = field(default_factory=list)
    retrieval: list[RetrievalSection] = field(default_factory=list)
    part_seconds: dict[str, float] = field(default_factory=dict)


def write_report(report: Report, path: Path) -> None:
    """Write ``report`` as JSON (RFC 8259: a NaN is an error)."""
    text = json.dumps(asdict(report), indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_report(path: Path) -> Report:
    """Read what ``write_report`` wrote.

    Raises:
        UserError: There is no such file, it is not JSON, of another schema version, or not as the schema says; the
            message names the field.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the report {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    version = values.get("schema_version") if isinstance(values, dict) else None
    if isinstance(version, int) and version in ADDED:
        values |= ADDED[version] | {"schema_version": SCHEMA_VERSION}
    elif version != SCHEMA_VERSION:
        raise UserError(f"{path}: expected schema_version {SCHEMA_VERSION} or older, got {version!r}")
    try:
        report: Report = parse(Report, values, "report")
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    return report


def parse(kind: Any, value: Any, where: str) -> Any:
    """``value`` of JSON as the type ``kind``, strictly.

    Raises:
        ValueError: It is not as the type says; the message names the place, which begins with ``where``.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, Union):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return parse(kind, value, where)
    if is_dataclass(kind):
        names = {field.name for field in fields(kind)}
        if not isinstance(value, dict) or value.keys() != names:
            got = ", ".join(sorted(names ^ value.keys())) if isinstance(value, dict) else repr(value)
            raise ValueError(f"{where} must be an object with the fields of {_name(kind)}; differs in: {got}")
        hints = get_type_hints(kind)
        return kind(**{name: parse(hints[name], value[name], f"{where}.{name}") for name in names})  # type: ignore[operator]
    if origin is list and isinstance(value, list):
        return [parse(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: parse(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{where} must be {_name(kind)}, got {value!r}")


def _name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))
