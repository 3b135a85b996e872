"""Statistics of paired samples, against values worked out by hand, other implementations, and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dma_eval.measures import task_summary
from dma_eval.measures.task_summary import TaskRecord, mcnemar, paired_interval, statistic
from scipy.stats import bootstrap


def samples(*values: float) -> np.ndarray:
    return np.array([[value, 1.0] for value in values])


class TestStatistic:
    def test_mean(self) -> None:
        assert statistic("mean", samples(1, 0, 0, 1, 1)) == pytest.approx(0.6)

    def test_perplexity_is_that_of_the_mean_log_likelihood(self) -> None:
        assert statistic("perplexity", samples(-1.0, -3.0)) == pytest.approx(math.exp(2))

    def test_weights(self) -> None:
        """Word perplexity: 10 nats over 2 words and 2 nats over 4."""
        pairs = np.array([[-10.0, 2.0], [-2.0, 4.0]])
        assert statistic("weighted_perplexity", pairs) == pytest.approx(math.exp(2))
        assert statistic("bits_per_byte", pairs) == pytest.approx(2 / math.log(2))

    def test_as_lm_eval_aggregates(self) -> None:
        from lm_eval.api.registry import get_aggregation

        pairs = [(-10.0, 2), (-2.5, 4), (-1.0, 7)]
        for name in ("weighted_perplexity", "bits_per_byte"):
            assert statistic(name, np.array(pairs)) == pytest.approx(get_aggregation(name)(pairs))
        values = [-0.5, -1.5, -4.0]
        for name in ("mean", "perplexity"):
            assert statistic(name, samples(*values)) == pytest.approx(get_aggregation(name)(values))


class TestMcNemar:
    @pytest.mark.parametrize(
        ("lost", "gained", "expected"),
        [
            (0, 0, 1.0),
            (1, 0, 1.0),  # one throw says nothing: 2 * 1/2
            (5, 0, 2 / 32),
            (0, 5, 2 / 32),
            (6, 2, 2 * (1 + 8 + 28) / 256),
            (4, 4, 1.0),  # twice the lower half is more than 1
        ],
    )
    def test_by_hand(self, lost: int, gained: int, expected: float) -> None:
        assert mcnemar(lost, gained) == pytest.approx(expected)

    def test_many(self) -> None:
        """Counts whose powers of two no float holds; by the normal approximation 3.0 sigma are 0.0027."""
        sigmas, throws = 3.0, 40_000
        lost = round((throws + sigmas * math.sqrt(throws)) / 2)
        assert mcnemar(lost, throws - lost) == pytest.approx(0.0027, rel=0.03)


class TestPairedInterval:
    def test_equal_backends(self) -> None:
        same = samples(1, 0, 1, 1)
        assert paired_interval("mean", same, same) == (0.0, 0.0)

    def test_is_that_of_the_mean_difference(self) -> None:
        """60 samples lost and 30 gained of 1,000: -0.03, standard error sqrt(0.09 - 0.03^2) / sqrt(1000)."""
        reference = samples(*[1] * 560, *[0] * 440)
        other = samples(*[0] * 60, *[1] * 500, *[1] * 30, *[0] * 410)
        low, high = paired_interval("mean", reference, other)
        stderr = math.sqrt((0.09 - 0.03**2) / 1000)
        assert low == pytest.approx(-0.03 - 1.96 * stderr, abs=0.0015)
        assert high == pytest.approx(-0.03 + 1.96 * stderr, abs=0.0015)

    def test_pairing_narrows_it(self) -> None:
        """Hard and easy questions are so for both; shuffled, the same numbers tell much less."""
        rng = np.random.default_rng(0)
        hardness = rng.normal(size=400)
        reference, other = samples(*hardness), samples(*(hardness + 0.01 + 0.01 * rng.normal(size=400)))
        low, high = paired_interval("mean", reference, other)
        assert 0 < low < 0.01 < high
        shuffled_low, shuffled_high = paired_interval("mean", reference, rng.permutation(other))
        assert shuffled_high - shuffled_low > 20 * (high - low)

    @pytest.mark.parametrize("is_binary", [True, False])
    def test_as_scipy(self, is_binary: bool) -> None:
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

    def test_seed(self) -> None:
        rng = np.random.default_rng(2)
        reference, other = samples(*rng.normal(size=50)), samples(*rng.normal(size=50))
        assert paired_interval("mean", reference, other, seed=3) == paired_interval("mean", reference, other, seed=3)
        assert paired_interval("mean", reference, other, seed=3) != paired_interval("mean", reference, other, seed=4)

    def test_covers_the_truth(self) -> None:
        """In 200 simulated comparisons, 95 % of the intervals hold the true difference, give or take the simulation."""
        rng = np.random.default_rng(5)
        held = 0
        for _ in range(200):
            reference = (rng.random(150) < 0.6).astype(float)
            other = np.where(rng.random(150) < 0.2, 1 - reference, reference)  # the truth: 0.2 * (0.4 - 0.6)
            low, high = paired_interval("mean", samples(*reference), samples(*other), resamples=1000)
            held += low <= -0.04 <= high
        assert 0.90 <= held / 200 <= 0.985


def test_what_the_reference_alone_had_right_is_lost() -> None:
    def record(*right: float) -> TaskRecord:
        samples = [{"doc_id": i, "filter": "none", "prompt_hash": "", "acc": each} for i, each in enumerate(right)]
        return TaskRecord(
            name="task", version="1", output_type="multiple_choice", num_fewshot=0, aggregations={"acc": "mean"},
            higher_is_better={"acc": True}, metrics={"acc,none": sum(right) / len(right)}, samples=samples,
        )  # fmt: skip

    answers = {"sdpa": record(1.0, 1.0, 0.0, 1.0), "other": record(0.0, 0.0, 1.0, 1.0)}
    found = task_summary._metric(answers["sdpa"], "acc,none", {"sdpa": "sdpa", "other": "sdpa"}, answers, seed=0)
    assert (found.values[1].lost, found.values[1].gained, found.values[1].difference) == (2, 1, -0.25)
