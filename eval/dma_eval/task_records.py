"""What one backend answered to one task or group, sample by sample: made from lm-eval's results, kept as files.

The files are both the record for whoever wants to look at single answers, and what an interrupted run resumes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FOLDER = "samples"
"""Where they lie in a run's folder: a folder for each backend, and in it a file for each name."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer."""

    doc_id: int  # number of the document in its task
    filter: str  # the filter of the answers that the values belong to
    prompt_hash: str  # lm-eval's hash of the prompt: equal for every backend, or the comparison is not paired
    # What was answered: the number of the choice, whether a continuation is the greedy one, or a text; null for tasks
    # that only measure likelihood.
    answer: Any
    values: dict[str, list[float]]  # value and weight of each metric that averages over samples


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """One task."""

    name: str  # its name
    version: str  # version of its definition
    output_type: str  # lm-eval's output type
    num_fewshot: int  # examples in each prompt
    aggregations: dict[str, str | None]  # lm-eval's name of each metric's aggregation; null where it has none
    higher_is_better: dict[str, bool | None]  # direction of each metric
    metrics: dict[str, float | None]  # lm-eval's own value of each metric, by ``metric,filter``
    samples: list[Sample]  # every answer, ordered by document


@dataclass(frozen=True, kw_only=True)
class UnitRecord:
    """One backend's answers to one name that was asked for, a task or a group."""

    seconds: float  # time of the evaluation
    fallbacks: dict[str, int]  # how often something ran with other attention, by reason
    tasks: list[TaskRecord]  # the tasks behind the name
    groups: dict[str, dict[str, float | None]]  # metrics of groups, by group and ``metric,filter``
    low_share: float | None = None  # of the keys that queries saw, those that low tiles held; null of generated texts


def task_record(name: str, results: Mapping[str, Any], task: Any) -> TaskRecord:
    """Make the record of one task from the results of ``lm_eval.evaluate``."""
    aggregations = {metric: _aggregation_name(function) for metric, function in task.aggregation().items()}
    samples = [_sample(sample, task.OUTPUT_TYPE) for sample in results["samples"][name]]
    return TaskRecord(
        name=name,
        version=str(results["versions"][name]),
        output_type=str(task.OUTPUT_TYPE),
        num_fewshot=int(results["n-shot"].get(name) or 0),
        aggregations=aggregations,
        higher_is_better={metric: task.higher_is_better().get(metric) for metric in aggregations},
        metrics=metric_values(results["results"][name]),
        samples=sorted(samples, key=lambda sample: (sample.filter, sample.doc_id)),
    )


def metric_values(results: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics among lm-eval's results of a task or a group, by ``metric,filter``; null where one is no number."""
    return {
        key: _finite(value)
        for key, value in results.items()
        if "," in key and not key.partition(",")[0].endswith("_stderr")
    }


def _finite(value: Any) -> float | None:
    number = float(value) if isinstance(value, (int, float)) else None
    return number if number is not None and abs(number) < float("inf") else None


def _aggregation_name(function: Any) -> str | None:
    from lm_eval.api.registry import aggregation_registry

    return next((name for name in aggregation_registry if aggregation_registry[name] is function), None)


def _sample(sample: Mapping[str, Any], output_type: str) -> Sample:
    values = {metric: value for metric in sample["metrics"] if (value := _weighted(sample[metric])) is not None}
    return Sample(
        doc_id=int(sample["doc_id"]),
        filter=str(sample["filter"]),
        prompt_hash=str(sample["prompt_hash"]),
        answer=_answer(sample["filtered_resps"], output_type),
        values=values,
    )


def _weighted(value: Any) -> list[float] | None:
    """Value and weight of one sample; None of what has none, such as the pair of a reference and a prediction."""
    pair = tuple(value) if isinstance(value, (list, tuple)) else (value, 1)
    if len(pair) != 2 or not all(isinstance(part, (bool, int, float)) for part in pair):
        return None
    numbers = [float(part) for part in pair]
    return numbers if all(abs(number) < float("inf") for number in numbers) else None


def _answer(responses: list[Any], output_type: str) -> Any:
    if output_type == "multiple_choice":
        scores = [float(log_likelihood) for log_likelihood, _ in responses]
        return scores.index(max(scores))
    if output_type == "loglikelihood":
        return bool(responses[0][1])
    if output_type == "generate_until":
        return str(responses[0])
    return None
