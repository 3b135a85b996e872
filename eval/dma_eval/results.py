"""The results file of a run: its schema, as dataclasses, with reading and writing.

``results.json`` is the JSON of a :class:`Report`: objects have the fields of the dataclasses below under the same
names, and every field is written. ``schema_version`` counts up when a field comes, goes or changes its meaning. Numbers
that do not exist (of a failed backend, or without a reference) are null. Older files are read as having the default of
every field that they lack: version 2 added ``tasks``, ``fidelity``, ``retrieval`` and ``part_seconds``, version 3
``skip_windows``, ``spread`` and ``windows_left``, version 4 ``stress``. A reader refuses newer ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from .environment import Environment, collect
from .errors import UserError
from .files import parse, write_json

SCHEMA_VERSION = 4
Kind = TypeVar("Kind", bound="Results")


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
class BackendInfo:
    """One attention backend in a section. The reference is the section's first.

    Attributes:
        label: Its name in tables and plots, unique in the section.
        implementation: Its name in Transformers.
        config: Its resolved configuration; null for any implementation but ``dma_mxfp``.
    """

    label: str
    implementation: str
    config: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class BackendResult(BackendInfo):
    """One attention backend in a perplexity section.

    Attributes:
        failure: Why it was stopped; null if it ran to the end. If it was stopped, the numbers below are null or empty.
        perplexity: exp(``nll``).
        nll: Mean negative log-likelihood per scored token, in nats.
        change_percent: Change of the perplexity against the reference.
        change_stderr: Standard error of ``change_percent``, from the differences token by token, taken as independent.
        kl_mean: Mean of KL(reference || backend) per scored token, in nats.
        kl_p99: Its 99th percentile over tokens.
        kl_max: Its maximum over tokens.
        top1_agreement: Share of scored tokens at which the most likely token is the reference's.
        tokens_per_second: Tokens that one process reads per second of forward passes; the first pass of each process
            does not count where there are others.
        forward_seconds: Seconds of each forward pass; the first one of a process warms up.
        peak_memory_bytes: Memory in use with the model loaded, plus the most that a forward pass added; of several
            processes, the one that uses most.
        fallbacks: How often something ran with other attention than this backend, by reason. Empty is good.
        window_nll: Mean ``nll`` of each window.
        position_nll: Mean ``nll`` in each position bucket of the section; null where no token is scored.
        position_kl: Mean KL in each position bucket.
    """

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
        windows: Number of windows that were read.
        windows_left: Windows that an interruption left unread.
        skip_windows: Windows of the text's begin that were left out.
        spread: Whether the windows are spread over the text, and not its first ones.
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
    windows_left: int = 0
    skip_windows: int = 0
    spread: bool = False
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
class MetricValue:
    """One metric of one task under one backend, and its paired comparison with the reference on the same samples.

    Attributes:
        label: The backend.
        value: The metric over all samples; null if the backend failed.
        difference: ``value`` less the reference's; null for the reference itself and where either failed.
        low: Lower end of the 95 % confidence interval of ``difference``, by a paired bootstrap over samples; null where
            the metric is none that samples average to.
        high: Its upper end.
        lost: For right-or-wrong metrics, samples that the reference has right and this backend wrong; else null.
        gained: The reverse.
        mcnemar_p: Two-sided p-value of McNemar's exact test on ``lost`` and ``gained``.
    """

    label: str
    value: float | None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    lost: int | None = None
    gained: int | None = None
    mcnemar_p: float | None = None


@dataclass(frozen=True, kw_only=True)
class MetricResult:
    """One metric of a task.

    Attributes:
        name: Its name in lm-eval.
        filter: The filter of the answers that it applies to; ``none`` usually.
        aggregation: What makes one number of the samples' (``mean``, ``perplexity``, ...); null if lm-eval does not
            name it.
        right_or_wrong: Whether every sample is either right, 1, or wrong, 0.
        higher_is_better: Its direction; null if lm-eval does not say.
        values: One per backend, in order.
    """

    name: str
    filter: str
    aggregation: str | None
    right_or_wrong: bool
    higher_is_better: bool | None
    values: list[MetricValue]


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """One task.

    Attributes:
        name: Its name in lm-eval.
        version: Version of the task's definition.
        output_type: How it is answered: ``multiple_choice``, ``loglikelihood``, ``loglikelihood_rolling`` or
            ``generate_until``.
        num_fewshot: Examples in each prompt.
        samples: Samples that every backend answered.
        metrics: Its metrics.
        answers_changed: How many answers (the choice, the text) differ from the reference's, by backend; null where
            there is nothing to compare.
    """

    name: str
    version: str
    output_type: str
    num_fewshot: int
    samples: int
    metrics: list[MetricResult]
    answers_changed: dict[str, int | None]


@dataclass(frozen=True, kw_only=True)
class TaskBackend(BackendInfo):
    """One backend in a section on tasks.

    Attributes:
        failures: Why it was stopped, by the name that was asked for (a task or a group). Empty is good.
        seconds: Time of the evaluation by the same names, model loading and data preparation not counted.
        fallbacks: How often something ran with other attention than this backend, by reason. Empty is good.
        mean_accuracy: Mean over tasks of their first right-or-wrong metric; null without such tasks or if any failed.
    """

    failures: dict[str, str]
    seconds: dict[str, float]
    fallbacks: dict[str, int]
    mean_accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class GroupMetric:
    """One metric of a group of tasks, as lm-eval aggregates it.

    Attributes:
        group: Name of the group.
        metric: Name of the metric, with its filter after a comma.
        values: By backend; null where it failed.
    """

    group: str
    metric: str
    values: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """Backends compared on lm-eval tasks: the same samples in the same order.

    Attributes:
        asked: The names that were asked for, in order.
        limit: Samples per task; null for all.
        batch_size: Sequences per forward pass.
        processes: Processes that split the samples.
        chat_template: Whether prompts went through the model's chat template.
        confidence: Level of the intervals.
        resamples: Bootstrap resamples behind each interval.
        backends: In the order asked for; the first is the reference.
        tasks: One entry per task.
        groups: Metrics of groups of tasks.
    """

    asked: list[str]
    limit: int | None
    batch_size: int
    processes: int
    chat_template: bool
    confidence: float
    resamples: int
    backends: list[TaskBackend]
    tasks: list[TaskResult] = field(default_factory=list)
    groups: list[GroupMetric] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class HeadErrors:
    """Error of the attention output of every head under one backend, each layer given the reference's own inputs.

    Attributes:
        label: The backend.
        relative_l1: sum |output - reference| / sum |reference| over tokens and channels, ``[layer][query head]``.
        cosine: Mean over tokens of the cosine of output and reference, ``[layer][query head]``.
    """

    label: str
    relative_l1: list[list[float]]
    cosine: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where one backend's greedy continuations leave the reference's.

    Attributes:
        label: The backend.
        same_tokens: For each prompt, how many generated tokens, from the first on, are the reference's.
    """

    label: str
    same_tokens: list[int]


