"""Perplexity and token-level fidelity of several attention backends on the same tokens of one model.

Windows are the outer loop and backends the inner one, so N backends cost N forward passes per window, all see the same
tokens, slow drifts of the machine meet all of them alike, and the logits of no more than two passes (the reference's
and the current one's) exist at a time. The statistics are taken in fp32, in chunks of positions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

import dma_hf

from .backends import Backend, activate
from .data import Window
from .distributed import Processes
from .errors import UserError, one_line
from .memory import MemoryMeter
from .models import LoadedModel
from .nonfinite import NonFiniteLogitsError, origin
from .reading import read

FloatArray = NDArray[np.float32]
CHUNK_ELEMENTS = 2**24  # logits taken to fp32 at a time: 64 MiB


@dataclass
class TokenScores:
    """What was measured at each scored token of one window.

    Attributes:
        nll: Negative log-likelihood in nats, ``[scored]``.
        kl: KL divergence of the prediction from the reference's, KL(reference || backend) in nats, ``[scored]``.
        agree: Whether the most likely token is the reference's, ``[scored]``.
    """

    nll: FloatArray
    kl: FloatArray
    agree: NDArray[np.bool_]


@dataclass
class Measurement:
    """All that was measured of one backend; the statistics are made from it elsewhere.

    Attributes:
        backend: The backend.
        scores: One entry per window, in order.
        forward_seconds: Wall-clock seconds of each forward pass (one per batch), devices synchronised.
        forward_tokens: Tokens read by each forward pass.
        peak_memory: Bytes in use with the model loaded, plus the most that a forward pass of this backend added.
        fallbacks: How often something ran with other attention than this one, by reason.
        failure: Why the backend was stopped; None if it was not.
        warm_ups: Forward passes, the first ones, that are slow for being the first of a process.
    """

    backend: Backend
    scores: list[TokenScores] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    forward_tokens: list[int] = field(default_factory=list)
    peak_memory: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    failure: str | None = None
    warm_ups: int = 1


def check_context(loaded: LoadedModel, input_ids: Tensor, context: int) -> None:
    """Check that the model can read these tokens in windows of ``context``.

    Raises:
        UserError: The context is larger than the model's, or a token is not in the model's vocabulary.
    """
    limit = loaded.max_context
    if limit is not None and context > limit:
        raise UserError(f"--context {context:,} is larger than the model's maximum of {limit:,} positions; lower it")
    vocabulary = loaded.model.get_input_embeddings().num_embeddings
    largest = int(input_ids.max())
    if largest >= vocabulary:
        raise UserError(f"the tokenizer gives token {largest:,}, but the model's vocabulary has {vocabulary:,} entries")


def measure(
    model: PreTrainedModel,
    input_ids: Tensor,
    windows: Sequence[Window],
    backends: Sequence[Backend],
    *,
    batch_size: int = 1,
    reference_model: PreTrainedModel | None = None,
    processes: Processes | None = None,
    on_pass: Callable[[Backend], None] = lambda backend: None,
) -> tuple[list[Measurement], str]:
    """Run every backend on every window.

    A backend whose logits are not finite, or which raises, is stopped and marked as failed; the others go on. If it is
    the first, the reference, then KL and agreement of the others mean nothing.

    Args:
        model: The model; it is left with the last backend.
        input_ids: Token ids of the text, int64 ``[N]``.
        windows: Which tokens to read and to score.
        backends: The backends; the first is the reference.
        batch_size: Windows per forward pass.
        reference_model: What the first backend runs on, the same weights in another dtype; ``model`` by default.
        processes: The processes that split the batches; one by default. Each must make this call, and gets all results.
        on_pass: Called with the backend once per window of this process, also for those that a failed one is spared.

    Returns:
        One measurement per backend, in order, and what their memory counts (``MemoryMeter.kind``).

    Raises:
        UserError: The model cannot run a backend at all.
    """
    models = [model] * len(backends)
    if reference_model is not None:
        models[0] = reference_model
    for running, backend in zip(models, backends, strict=True):
        activate(running, backend)
    measurements = [Measurement(backend) for backend in backends]
    meter = MemoryMeter(model.device)
    processes = processes or Processes()
    batches = make_batches(windows, batch_size)
    for batch in processes.share(batches):
        ids = torch.stack([input_ids[window.begin : window.end] for window in batch]).to(model.device)
        reference: Tensor | None = None
        for index, (running, measurement) in enumerate(zip(models, measurements, strict=True)):
            if measurement.failure is None:
                try:
                    logits = _forward(running, ids, measurement, meter)
                    measurement.scores += [
                        score(row, window_ids, window, None if reference is None else reference[i])
                        for i, (row, window_ids, window) in enumerate(zip(logits, ids, batch, strict=True))
                    ]
                    if index == 0:
                        reference = logits
                    del logits
                except NonFiniteLogitsError as error:
                    measurement.failure = f"{error}{_origin(running, measurement.backend, ids)}"
                except (RuntimeError, ValueError, TypeError) as error:
                    measurement.failure = one_line(error)
            for _ in batch:
                on_pass(measurement.backend)
    shares = processes.gathered(measurements)
    return [merge(parts, [len(batch) for batch in batches]) for parts in zip(*shares, strict=True)], meter.kind


def merge(shares: Sequence[Measurement], batch_sizes: Sequence[int]) -> Measurement:
    """Put together what each of several processes measured of one backend.

    Args:
        shares: One measurement per process; batch ``i`` was measured by process ``i % len(shares)``.
        batch_sizes: Windows of every batch.
    """
    failure = next((share.failure for share in shares if share.failure is not None), None)
    merged = Measurement(
        shares[0].backend,
        peak_memory=max(share.peak_memory for share in shares),
        fallbacks=sum((share.fallbacks for share in shares), Counter()),
        failure=failure,
        warm_ups=sum(bool(share.forward_tokens) for share in shares),
    )
    if failure is not None:
        return merged
    scores = [iter(share.scores) for share in shares]
    for index, size in enumerate(batch_sizes):
        owner, turn = index % len(shares), index // len(shares)
        merged.scores += [next(scores[owner]) for _ in range(size)]
        merged.forward_seconds.append(shares[owner].forward_seconds[turn])
        merged.forward_tokens.append(shares[owner].forward_tokens[turn])
    return merged


def make_batches(windows: Sequence[Window], batch_size: int) -> list[list[Window]]:
    """Group consecutive windows of equal length, at most ``batch_size`` at a time.

    Raises:
        UserError: The batch size is below 1.
    """
    if batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {batch_size}")
    batches: list[list[Window]] = []
    for _, group in groupby(windows, key=lambda window: window.length):
        members = list(group)
        batches += [members[i : i + batch_size] for i in range(0, len(members), batch_size)]
    return batches


def score(logits: Tensor, ids: Tensor, window: Window, reference: Tensor | None = None) -> TokenScores:
    """Score one window.

    Args:
        logits: ``[T, V]``.
        ids: The window's tokens, ``[T]``.
        window: Which of them are scored.
        reference: The reference's logits, ``[T, V]``; the backend is its own reference if there are none.

    Raises:
        NonFiniteLogitsError: A logit is NaN or infinite.
    """
    vocabulary = logits.shape[-1]
    chunk = max(1, CHUNK_ELEMENTS // vocabulary)
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
        if reference is None:
            kl.append(torch.zeros_like(nll[-1]))
            agree.append(torch.ones_like(nll[-1], dtype=torch.bool))
        else:
            reference_log_probs = reference[rows].float().log_softmax(-1)
            divergence = (reference_log_probs.exp() * (reference_log_probs - log_probs)).sum(-1)
            kl.append(divergence.clamp(min=0))  # which it is, but for rounding
            agree.append(log_probs.argmax(-1) == reference_log_probs.argmax(-1))
    return TokenScores(torch.cat(nll).cpu().numpy(), torch.cat(kl).cpu().numpy(), torch.cat(agree).cpu().numpy())


def _origin(model: PreTrainedModel, backend: Backend, ids: Tensor) -> str:
    return origin(model, lambda: read(model, backend, ids))


def _forward(model: PreTrainedModel, ids: Tensor, measurement: Measurement, meter: MemoryMeter) -> Tensor:
    """Logits ``[B, T, V]`` of one backend, with time, memory and fallbacks noted in ``measurement``."""
    activate(model, measurement.backend)
    dma_hf.reset_fallback_counts()
    with meter.measure():
        meter.synchronize()
        began = time.perf_counter()
        logits = read(model, measurement.backend, ids)
        meter.synchronize()
        seconds = time.perf_counter() - began
    measurement.forward_seconds.append(seconds)
    measurement.forward_tokens.append(ids.numel())
    measurement.peak_memory = max(measurement.peak_memory, meter.baseline + meter.increase)
    measurement.fallbacks.update(dma_hf.fallback_counts())
    return logits
