"""Statistics of paired samples: two backends that answered the same questions. Pure functions on arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 10_000
DRAWS_AT_A_TIME = 2**22  # sample indices drawn at a time: 32 MiB
MAX_KINDS = 256  # distinct samples up to which counting them is faster than drawing them one by one

Array = NDArray[np.float64]

STATISTICS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "mean": lambda mean: mean,
        "perplexity": lambda mean: np.exp(-mean),
        "weighted_perplexity": lambda mean: np.exp(-mean),
        "bits_per_byte": lambda mean: -mean / math.log(2),
    }
)
"""Metrics by lm-eval's name of their aggregation, as functions of a weighted mean: sum of values by sum of weights."""


def statistic(name: str, samples: Array) -> float:
    """The metric of samples ``[N, 2]`` of values and weights."""
    total, weight = samples.sum(0)
    return float(STATISTICS[name](np.asarray(total / weight)))


def paired_interval(
    name: str, reference: Array, other: Array, *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Confidence interval of the difference of a metric, other less reference, by a paired bootstrap.

    Each resample draws samples, with replacement, and takes both backends' answers to them: what makes a question easy
    or hard for both cancels. The interval is the one of percentiles (Efron and Tibshirani, 1993, chapter 13).

    Args:
        name: Which metric, one of :data:`STATISTICS`.
        reference: Values and weights of the reference, ``[N, 2]``.
        other: Those of the other backend, for the same samples in the same order.
        seed: Seed of the draws.
        resamples: How many resamples.
    """
    rng = np.random.default_rng(seed)
    both = np.concatenate([reference, other], axis=1)
    kinds, counts = np.unique(both, axis=0, return_counts=True)
    if len(kinds) <= MAX_KINDS:
        drawn = rng.multinomial(len(both), counts / len(both), size=resamples)
        sums = drawn @ kinds
    else:
        step = max(1, DRAWS_AT_A_TIME // len(both))
        chunks = [min(step, resamples - begin) for begin in range(0, resamples, step)]
        sums = np.concatenate([both[rng.integers(len(both), size=(n, len(both)))].sum(1) for n in chunks])
    of = STATISTICS[name]
    differences = of(sums[:, 2] / sums[:, 3]) - of(sums[:, 0] / sums[:, 1])
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(differences, [tail, 100 - tail])
    return float(low), float(high)


def mcnemar(lost: int, gained: int) -> float:
    """Two-sided p-value of McNemar's exact test: that of ``lost`` heads in ``lost + gained`` throws of a fair coin."""
    from scipy.stats import binomtest  # which takes nearly a second to import, and most commands do not need it

    return float(binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0
