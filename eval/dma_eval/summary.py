"""From what was measured to what is reported: pure functions, no model and no file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .backends import Backend
from .data import Window
from .results import BackendResult

if TYPE_CHECKING:
    from .perplexity import Batch, Pass

MAX_POSITION_BUCKETS = 64

Array = NDArray[np.float64]


def position_edges(context: int) -> list[int]:
    """Edges of at most 64 position buckets of equal width, a power of two, over ``context`` positions."""
    width = 1
    while width * MAX_POSITION_BUCKETS < context:
        width *= 2
    return [*range(0, context, width), context]


def summarize(
    backends: Sequence[Backend], batches: Sequence[Batch], windows: Sequence[Window], context: int
) -> list[BackendResult]:
    """Statistics of each backend against the first one, over batches of windows in order."""
    passes = list(zip(*(batch.passes for batch in batches), strict=True))
    reference = passes[0] if all(each.failure is None for each in passes[0]) else None
    return [
        _summarize(backend, own, reference, windows, context) for backend, own in zip(backends, passes, strict=True)
    ]


def _summarize(
    backend: Backend, passes: Sequence[Pass], reference: Sequence[Pass] | None, windows: Sequence[Window], context: int
) -> BackendResult:
    fallbacks = dict(sum((Counter(each.fallbacks) for each in passes), Counter[str]()))
    failure = next((each.failure for each in passes if each.failure is not None), None)
    if failure is not None:
        return BackendResult(**backend.info, failure=failure, fallbacks=fallbacks)
    nll = _all(passes, "nll")
    mean = float(nll.mean())
    kl = None if reference is None else _all(passes, "kl")
    positions = np.concatenate([np.arange(window.first, window.length) for window in windows])
    edges = position_edges(context)
    change, stderr = (None, None) if reference is None else _change_percent(nll, _all(reference, "nll"))
    return BackendResult(
        **backend.info,
        failure=None,
        perplexity=_exp(mean),
        nll=mean,
        change_percent=change,
        change_stderr=stderr,
        kl_mean=None if kl is None else float(kl.mean()),
        kl_p99=None if kl is None else float(np.percentile(kl, 99)),
        kl_max=None if kl is None else float(kl.max()),
        top1_agreement=None if reference is None else float(_all(passes, "agree").mean()),
        tokens_per_second=tokens_per_second(passes),
        forward_seconds=[each.seconds for each in passes],
        peak_memory_bytes=max(each.peak_memory for each in passes),
        fallbacks=fallbacks,
        window_nll=[float(scores.nll.mean(dtype=np.float64)) for each in passes for scores in each.scores],
        position_nll=_bucket_means(nll, positions, edges),
        position_kl=[] if kl is None else _bucket_means(kl, positions, edges),
    )


def tokens_per_second(passes: Sequence[Pass]) -> float:
    """Throughput of all passes but the first of each process; of all where there are no others."""
    timed = [each for each in passes if not each.is_first] or passes
    return sum(each.tokens for each in timed) / sum(each.seconds for each in timed)


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


def _all(passes: Sequence[Pass], name: str) -> Array:
    return np.concatenate([getattr(scores, name) for each in passes for scores in each.scores]).astype(np.float64)
