"""The results file of a run: its schema, as dataclasses.

``results.json`` is the JSON of a :class:`Report`. Objects have the fields of the dataclasses below, and every field is
written. ``schema_version`` increases when a field is added, removed or changes its meaning. Reports before version 11
are refused. Numbers that do not exist (of a failed backend, or without a reference) are null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from .environment import Environment, collect, command_line
from .errors import UserError
from .files import parse
from .names import INFINITY, TILE

RESULTS = "results.json"  # the report in a run's folder
Backend = TypeVar("Backend")
Compared = Annotated[list[Backend], Field(min_length=1)]
Edges = Annotated[list[int], Field(min_length=2)]


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    name: str  # as it was given: Hub name, folder or GGUF file
    revision: str | None  # requested Hub revision; null for the default
    commit: str | None  # Hub commit that was loaded, where the model came from the Hub
    architecture: str  # class of the model
    parameters: int
    layers: int | None
    query_heads: int | None  # query heads per layer; null, as the next two, if layers differ or it has none
    kv_heads: int | None  # key and value heads per layer
    head_dim: int | None  # dimension of a head
    max_context: int | None  # positions that the configuration allows
    dtype: str  # data type of the weights
    device: str  # device of the model's first parameter
    device_map: str | None  # device map asked for
    yarn: float | None = None  # factor by which YaRN extends its positions
    quantization: str | None = None  # of the weights in the file (``Q4_1``) or checkpoint; null if there is none


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    name: str  # file or dataset
    config: str | None  # configuration of the dataset
    split: str | None  # split of the dataset
    column: str | None  # column of the dataset
    sha256: str  # hash of the whole text in UTF-8
    characters: int  # length of the whole text
    tokens: int  # length of the whole text in tokens


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How a section was measured. Sections of one report may come from several commands."""

    created: str  # date and time in UTC, ISO 8601
    command: str  # the command line, without the folders of the machine
    seed: int  # seed of everything random
    environment: Environment  # versions and devices
    model: ModelInfo  # the model that was measured
    request: str = ""  # hash of what was requested; a new section with the same one replaces the section


@dataclass(frozen=True, kw_only=True)
class Section:
    origin: Origin | None = None  # how it was measured; null in a section that is part of another


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """One attention backend in a section. The reference is the section's first."""

    label: str  # its name in tables and plots, unique in the section
    implementation: str  # its name in Transformers
    config: dict[str, Any] | None  # its resolved configuration, infinity as ``inf``; null except for ``dma_mxfp``
    reference: str | None = None  # what it is compared with, if not the first: a 16-bit cache in the same chunks


@dataclass(frozen=True, kw_only=True)
class BackendResult(BackendInfo):
    failure: str | None  # why it was stopped, or null; if it was, the numbers below are null or empty
    perplexity: float | None = None  # exp(``nll``)
    nll: float | None = None  # mean negative log-likelihood per scored token, in nats
    change_percent: float | None = None  # change of the perplexity against the reference
    change_stderr: float | None = None  # its standard error, from differences of tokens treated as independent
    kl_mean: float | None = None  # mean of KL(reference || backend) per scored token, in nats
    kl_p99: float | None = None  # its 99th percentile over tokens
    kl_max: float | None = None  # its maximum over tokens
    top1_agreement: float | None = None  # share of scored tokens at which the most likely token is the reference's
    tokens_per_second: float | None = None  # of forward passes, without the first of each process if there are others
    forward_seconds: list[float] = field(default_factory=list)  # of each forward pass; a process's first warms up
    # On a GPU: memory allocated with the model loaded, plus the most that a forward pass added; summed over GPUs.
    peak_memory_bytes: int | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)  # calls that ran another attention, by reason
    window_nll: list[float] = field(default_factory=list)  # mean ``nll`` of each window
    position_nll: list[float | None] = field(default_factory=list)  # in each position bucket; null without a token
    position_kl: list[float | None] = field(default_factory=list)  # mean KL in each position bucket


