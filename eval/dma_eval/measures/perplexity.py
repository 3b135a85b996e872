"""Perplexity and token-level fidelity of several attention backends on the same tokens of one model.

The outer loop is over windows and the inner one over backends. So slow drifts of the machine affect all backends alike,
and only the logits of two passes exist at a time. Statistics are computed in fp32, in chunks of positions.
"""

from __future__ import annotations

import base64
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor
from transformers import PreTrainedModel

import dma_hf
from dma_eval.config import DEFAULT_CONTEXT, PerplexityPart
from dma_eval.console import Progress
from dma_eval.errors import one_line
from dma_eval.load.backends import Backend, activate
from dma_eval.load.data import Text, Tokens, Window, make_windows
from dma_eval.load.models import LoadedModel
from dma_eval.load.reading import NonFiniteLogitsError, origin, read
from dma_eval.results import BackendResult, PerplexitySection
from dma_eval.session import Session

CHUNK_ELEMENTS = 2**24  # logits converted to fp32 at a time: 64 MiB
MAX_POSITION_BUCKETS = 64
Array = NDArray[np.float64]
_PACKED = PlainSerializer(lambda array: base64.b64encode(array.tobytes()).decode(), return_type=str)
Floats = Annotated[
    NDArray[np.float32], PlainValidator(lambda text: np.frombuffer(base64.b64decode(text), np.float32)), _PACKED
]
Bools = Annotated[
    NDArray[np.bool_], PlainValidator(lambda text: np.frombuffer(base64.b64decode(text), np.bool_)), _PACKED
]


@dataclass(frozen=True)
class TokenScores:
    """Scores of every scored token of one window."""

    nll: Floats  # negative log-likelihood in nats, ``[scored]``
    kl: Floats  # KL divergence of the prediction from the reference's, KL(reference || backend) in nats, ``[scored]``
    agree: Bools  # whether the most likely token is the reference's, ``[scored]``


@dataclass
class Pass:
    """The results of one backend on one batch of windows."""

    scores: list[TokenScores] = field(default_factory=list)  # by window; none if the backend failed, here or before
    tokens: int = 0  # tokens that were read
    seconds: float = 0.0  # wall-clock seconds, devices synchronized
    is_first: bool = False  # whether it is the first of its process, which is slower
    peak_memory: int | None = None  # bytes allocated with the model loaded, plus the peak that the pass added
    fallbacks: dict[str, int] = field(default_factory=dict)  # calls that ran other attention, by reason
    failure: str | None = None  # why the backend was stopped; None if it was not


@dataclass(frozen=True)
class Reading:
    """The part of a text that the model reads."""

    text: Text
    tokens: Tokens  # of the whole text
    context: int  # tokens of a full window
    windows: list[Window]  # which tokens to read and to score
    part: PerplexityPart  # how windows were chosen, and the batch size


def measure_perplexity(session: Session, text: Text, part: PerplexityPart) -> PerplexitySection:
    """Measure perplexity and fidelity of every backend on the same tokens, at the one context of ``part``, if any."""
    reading = cut(session.loaded, text, part, next(iter(part.contexts), None))
    place = (f"perplexity, {reading.context:,}",)
    return compare(session, reading, session.backends, place=place, keeps_partial=True)


def default_context(loaded: LoadedModel) -> int:
    """Return 2,048 tokens, or the model's maximum if that is less."""
    return min(DEFAULT_CONTEXT, loaded.max_context or DEFAULT_CONTEXT)


def cut(loaded: LoadedModel, text: Text, part: PerplexityPart, context: int | None = None) -> Reading:
    """Cut a text into windows of ``context`` tokens, by default :func:`default_context`."""
    context = default_context(loaded) if context is None else context
    loaded.check_positions(context, "--context")
    tokens = loaded.tokenize(text.content)
    windows = make_windows(len(tokens.ids), context, part, len(tokens.begins_with))
    return Reading(text, tokens, context, windows, part)


