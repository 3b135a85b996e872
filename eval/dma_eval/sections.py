"""The results file, continued: the sections on tasks, on fidelity by layer and head, and on retrieval."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
class TaskBackend:
    """One backend in a section on tasks.

    Attributes:
        label: Its name in tables and plots, unique in the section.
        implementation: Its name in Transformers.
        config: Its resolved configuration; null for any implementation but ``dma_mxfp``.
        failures: Why it was stopped, by the name that was asked for (a task or a group). Empty is good.
        seconds: Time of the evaluation by the same names, model loading and data preparation not counted.
        fallbacks: How often something ran with other attention than this backend, by reason. Empty is good.
        mean_accuracy: Mean over tasks of their first right-or-wrong metric; null without such tasks or if any failed.
    """

    label: str
    implementation: str
    config: dict[str, Any] | None
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
class RetrievalBackend:
    """One backend in a section on retrieval.

    Attributes:
        label: Its name in tables and plots, unique in the section.
        implementation: Its name in Transformers.
        config: Its resolved configuration; null for any implementation but ``dma_mxfp``.
        failure: Why it was stopped; null if it ran to the end. The cells below are those that it finished.
        cells: By length, then by depth.
    """

    label: str
    implementation: str
    config: dict[str, Any] | None
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
