"""Answers of backends to lm-eval's tasks: records of every sample, saved as files, and their comparison.

The files show single answers, and an interrupted run resumes from them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate.state import PartialState
from numpy.typing import NDArray

from dma_eval.config import TasksPart
from dma_eval.environment import portable
from dma_eval.results import GroupMetric, MetricResult, MetricValue, TaskBackend, TaskResult, TaskSection
from dma_eval.session import Session

CONFIDENCE = 0.95
RESAMPLES = 10_000
COUNTS_AT_A_TIME = 2**22  # 32 MiB

Array = NDArray[np.float64]

STATISTICS: Mapping[str, Callable[[Array], Array]] = {
    "mean": lambda mean: mean,
    "perplexity": lambda mean: np.exp(-mean),
    "weighted_perplexity": lambda mean: np.exp(-mean),
    "bits_per_byte": lambda mean: -mean / math.log(2),
}
"""Functions from a weighted mean (sum of values over sum of weights) to a metric, by lm-eval's aggregation."""


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    name: str  # its name
    version: str  # version of its definition
    output_type: str  # lm-eval's output type
    num_fewshot: int  # examples in each prompt
    aggregations: dict[str, str | None]  # lm-eval's name of each metric's aggregation; null where it has none
    higher_is_better: dict[str, bool | None]  # direction of each metric
    metrics: dict[str, float | None]  # lm-eval's own value of each metric, by ``metric,filter``
    samples: list[dict[str, Any]]  # lm-eval's log of every answer, ordered by document

    @property
    def asked(self) -> tuple[str, list[tuple[int, str, str]]]:
        """The fields that must be equal for every backend in a paired comparison."""
        return self.name, [(each["doc_id"], each["filter"], each["prompt_hash"]) for each in self.samples]

    def values(self, metric: str, filter_name: str) -> Array | None:
        """Values and weights of a metric, ``[N, 2]``; ``None`` if a sample has none."""
        own = [_weighted(each.get(metric)) for each in self.samples if each["filter"] == filter_name]
        return None if not own or None in own else np.array(own, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class UnitRecord:
    """One backend's answers to one given name, a task or a group."""

    fallbacks: dict[str, int]  # number of calls that ran another attention, by reason
    tasks: list[TaskRecord]  # the tasks of the name
    groups: dict[str, dict[str, float | None]]  # metrics of groups, by group and ``metric,filter``
    low_share: float | None = None  # share of visible keys that are in low tiles; null for generated texts


def task_record(name: str, results: Mapping[str, Any], task: Any) -> TaskRecord:
    """Make the record of one task from the results of ``lm_eval.evaluate``."""
    from lm_eval.api.registry import aggregation_registry
    from lm_eval.utils import handle_non_serializable

    names = {aggregation_registry[each]: each for each in reversed(list(aggregation_registry))}
    aggregations = {metric: names.get(function) for metric, function in task.aggregation().items()}
    samples = json.loads(json.dumps(results["samples"][name], default=handle_non_serializable))
    return TaskRecord(
        name=name,
        version=str(results["versions"][name]),
        output_type=str(task.OUTPUT_TYPE),
        num_fewshot=int(results["n-shot"].get(name) or 0),
        aggregations=aggregations,
        higher_is_better={metric: task.higher_is_better().get(metric) for metric in aggregations},
        metrics=metric_values(results["results"][name]),
        samples=sorted(samples, key=lambda each: (each["filter"], each["doc_id"])),
    )


def metric_values(results: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics of a task or a group, by ``metric,filter``; null if one is not a number."""
    keys = [key for key in results if "," in key and not key.partition(",")[0].endswith("_stderr")]
    return {key: float(results[key]) if _is_number(results[key]) else None for key in keys}


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and math.isfinite(value)


def _weighted(value: Any) -> list[float] | None:
    """Return value and weight of one sample; ``None`` for other pairs, such as a reference and a prediction."""
    pair = list(value) if isinstance(value, (list, tuple)) else [value, 1]
    return [float(part) for part in pair] if len(pair) == 2 and all(map(_is_number, pair)) else None


def summarize_tasks(
    session: Session, names: Sequence[str], answers: Mapping[tuple[str, str], UnitRecord | str], part: TasksPart
) -> TaskSection:
    """Compare every backend's answers with the first one's. They are given by backend label and task name."""
    labels = [backend.label for backend in session.backends]
    references = {each.label: each.reference or labels[0] for each in session.backends}
    tasks: list[TaskResult] = []
    groups: list[GroupMetric] = []
    for name in names:
        done = {label: unit for label in labels if isinstance(unit := answers[label, name], UnitRecord)}
        for first in list(done.values())[:1]:
            for index in range(len(first.tasks)):
                records = {label: unit.tasks[index] for label, unit in done.items()}
                tasks.append(_task(references, records, session.seed))
            for group, key in ((group, key) for group, metrics in first.groups.items() for key in metrics):
                values = {label: done[label].groups[group][key] if label in done else None for label in labels}
                groups.append(GroupMetric(group=group, metric=key, values=values))
    backends = []
    for backend in session.backends:
        units = {name: answers[backend.label, name] for name in names}
        own = {name: unit for name, unit in units.items() if isinstance(unit, UnitRecord)}
        accuracies = [metric.of(backend.label).value for task in tasks if (metric := task.accuracy) is not None]
        numbers = [value for value in accuracies if value is not None]
        is_complete = bool(numbers) and len(numbers) == len(accuracies) and len(own) == len(names)
        made = TaskBackend(
            **backend.info,
            reference=backend.reference,
            failures={portable(name): unit for name, unit in units.items() if isinstance(unit, str)},
            low_share={portable(name): each.low_share for name, each in own.items() if each.low_share is not None},
            fallbacks=dict(sum((Counter(record.fallbacks) for record in own.values()), Counter[str]())),
            mean_accuracy=float(np.mean(numbers)) if is_complete else None,
        )
        backends.append(made)
    return TaskSection(
        asked=[*map(portable, names)],
        limit=part.limit,
        batch_size=part.batch_size,
        processes=PartialState().num_processes,
        chat_template=part.chat_template,
        confidence=CONFIDENCE,
        resamples=RESAMPLES,
        backends=backends,
        tasks=tasks,
        groups=groups,
    )


def _task(references: Mapping[str, str], answers: Mapping[str, TaskRecord], seed: int) -> TaskResult:
    task = next(iter(answers.values()))
    for label, record in answers.items():
        if record.asked != task.asked:
            raise RuntimeError(f"task {task.name}: {label} got other questions than the backends before it")
    keys = [key for key in task.metrics if any(record.metrics[key] is not None for record in answers.values())]
    return TaskResult(
        name=task.name,
        version=task.version,
        output_type=task.output_type,
        num_fewshot=task.num_fewshot,
        samples=len({each["doc_id"] for each in task.samples}),
        metrics=[_metric(task, key, references, answers, seed) for key in keys],
    )


def _metric(
    task: TaskRecord, key: str, references: Mapping[str, str], answers: Mapping[str, TaskRecord], seed: int
) -> MetricResult:
    """Compare one metric. ``references`` has every backend with what it is compared with, the first with itself."""
    name, _, filter_name = key.partition(",")
    known = task.aggregations.get(name, "mean")  # lm-eval averages a metric without an aggregation
    arrays = {label: record.values(name, filter_name) for label, record in answers.items()}
    present = {label: array for label, array in arrays.items() if array is not None and known in STATISTICS}
    answered = np.concatenate([*present.values(), np.empty((0, 2))])
    is_binary = bool(np.isin(answered[:, 0], (0, 1)).all() and (answered[:, 1] == 1).all())
    right_or_wrong = known == "mean" and bool(present) and is_binary
    values: list[MetricValue] = []
    first = next(iter(references))
    numbers = {label: record.metrics[key] for label, record in answers.items()}
    # Summed in the order of documents, also with several processes.
    numbers |= {label: statistic(str(known), array) for label, array in present.items()}
    for label, against in references.items():
        value, base = numbers.get(label), numbers.get(against)
        paired: dict[str, Any] = {}
        if label != first and value is not None and base is not None:
            paired["difference"] = value - base
        if label != first and label in present and against in present:
            reference, array = present[against], present[label]
            paired["low"], paired["high"] = paired_interval(str(known), reference, array, seed=seed)
            if right_or_wrong:
                lost, gained = (int((sign * (reference - array)[:, 0] > 0).sum()) for sign in (1, -1))
                paired |= {"lost": lost, "gained": gained, "mcnemar_p": mcnemar(lost, gained)}
        values.append(MetricValue(label=label, value=value, **paired))
    return MetricResult(
        name=name,
        filter=filter_name,
        aggregation=known,
        right_or_wrong=right_or_wrong,
        higher_is_better=task.higher_is_better.get(name),
        values=values,
    )


def statistic(name: str, samples: Array) -> float:
    """Return the metric of samples ``[N, 2]`` of values and weights."""
    total, weight = samples.sum(0)
    return float(STATISTICS[name](np.asarray(total / weight)))


def paired_interval(
    name: str, reference: Array, other: Array, *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Return the confidence interval of the difference of a metric, other minus reference, by a paired bootstrap.

    Each resample draws samples with replacement and uses both backends' answers to them, so the difficulty of a
    question cancels. It is the percentile interval (Efron and Tibshirani, 1993, chapter 13). Values and weights are
    ``[N, 2]``, of the same samples in the same order.
    """
    rng = np.random.default_rng(seed)
    both = np.concatenate([reference, other], axis=1)
    kinds, counts = np.unique(both, axis=0, return_counts=True)  # few, if answers are right or wrong
    step = max(1, COUNTS_AT_A_TIME // len(kinds))
    sizes = [min(step, resamples - begin) for begin in range(0, resamples, step)]
    # How often each kind of sample is drawn, times its values and weights.
    sums = np.concatenate([rng.multinomial(len(both), counts / len(both), size=n) @ kinds for n in sizes])
    of = STATISTICS[name]
    differences = of(sums[:, 2] / sums[:, 3]) - of(sums[:, 0] / sums[:, 1])
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(differences, [tail, 100 - tail])
    return float(low), float(high)


def mcnemar(lost: int, gained: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: ``lost`` heads in ``lost + gained`` throws of a coin."""
    from scipy.stats import binomtest  # the import takes nearly a second, and most commands do not need it

    return float(binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0
