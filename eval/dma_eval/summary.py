"""From what was measured to what is reported: pure functions, no model and no file."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .data import Window
from .perplexity import Measurement
from .results import BackendResult

MAX_POSITION_BUCKETS = 64

Array = NDArray[np.float64]


def position_edges(context: int) -> list[int]:
    """Edges of at most 64 position buckets of equal width, a power of two, over ``context`` positions."""
    width = 1
    while width * MAX_POSITION_BUCKETS < context:
        width *= 2
    return [*range(0, context, width), context]


def summarize(measurements: Sequence[Measurement], windows: Sequence[Window], context: int) -> list[BackendResult]:
    """Statistics of each backend against the first one."""
    reference = measurements[0] if measurements[0].failure is None else None
    return [_summarize(measurement, reference, windows, context) for measurement in measurements]


def _summarize(
    measurement: Measurement, reference: Measurement | None, windows: Sequence[Window], context: int
) -> BackendResult:
    backend = measurement.backend
    config = None if backend.config is None else backend.config.to_dict()
    if measurement.failure is not None:
        return BackendResult(
            label=backend.label,
            implementation=backend.implementation,
            config=config,
            failure=measurement.failure,
            fallbacks=dict(measurement.fallbacks),
        )
    nll = _all(measurement, "nll")
    mean = float(nll.mean())
    kl = None if reference is None else _all(measurement, "kl")
    positions = np.concatenate([np.arange(window.first, window.length) for window in windows])
    edges = position_edges(context)
    change, stderr = (None, None) if reference is None else _change_percent(nll, _all(reference, "nll"))
    return BackendResult(
        label=backend.label,
        implementation=backend.implementation,
        config=config,
        failure=None,
        perplexity=_exp(mean),
        nll=mean,
        change_percent=change,
        change_stderr=stderr,
        kl_mean=None if kl is None else float(kl.mean()),
        kl_p99=None if kl is None else float(np.percentile(kl, 99)),
        kl_max=None if kl is None else float(kl.max()),
        top1_agreement=None if reference is None else float(_all(measurement, "agree").mean()),
        tokens_per_second=tokens_per_second(
            measurement.forward_tokens, measurement.forward_seconds, measurement.warm_ups
        ),
        forward_seconds=measurement.forward_seconds,
        peak_memory_bytes=measurement.peak_memory,
        fallbacks=dict(measurement.fallbacks),
        window_nll=[float(scores.nll.mean(dtype=np.float64)) for scores in measurement.scores],
        position_nll=_bucket_means(nll, positions, edges),
        position_kl=[] if kl is None else _bucket_means(kl, positions, edges),
    )


def tokens_per_second(tokens: Sequence[int], seconds: Sequence[float], warm_ups: int = 1) -> float:
    """Throughput of all passes but the first ``warm_ups``; of all where there are no others."""
    skip = warm_ups if len(tokens) > warm_ups else 0
    return sum(tokens[skip:]) / sum(seconds[skip:])


def _exp(value: float) -> float | None:
    """exp(value); None where a float cannot hold it."""
    return math.exp(value) if value < 700 else None


def _change_percent(nll: Array, reference: Array) -> tuple[float | None, float | None]:
    """Change of perplexity in percent and its standard error, from paired differences of the loss."""
    difference = nll - reference
    ratio = _exp(float(difference.mean()))
    if ratio is None:
        return None, None
    stderr = float(difference.std()) / math.sqrt(len(difference))
    return 100 * (ratio - 1), 100 * ratio * stderr


def _bucket_means(values: Array, positions: NDArray[np.int64], edges: Sequence[int]) -> list[float | None]:
    bucket = np.searchsorted(edges, positions, side="right") - 1
    count = np.bincount(bucket, minlength=len(edges) - 1)
    total = np.bincount(bucket, weights=values, minlength=len(edges) - 1)
    return [float(t / c) if c else None for t, c in zip(total, count, strict=True)]


def _all(measurement: Measurement, name: str) -> Array:
    return np.concatenate([getattr(scores, name) for scores in measurement.scores]).astype(np.float64)