@dataclass(frozen=True, kw_only=True)
class RetrievalCell:
    """Retrieval at one length and depth under one backend.

    Attributes:
        length: Tokens of the prompt, at most.
        depth: Where in the prompt the answer stands, from 0 (its begin) to 1 (its end).
        correct: Samples whose whole answer is the greedy continuation.
        samples: Samples.
        nll: Mean negative log-likelihood of the answers per token, in nats.
    """

    length: int
    depth: float
    correct: int
    samples: int
    nll: float


@dataclass(frozen=True, kw_only=True)
class RetrievalBackend(BackendInfo):
    """One backend in a section on retrieval.

    Attributes:
        failure: Why it was stopped; null if it ran to the end. The cells below are those that it finished.
        cells: By length, then by depth.
    """

    failure: str | None
    cells: list[RetrievalCell]


@dataclass(frozen=True, kw_only=True)
class RetrievalSection:
    """Backends compared at finding one passage in a long prompt.

    Attributes:
        kind: ``needle`` (a sentence in prose) or ``kv`` (one pair among pairs of keys and values).
        lengths: Lengths of the prompts, in tokens.
        depths: Places of the answer.
        samples: Samples per length and depth.
        backends: In the order asked for; the first is the reference.
    """

    kind: str
    lengths: list[int]
    depths: list[float]
    samples: int
    backends: list[RetrievalBackend]


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
class KeyRange:
    """How far the largest key channel of a layer stands out.

    Attributes:
        layer: The layer's name.
        ratio: Its range by that of the median channel of its head, for the head where that is largest.
        head: That key head.
        channel: The channel.
    """

    layer: str
    ratio: float
    head: int
    channel: int