@dataclass(frozen=True, kw_only=True)
class PerplexitySection(Section):
    """Backends compared on the same windows of one text."""

    data: DataInfo  # the text
    context: int  # tokens per window
    begins_with: list[str] = field(default_factory=list)  # special tokens before each window, part of ``context``
    stride: int  # distance of two windows; less than ``context`` without ``begins_with`` if they overlap
    batch_size: int  # windows per forward pass
    windows: int  # number of windows that were read
    windows_left: int = 0  # windows that an interruption left unread
    skip_windows: int = 0  # windows left out at the start of the text
    spread: bool = False  # whether the windows are spread over the text instead of its first ones
    tokens_scored: int  # tokens that each backend predicted and was scored on
    position_edges: Edges  # bucket i holds positions ``position_edges[i]`` to ``position_edges[i + 1] - 1``
    backends: Compared[BackendResult]  # in the given order; the first is the reference

    @property
    def is_of_whole_text(self) -> bool:
        """Whether the windows reach from the text's first token to its last, which may be too few for a window."""
        reach = self.context + (self.windows - 1) * self.stride
        return not (self.skip_windows or self.windows_left) and reach >= self.data.tokens - 1


@dataclass(frozen=True, kw_only=True)
class MetricValue:
    """One metric of one task under one backend, and its paired comparison with the reference on the same samples."""

    label: str  # the backend
    value: float | None  # the metric over all samples; null if the backend failed
    difference: float | None = None  # ``value`` minus the reference's; null for the reference or if either failed
    # Lower end of its 95 % confidence interval, by a paired bootstrap over samples; null if it is no average of them.
    low: float | None = None
    high: float | None = None  # its upper end
    lost: int | None = None  # samples that only the reference has right; null if not a right-or-wrong metric
    gained: int | None = None  # samples that only this backend has right
    mcnemar_p: float | None = None  # two-sided p-value of McNemar's exact test on ``lost`` and ``gained``

    @property
    def flips(self) -> int | None:
        """Samples right with one backend and wrong with the other."""
        return None if self.lost is None or self.gained is None else self.lost + self.gained


@dataclass(frozen=True, kw_only=True)
class MetricResult:
    name: str  # its name in lm-eval
    filter: str  # the filter of its answers; usually ``none``
    aggregation: str | None  # how samples are aggregated (``mean``, ``perplexity``); null if lm-eval has no name
    right_or_wrong: bool  # whether every sample is either right, 1, or wrong, 0
    higher_is_better: bool | None  # whether higher is better; null if lm-eval does not say
    values: list[MetricValue]  # one per backend, in order

    @property
    def title(self) -> str:
        return self.name if self.filter == "none" else f"{self.name}, {self.filter}"

    def of(self, label: str) -> MetricValue:
        return next(value for value in self.values if value.label == label)


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    name: str  # its name in lm-eval
    version: str  # version of the task's definition
    output_type: str  # ``multiple_choice``, ``loglikelihood``, ``loglikelihood_rolling`` or ``generate_until``
    num_fewshot: int  # examples in each prompt
    samples: int  # samples that every backend answered
    metrics: list[MetricResult]

    @property
    def accuracy(self) -> MetricResult | None:
        """Its accuracy: the first metric by which samples are right or wrong."""
        return next((metric for metric in self.metrics if metric.right_or_wrong), None)


@dataclass(frozen=True, kw_only=True)
class TaskBackend(BackendInfo):
    """One backend in a section on tasks."""

    failures: dict[str, str]  # why it was stopped, by the given name of a task or a group
    fallbacks: dict[str, int]  # calls that ran another attention, by reason
    mean_accuracy: float | None  # mean over tasks of their first right-or-wrong metric; null if any failed
    low_share: dict[str, float] = field(default_factory=dict)  # of visible keys in low tiles; not of generated texts


@dataclass(frozen=True, kw_only=True)
class GroupMetric:
    """One metric of a group of tasks, aggregated by lm-eval."""

    group: str  # name of the group
    metric: str  # name of the metric, with its filter after a comma
    values: dict[str, float | None]  # by backend; null where it failed


@dataclass(frozen=True, kw_only=True)
class TaskSection(Section):
    """Backends compared on lm-eval tasks: the same samples in the same order."""

    asked: list[str]  # the given names, in order
    limit: int | None  # samples per task; null for all
    batch_size: int  # sequences per forward pass
    processes: int  # processes that split the samples
    chat_template: bool  # whether prompts use the model's chat template
    confidence: float  # level of the intervals
    resamples: int  # bootstrap resamples for each interval
    backends: Compared[TaskBackend]  # in the given order; the first is the reference
    tasks: list[TaskResult] = field(default_factory=list)  # one entry per task
    groups: list[GroupMetric] = field(default_factory=list)  # metrics of groups of tasks