def compare(
    session: Session,
    reading: Reading,
    backends: Sequence[Backend],
    *,
    place: tuple[str, ...],
    seed: int | None = None,
    keeps_partial: bool = False,
    reference_model: Callable[[], PreTrainedModel] | None = None,
    references: int = 1,
) -> PerplexitySection:
    """Run every backend on every window. The first one is the reference of all that name no other.

    A backend that raises or gives logits that are not finite is stopped and marked as failed. The others continue.
    Finished batches are saved under the names ``place``, and reused for the same ``seed``, if the model depends on one.
    ``keeps_partial`` returns partial results of an interrupted run. The first ``references`` backends run on what
    ``reference_model`` returns, which has the same weights in another dtype.
    """
    part, context, model, windows = reading.part, reading.context, session.loaded.model, reading.windows
    batches = make_batches(windows, part.batch_size)
    failed = [False] * len(backends)

    @cache
    def running() -> tuple[list[PreTrainedModel], int]:
        """Return the model of each backend, and the bytes of all. Nothing is loaded if every batch is saved."""
        first = model if reference_model is None else reference_model()
        models = [*[first] * references, *[model] * (len(backends) - references)]
        for each, backend in zip(models, backends, strict=True):
            activate(each, backend)
        return models, allocated(model)

    def read_batch(batch: Sequence[Window]) -> list[Pass]:
        nonlocal failed
        is_first = running.cache_info().currsize == 0
        models, loaded_bytes = running()
        ids = torch.stack([window.of(reading.tokens.ids) for window in batch]).to(model.device)
        runs = list(zip(models, backends, failed, strict=True))
        passes = _read_batch(runs, ids, batch, loaded_bytes, session.progress)
        failed = [each.failure is not None for each in passes]
        return [replace(each, is_first=is_first) for each in passes]

    session.progress.begin("Measuring", len(backends) * len(windows))
    done: list[list[Pass]] = []  # of each batch, the pass of each backend
    reused = 0
    try:
        for index, batch in enumerate(batches):
            passes, is_kept = session.piece(
                list[Pass],
                partial(read_batch, batch),
                *(*place, str(index)),
                backends=backends,
                is_final=lambda passes: all(each.failure is None for each in passes),
                text=reading.text.sha256,
                seed=seed,
                windows=[[window.begin, window.end, window.first, window.prefix] for window in batch],
            )
            done.append(passes)
            if is_kept:
                reused += len(batch)
                session.progress.advance("from the folder", len(batch) * len(backends))
    except KeyboardInterrupt:
        if not keeps_partial or not done:
            raise
    if reused:
        session.progress.kept(f"{reused:,} of {len(windows):,} windows")
    read = list(itertools.chain.from_iterable(batches[: len(done)]))
    return PerplexitySection(
        data=reading.text.info(len(reading.tokens.ids)),
        context=context,
        begins_with=reading.tokens.begins_with,
        stride=min(part.stride or context, context - len(reading.tokens.begins_with)),
        batch_size=part.batch_size,
        windows=len(read),
        windows_left=len(windows) - len(read),
        skip_windows=part.skip_windows,
        spread=part.spread,
        tokens_scored=sum(window.scored for window in read),
        position_edges=position_edges(context),
        backends=summarize(backends, done, read, context),
    )


def make_batches(windows: Sequence[Window], batch_size: int) -> list[list[Window]]:
    """Group consecutive windows of equal length, at most ``batch_size`` at a time."""
    groups = (list(group) for _, group in itertools.groupby(windows, key=lambda window: window.length))
    return [group[i : i + batch_size] for group in groups for i in range(0, len(group), batch_size)]


def _read_batch(
    runs: Sequence[tuple[PreTrainedModel, Backend, bool]],
    ids: Tensor,
    batch: Sequence[Window],
    loaded_bytes: int,
    progress: Progress,
) -> list[Pass]:
    """Run every backend that has not failed on ``ids``, ``[B, T]``: first those that others are compared with."""
    references = [backend.reference or runs[0][1].label for _, backend, _ in runs]
    logits_of: dict[str, Tensor] = {}  # of references, by label
    passes = [Pass(failure="failed before" if has_failed else None) for _, _, has_failed in runs]
    order = sorted(zip(runs, references, passes, strict=True), key=lambda each: each[0][1].label not in references)
    for (model, backend, has_failed), reference, made in order:
        try:
            if not has_failed:
                logits = _forward(model, backend, ids, made, loaded_bytes)
                expected = logits_of.get(reference, [None] * len(batch))
                made.scores = list(map(score, logits, ids, batch, expected))
                if backend.label in references:
                    logits_of[backend.label] = logits
                del logits, expected
        except NonFiniteLogitsError as error:
            made.failure = f"{error}{origin(model, lambda: read(model, backend, ids))}"  # noqa: B023 (called at once)
        except (RuntimeError, ValueError, TypeError) as error:
            made.failure = one_line(error)
        progress.advance(backend.label, len(batch))
    return passes


def _devices(model: PreTrainedModel) -> range:
    return range(torch.cuda.device_count() if model.device.type == "cuda" else 0)


def allocated(model: PreTrainedModel) -> int:
    """Return the bytes that PyTorch has allocated on all GPUs; 0 for a model on the CPU."""
    return sum(map(torch.cuda.memory_allocated, _devices(model)))


def _forward(model: PreTrainedModel, backend: Backend, ids: Tensor, made: Pass, loaded_bytes: int) -> Tensor:
    """Return logits ``[B, T, V]`` of one backend, and note time, memory and fallbacks in ``made``."""
    activate(model, backend)
    dma_hf.reset_stats(model)
    devices, before = _devices(model), allocated(model)
    for device in devices:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    logits = read(model, backend, ids)
    for device in devices:
        torch.cuda.synchronize(device)
    made.seconds = time.perf_counter() - began
    made.tokens = ids.numel()
    if devices:
        made.peak_memory = loaded_bytes - before + sum(map(torch.cuda.max_memory_allocated, devices))
    made.fallbacks = dict(dma_hf.stats(model).fallbacks)
    return logits