@dataclass(frozen=True, kw_only=True)
class TwinResult:
    """One twin of the model.

    Attributes:
        name: What was changed in it.
        is_same_function: Whether it computes what the model computes.
        key_ratio: The largest ratio of a key channel's range to the median channel's, over its layers.
        refused: Why the model has no such twin; null if it has.
        tokens: The backends on it; null if it was refused. The first backend is exact on the same twin.
    """

    name: str
    is_same_function: bool
    key_ratio: float | None = None
    refused: str | None = None
    tokens: PerplexitySection | None = None


@dataclass(frozen=True, kw_only=True)
class StressSection:
    """Backends on the model and on twins of it that are harder to quantise.

    Attributes:
        range_tokens: Tokens that the ranges of keys were measured over.
        key_ranges: One entry per attention layer of the model itself.
        twins: The model as it is first.
    """

    range_tokens: int
    key_ranges: list[KeyRange]
    twins: list[TwinResult]


@dataclass(frozen=True, kw_only=True)
class Results:
    """What every file of results begins with, those of benchmarks too.

    Attributes:
        schema_version: Version of the file's schema.
        created: Date and time in UTC, ISO 8601.
        command: The command line.
        seed: Seed of PyTorch's random numbers.
        environment: Versions and devices.
    """

    schema_version: int
    created: str
    command: str
    seed: int
    environment: Environment


@dataclass(frozen=True, kw_only=True)
class Report(Results):
    """Everything that one run measured.

    Attributes:
        model: The model.
        perplexity: One section per text and context.
        generations: Continuations, where some were made.
        tasks: One section per evaluation on lm-eval tasks.
        fidelity: One section per comparison with SDPA in fp32.
        retrieval: One section per kind of retrieval.
        stress: One section per run on twins.
        part_seconds: Wall-clock seconds of the parts of the run, by name.
    """

    schema_version: int = SCHEMA_VERSION
    model: ModelInfo
    perplexity: list[PerplexitySection] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    tasks: list[TaskSection] = field(default_factory=list)
    fidelity: list[FidelitySection] = field(default_factory=list)
    retrieval: list[RetrievalSection] = field(default_factory=list)
    stress: list[StressSection] = field(default_factory=list)
    part_seconds: dict[str, float] = field(default_factory=dict)


def backend_groups(report: Report) -> list[Sequence[BackendInfo]]:
    """The backends of every section of a report."""
    return [
        *(section.backends for section in report.perplexity),
        *(section.backends for section in report.tasks),
        *(section.tokens.backends for section in report.fidelity),
        *(section.backends for section in report.retrieval),
        *(twin.tokens.backends for section in report.stress for twin in section.twins if twin.tokens is not None),
    ]


def backend_configs(report: Report) -> dict[str, dict[str, Any]]:
    """The configuration of every ``dma_mxfp`` backend in a report, by label."""
    groups = backend_groups(report)
    return {backend.label: backend.config for group in groups for backend in group if backend.config is not None}


def write_report(report: Report, path: Path) -> None:
    """Write ``report``; a NaN in it is an error."""
    write_json(report, path)


def here_and_now() -> dict[str, Any]:
    """When and where: fields of :class:`Results`."""
    return {"created": datetime.now(UTC).isoformat(timespec="seconds"), "environment": collect()}


def read_report(path: Path) -> Report:
    """Read the report of a run; see :func:`read_results`."""
    return read_results(Report, path)


def read_results(kind: type[Kind], path: Path) -> Kind:
    """Read a file of results, written now or in an earlier version.

    Raises:
        UserError: There is no such file, it is not JSON, of a newer schema version, or not as the schema says; the
            message names the field.
    """
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read the report {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    version = values.get("schema_version") if isinstance(values, dict) else None
    newest: Any = next(each.default for each in fields(kind) if each.name == "schema_version")
    if version not in range(1, newest + 1):
        raise UserError(f"{path}: expected schema_version {newest} or older, got {version!r}")
    try:
        return parse(kind, values | {"schema_version": newest})
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