@dataclass(frozen=True, kw_only=True)
class HeadErrors:
    """Error of the attention output of every head with one backend, on the reference's inputs of each layer."""

    label: str  # the backend
    relative_l1: list[list[float]]  # sum |output - reference| / sum |reference|, ``[layer][query head]``
    cosine: list[list[float]]  # mean over tokens of the cosine of output and reference, ``[layer][query head]``
    skipped: list[list[float]] | None = None  # share of low tiles skipped; null for a backend that skips none
    layers: list[int] = field(default_factory=list)  # their numbers in the model; in version 11 they are 0, 1, ...

    @property
    def numbers(self) -> Sequence[int]:
        """Numbers of the layers in the model; their order in files that have none."""
        return self.layers or range(len(self.relative_l1))


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where one backend's greedy continuations diverge from the reference's."""

    label: str  # the backend
    same_tokens: list[int]  # number of leading tokens that equal the reference's, for each prompt
    # Share of the first 64, 256, ... tokens that equal the reference's at the same place, mean over prompts.
    equal_share: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FidelitySection(Section):
    """Backends against SDPA in fp32 on the same text."""

    tokens: PerplexitySection  # token by token; the first backend is SDPA with the weights in fp32
    dtype: str  # data type of the other backends
    head_windows: int  # windows over which the errors of heads were measured
    heads: list[HeadErrors]  # errors by layer and head, of every backend that can run single layers
    prompt_tokens: int  # length of each prompt of the greedy continuations
    new_tokens: int  # tokens generated after each
    divergence: list[Divergence]  # where greedy continuations diverge; one entry per backend


@dataclass(frozen=True, kw_only=True)
class ChannelRange:
    """The largest outlier channel of a layer's keys or queries."""

    layer: str  # the layer's name
    ratio: float  # its range over that of the median channel of its head, for the head with the largest ratio
    head: int  # that head
    channel: int


@dataclass(frozen=True, kw_only=True)
class TwinResult:
    name: str  # what was changed in it
    key_ratio: float | None = None  # largest ratio of a key channel's range to the median channel's, over its layers
    query_ratio: float | None = None  # the same for query channels
    refused: str | None = None  # why the model cannot be changed like this, or null
    tokens: PerplexitySection | None = None  # the backends on it, the first exact; null if the twin was refused


@dataclass(frozen=True, kw_only=True)
class ThresholdStudy:
    """One backend on the unchanged model with other thresholds of tile skipping."""

    label: str  # the backend
    own: float  # its ``skip_threshold``
    thresholds: list[float | None]  # the tested thresholds; null skips nothing
    skipped: list[float | None]  # share of low tiles that each skips in the first window; null if it failed
    tokens: PerplexitySection  # the reference, and the backend with each threshold


@dataclass(frozen=True, kw_only=True)
class StressSection(Section):
    """Backends on the model and on twins of it with larger outlier channels."""

    range_tokens: int  # tokens over which ranges were measured
    key_ranges: list[ChannelRange]  # one entry per attention layer of the model itself
    twins: list[TwinResult]  # the unchanged model comes first
    query_ranges: list[ChannelRange] = field(default_factory=list)  # the same for queries
    thresholds: list[ThresholdStudy] = field(default_factory=list)  # of backends that skip tiles


@dataclass(frozen=True, kw_only=True)
class Results:
    """The first fields of every result file, including those of benchmarks."""

    schema_version: int  # version of the file's schema
    created: str  # date and time in UTC, ISO 8601
    command: str  # the command line, without the folders of the machine
    seed: int  # seed of PyTorch's random numbers
    environment: Environment  # versions and devices