def score(logits: Tensor, ids: Tensor, window: Window, reference: Tensor | None = None) -> TokenScores:
    """Score one window of tokens ``[T]`` from logits ``[T, V]`` against the reference's, or against themselves."""
    chunk = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    nll, kl, agree = [], [], []
    for begin in range(window.first - 1, window.length - 1, chunk):  # position i predicts token i + 1
        rows = slice(begin, min(begin + chunk, window.length - 1))
        chunk_logits = logits[rows].float()
        finite = chunk_logits.isfinite()
        if not finite.all():
            where = begin + int((~finite).any(-1).nonzero()[0])
            raise NonFiniteLogitsError(f"NaN or infinite logits, first at position {where} of a window")
        log_probs = chunk_logits.log_softmax(-1)
        targets = ids[rows.start + 1 : rows.stop + 1, None].to(logits.device)
        nll.append(-log_probs.gather(-1, targets).squeeze(-1))
        expected = log_probs if reference is None else reference[rows].float().log_softmax(-1)
        divergence = (expected.exp() * (expected - log_probs)).sum(-1)
        kl.append(divergence.clamp(min=0))  # it is, except for rounding
        agree.append(log_probs.argmax(-1) == expected.argmax(-1))
    return TokenScores(torch.cat(nll).cpu().numpy(), torch.cat(kl).cpu().numpy(), torch.cat(agree).cpu().numpy())


def position_edges(context: int) -> list[int]:
    """Return edges of at most 64 position buckets of equal width, a power of two, over ``context`` positions."""
    width = 1
    while width * MAX_POSITION_BUCKETS < context:
        width *= 2
    return [*range(0, context, width), context]


def summarize(
    backends: Sequence[Backend], batches: Sequence[Sequence[Pass]], windows: Sequence[Window], context: int
) -> list[BackendResult]:
    """Return the statistics of each backend against its reference, over batches of windows in order."""
    passes = dict(zip((backend.label for backend in backends), zip(*batches, strict=True), strict=True))
    results = []
    for backend in backends:
        compared = passes[backend.reference or backends[0].label]
        reference = compared if all(each.failure is None for each in compared) else None
        results.append(_summarize(backend, passes[backend.label], reference, windows, context))
    return results


def _summarize(
    backend: Backend, passes: Sequence[Pass], reference: Sequence[Pass] | None, windows: Sequence[Window], context: int
) -> BackendResult:
    fallbacks = dict(sum((Counter(each.fallbacks) for each in passes), Counter[str]()))
    failure = next((each.failure for each in passes if each.failure is not None), None)
    facts: dict[str, Any] = backend.info | {"reference": backend.reference}
    if failure is not None:
        return BackendResult(**facts, failure=failure, fallbacks=fallbacks)
    nll = _all(passes, "nll")
    mean = float(nll.mean())
    positions = np.concatenate([np.arange(window.first, window.length) for window in windows])
    edges = position_edges(context)
    against: dict[str, Any] = {}
    if reference is not None:
        kl = _all(passes, "kl")
        difference = nll - _all(reference, "nll")
        ratio = _exp(float(difference.mean()))
        stderr = float(difference.std()) / math.sqrt(len(difference))
        against = {
            "change_percent": None if ratio is None else 100 * (ratio - 1),
            "change_stderr": None if ratio is None else 100 * ratio * stderr,
            "kl_mean": float(kl.mean()),
            "kl_p99": float(np.percentile(kl, 99)),
            "kl_max": float(kl.max()),
            "top1_agreement": float(_all(passes, "agree").mean()),
            "position_kl": _bucket_means(kl, positions, edges),
        }
    return BackendResult(
        **facts,
        failure=None,
        perplexity=_exp(mean),
        nll=mean,
        tokens_per_second=tokens_per_second(passes),
        forward_seconds=[each.seconds for each in passes],
        peak_memory_bytes=max((each.peak_memory for each in passes if each.peak_memory is not None), default=None),
        fallbacks=fallbacks,
        window_nll=[float(scores.nll.mean(dtype=np.float64)) for each in passes for scores in each.scores],
        position_nll=_bucket_means(nll, positions, edges),
        **against,
    )


def tokens_per_second(passes: Sequence[Pass]) -> float:
    """Return the throughput of all passes except the first of each process, or of all if there are no others."""
    timed = [each for each in passes if not each.is_first] or passes
    return sum(each.tokens for each in timed) / sum(each.seconds for each in timed)


def _exp(value: float) -> float | None:
    return math.exp(value) if value < 700 else None


def _bucket_means(values: Array, positions: NDArray[np.int64], edges: Sequence[int]) -> list[float | None]:
    count, _ = np.histogram(positions, edges)
    total, _ = np.histogram(positions, edges, weights=values)
    return [float(t / c) if c else None for t, c in zip(total, count, strict=True)]


def _all(passes: Sequence[Pass], name: str) -> Array:
    return np.concatenate([getattr(scores, name) for each in passes for scores in each.scores]).astype(np.float64)
