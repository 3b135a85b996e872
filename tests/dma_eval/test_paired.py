"""Statistics of paired samples, against values worked out by hand and other implementations."""

from __future__ import annotations

import numpy as np
import pytest
from dma_eval.measures import task_summary
from dma_eval.measures.task_summary import TaskRecord, mcnemar, paired_interval, statistic
from lm_eval.api.registry import get_aggregation
from scipy.stats import bootstrap


def samples(*values):
    return np.array([[value, 1.0] for value in values])


def test_statistics_are_lm_evals():
    pairs = [(-10.0, 2), (-2.5, 4), (-1.0, 7)]
    for name in ("weighted_perplexity", "bits_per_byte"):
        assert statistic(name, np.array(pairs)) == pytest.approx(get_aggregation(name)(pairs))
    values = [-0.5, -1.5, -4.0]
    for name in ("mean", "perplexity"):
        assert statistic(name, samples(*values)) == pytest.approx(get_aggregation(name)(values))


@pytest.mark.parametrize(
    ("lost", "gained", "expected"),
    [
        (0, 0, 1.0),
        (0, 5, 2 / 32),
        (6, 2, 2 * (1 + 8 + 28) / 256),
        (4, 4, 1.0),  # twice the lower half is more than 1
        (20_300, 19_700, 0.0027),  # 3 sigma of the normal approximation; no float holds these powers of two
    ],
)
def test_mcnemar(lost, gained, expected):
    assert mcnemar(lost, gained) == pytest.approx(expected, rel=0.03 if lost > 9 else None)


class TestPairedInterval:
    def test_equal_backends(self):
        same = samples(1, 0, 1, 1)
        assert paired_interval("mean", same, same) == (0.0, 0.0)

    @pytest.mark.parametrize("is_binary", [True, False])
    def test_as_scipy(self, is_binary):
        """Which draws samples one by one, and many resamples at a time or few."""
        rng = np.random.default_rng(1)
        if is_binary:
            first = rng.integers(0, 2, 500).astype(float)
            second = np.where(rng.random(500) < 0.1, 1 - first, first)
        else:
            first = rng.normal(size=500)
            second = first + 0.2 * rng.normal(size=500)
        differs = lambda one, two, axis: two.mean(axis) - one.mean(axis)  # noqa: E731
        expected = bootstrap((first, second), differs, paired=True, method="percentile", rng=0).confidence_interval
        assert paired_interval("mean", samples(*first), samples(*second)) == pytest.approx(expected, abs=0.003)

    def test_seed(self):
        rng = np.random.default_rng(2)
        reference, other = samples(*rng.normal(size=50)), samples(*rng.normal(size=50))
        assert paired_interval("mean", reference, other, seed=3) == paired_interval("mean", reference, other, seed=3)
        assert paired_interval("mean", reference, other, seed=3) != paired_interval("mean", reference, other, seed=4)


def test_what_the_reference_alone_had_right_is_lost():
    def record(*right):
        samples = [{"doc_id": i, "filter": "none", "prompt_hash": "", "acc": each} for i, each in enumerate(right)]
        return TaskRecord(
            name="task", version="1", output_type="multiple_choice", num_fewshot=0, aggregations={"acc": "mean"},
            higher_is_better={"acc": True}, metrics={"acc,none": sum(right) / len(right)}, samples=samples,
        )  # fmt: skip

    answers = {"sdpa": record(1.0, 1.0, 0.0, 1.0), "other": record(0.0, 0.0, 1.0, 1.0)}
    found = task_summary._metric(answers["sdpa"], "acc,none", {"sdpa": "sdpa", "other": "sdpa"}, answers, seed=0)
    assert (found.values[1].lost, found.values[1].gained, found.values[1].difference) == (2, 1, -0.25)
