"""From the records of answers to a section of results: paired differences, intervals and tests. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from .backends import Backend
from .paired import CONFIDENCE, RESAMPLES, STATISTICS, Array, mcnemar, paired_interval, statistic
from .parts import TasksPart
from .results import GroupMetric, MetricResult, MetricValue, TaskBackend, TaskResult, TaskSection
from .session import Session
from .task_records import Sample, TaskRecord, UnitRecord

Records = Mapping[tuple[str, str], UnitRecord]
"""By label of the backend and name that was asked for."""


def summarize_tasks(
    session: Session,
    names: Sequence[str],
    records: Records,
    failures: Mapping[tuple[str, str], str],
    part: TasksPart,
) -> TaskSection:
    """Compare every backend's answers with the first one's.

    Raises:
        RuntimeError: Two backends were not given the same samples.
    """
    labels = [backend.label for backend in session.backends]
    tasks: list[TaskResult] = []
    groups: list[GroupMetric] = []
    for name in names:
        done = {label: records[label, name] for label in labels if (label, name) in records}
        tasks += _tasks(labels, done, session.seed)
        groups += _groups(labels, done)
    return TaskSection(
        asked=list(names),
        limit=part.limit,
        batch_size=part.batch_size,
        processes=session.processes.count,
        chat_template=part.chat_template,
        confidence=CONFIDENCE,
        resamples=RESAMPLES,
        backends=[_backend(backend, names, records, failures, tasks) for backend in session.backends],
        tasks=tasks,
        groups=groups,
    )


def accuracy(task: TaskResult) -> MetricResult | None:
    """The metric that stands for a task's accuracy: the first one by which samples are right or wrong."""
    return next((metric for metric in task.metrics if metric.right_or_wrong), None)


def _backend(
    backend: Backend,
    names: Sequence[str],
    records: Records,
    failures: Mapping[tuple[str, str], str],
    tasks: Sequence[TaskResult],
) -> TaskBackend:
    own = {name: records[backend.label, name] for name in names if (backend.label, name) in records}
    fallbacks = dict(sum((Counter(record.fallbacks) for record in own.values()), Counter[str]()))
    values = [
        value.value
        for task in tasks
        if (metric := accuracy(task)) is not None
        for value in metric.values
        if value.label == backend.label
    ]
    numbers = [value for value in values if value is not None]
    complete = bool(numbers) and len(numbers) == len(values) and len(own) == len(names)
    return TaskBackend(
        **backend.info,
        failures={name: failures[backend.label, name] for name in names if (backend.label, name) in failures},
        seconds={name: record.seconds for name, record in own.items()},
        low_share={name: record.low_share for name, record in own.items() if record.low_share is not None},
        fallbacks=fallbacks,
        mean_accuracy=float(np.mean(numbers)) if complete else None,
    )


def _tasks(labels: Sequence[str], done: Mapping[str, UnitRecord], seed: int) -> list[TaskResult]:
    if not done:
        return []
    first = next(iter(done.values()))
    results = []
    for index, task in enumerate(first.tasks):
        answers = {label: record.tasks[index] for label, record in done.items()}
        _check_paired(task, answers)
        reference = answers.get(labels[0])
        metrics = [
            _metric(task, key, labels, answers, seed)
            for key in task.metrics
            if not all(record.metrics[key] is None for record in answers.values())
        ]
        results.append(
            TaskResult(
                name=task.name,
                version=task.version,
                output_type=task.output_type,
                num_fewshot=task.num_fewshot,
                samples=len({sample.doc_id for sample in task.samples}),
                metrics=metrics,
                answers_changed={label: _changed(reference, answers.get(label)) for label in labels[1:]},
            )
        )
    return results


def _check_paired(task: TaskRecord, answers: Mapping[str, TaskRecord]) -> None:
    def identity(record: TaskRecord) -> list[tuple[int, str, str]]:
        return [(sample.doc_id, sample.filter, sample.prompt_hash) for sample in record.samples]

    for label, record in answers.items():
        if record.name != task.name or identity(record) != identity(task):
            raise RuntimeError(f"task {task.name}: {label} was not asked the same questions as the backends before it")


def _metric(
    task: TaskRecord, key: str, labels: Sequence[str], answers: Mapping[str, TaskRecord], seed: int
) -> MetricResult:
    name, _, filter_name = key.partition(",")
    aggregation = task.aggregations.get(name)
    # A metric without an aggregation is averaged by lm-eval.
    known = aggregation if aggregation is not None or name in task.aggregations else "mean"
    arrays = {label: _array(record.samples, name, filter_name) for label, record in answers.items()}
    reference = arrays.get(labels[0])
    present = [array for array in arrays.values() if array is not None]
    right_or_wrong = known == "mean" and bool(present) and all(_is_right_or_wrong(array) for array in present)
    values: list[MetricValue] = []
    for label in labels:
        array = arrays.get(label) if known in STATISTICS else None
        if array is not None:
            value = statistic(str(known), array)  # summed in the documents' order, however processes split them
        else:
            value = answers[label].metrics[key] if label in answers else None  # type: ignore[assignment]
        base = values[0].value if values else None
        result = MetricValue(label=label, value=value)
        if value is not None and base is not None:
            result = replace(result, difference=value - base)
        if array is not None and reference is not None and label != labels[0]:
            low, high = paired_interval(str(known), reference, array, seed=seed)
            result = replace(result, low=low, high=high)
            if right_or_wrong:
                lost, gained = (int((sign * (reference - array)[:, 0] > 0).sum()) for sign in (1, -1))
                result = replace(result, lost=lost, gained=gained, mcnemar_p=mcnemar(lost, gained))
        values.append(result)
    return MetricResult(
        name=name,
        filter=filter_name,
        aggregation=known,
        right_or_wrong=right_or_wrong,
        higher_is_better=task.higher_is_better.get(name),
        values=values,
    )


def _is_right_or_wrong(array: Array) -> bool:
    return bool(np.isin(array[:, 0], (0.0, 1.0)).all() and (array[:, 1] == 1).all())


def _array(samples: Sequence[Sample], metric: str, filter_name: str) -> Array | None:
    """Values and weights of a metric, ``[N, 2]``; None if a sample has none."""
    own = [sample.values.get(metric) for sample in samples if sample.filter == filter_name]
    if not own or any(value is None for value in own):
        return None
    return np.array(own, dtype=np.float64)


def _changed(reference: TaskRecord | None, other: TaskRecord | None) -> int | None:
    """How many answers differ, counted once per document."""
    if reference is None or other is None:
        return None
    pairs = list(zip(reference.samples, other.samples, strict=True))
    if any(one.answer is None or two.answer is None for one, two in pairs):
        return None
    return len({one.doc_id for one, two in pairs if one.answer != two.answer})


def _groups(labels: Sequence[str], done: Mapping[str, UnitRecord]) -> list[GroupMetric]:
    first = next(iter(done.values()), None)
    if first is None:
        return []
    return [
        GroupMetric(
            group=group,
            metric=key,
            values={label: done[label].groups[group][key] if label in done else None for label in labels},
        )
        for group, metrics in first.groups.items()
        for key in metrics
    ]