@dataclass(frozen=True, kw_only=True)
class Report(Results):
    """All results in one folder. Its own date, command, seed, environment and model are those of the last command."""

    schema_version: Literal[11, 12] = 12  # version 11 had continuations of the demo, and no numbers of layers
    model: ModelInfo
    perplexity: list[PerplexitySection] = field(default_factory=list)  # one section per text and context
    tasks: list[TaskSection] = field(default_factory=list)  # one section per evaluation on lm-eval tasks
    fidelity: list[FidelitySection] = field(default_factory=list)  # one section per comparison with SDPA in fp32
    stress: list[StressSection] = field(default_factory=list)  # one section per run on twins

    @property
    def sections(self) -> list[tuple[str, Any]]:
        return [(name, section) for name in SECTIONS for section in getattr(self, name)]

    @property
    def own_origin(self) -> Origin:
        """How the last command measured."""
        return Origin(**{each.name: getattr(self, each.name) for each in fields(Origin) if each.name != "request"})


SECTIONS = ("perplexity", "tasks", "fidelity", "stress")
"""The fields of a report that hold sections, in the order in which they are shown."""


def compared(section: Any) -> list[Sequence[BackendInfo]]:
    """The backends of a section: one group, or one for each twin."""
    if isinstance(section, StressSection):
        return [twin.tokens.backends for twin in section.twins if twin.tokens is not None]
    return [section.tokens.backends if isinstance(section, FidelitySection) else section.backends]


def backend_groups(report: Report) -> list[Sequence[BackendInfo]]:
    return [group for _, section in report.sections for group in compared(section)]


def has_failures(section: Any) -> bool:
    studied = [study.tokens.backends for study in section.thresholds] if isinstance(section, StressSection) else []
    results: list[Any] = [each for group in (*compared(section), *studied) for each in group]
    return any(each.failures if isinstance(each, TaskBackend) else each.failure is not None for each in results)


def is_complete(section: Any) -> bool:
    return not has_failures(section) and not getattr(section, "windows_left", 0)


def merged(previous: Report, new: Report) -> Report:
    """Return a new report with the sections of a previous one that it does not measure again.

    A section that was interrupted, or in which a backend failed, does not replace a complete one.
    """

    def is_replaced(old: Any, by: Any) -> bool:
        is_same = old.origin.request == by.origin.request != ""
        return is_same and (is_complete(by) or not is_complete(old))

    sections: dict[str, Any] = {name: [*getattr(new, name)] for name in SECTIONS}
    for name, own in sections.items():
        own[:0] = [old for old in getattr(previous, name) if not any(is_replaced(old, each) for each in own)]
    return replace(new, **sections)


def low_share(lengths: Sequence[int], config: Mapping[str, Any]) -> float:
    """Return the share of visible keys in low tiles, over causal sequences without a window, in layers that have some.

    What is read through a packed cache has low tiles below ``exact_until`` too.
    """
    band: int = (config["sink_tiles"] + config["diagonal_tiles"]) * TILE
    exact = 0 if config.get("cache") else config.get("exact_until", 0)  # reports of older configurations lack it
    first = max(band + TILE, exact)
    tiles = ((begin, min(length, begin + TILE)) for length in lengths for begin in range(first, length, TILE))
    low = sum((begin - band) * (end - begin) for begin, end in tiles)
    return low / sum(length * (length + 1) // 2 for length in lengths)


def backend_configs(report: Report) -> dict[str, dict[str, Any]]:
    """Return the configuration of every ``dma_mxfp`` backend, with numbers for infinities.

    The keys are labels. That of a second configuration ends in `` (2)``.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for backend in (each for group in backend_groups(report) for each in group):
        if backend.config is not None and backend.config not in found.setdefault(backend.label, []):
            found[backend.label].append(backend.config)
    return {
        label if index == 1 else f"{label} ({index})": {
            name: math.inf if value == INFINITY else value for name, value in config.items()
        }
        for label, configs in found.items()
        for index, config in enumerate(configs, 1)
    }


def here_and_now(environment: Environment | None = None) -> dict[str, Any]:
    """Return the date, the command and the environment, by default this one, as fields of :class:`Results`."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created": created, "command": command_line(), "environment": environment or collect()}


def _refuse(constant: str) -> None:
    raise ValueError(f"it has {constant}")


def read_report(path: Path) -> Report:
    """Read the report of a run, given its file or its folder. It must be of the current version."""
    path = path / RESULTS if path.is_dir() else path
    try:
        content = path.read_bytes()
        json.loads(content, parse_constant=_refuse)
        return parse(Report, content)
    except OSError as error:
        raise UserError(f"cannot read the report {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is no report of this version: {error}; measure it again") from error
