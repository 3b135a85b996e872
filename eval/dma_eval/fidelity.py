"""How far each backend is from SDPA in fp32: by token, by position, by head, and in what it generates."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .backends import Backend, activate
from .data import Text, Window
from .errors import UserError
from .generation import common_prefix, continued
from .heads import head_errors
from .parts import FidelityPart, PerplexityPart
from .perplexity import compare, cut, default_context
from .results import BackendResult, Divergence, FidelitySection
from .session import Session

REFERENCE = Backend("sdpa, fp32", "sdpa")
BUCKETS = 8


def measure_fidelity(session: Session, text: Text, part: FidelityPart) -> FidelitySection:
    """Measure the fidelity of every backend.

    Args:
        session: The model and the backends, which run in its dtype; the reference runs on a copy of it in fp32.
        text: What to read.
        part: How.

    Raises:
        UserError: An option is out of range, the text is too short, or the model cannot run it.
    """
    for name, value in (("--head-windows", part.head_windows), ("--prompts", part.prompts)):
        if value < 0:
            raise UserError(f"{name} must be at least 0, got {value}")
    if part.new_tokens < 1:
        raise UserError(f"--new-tokens must be at least 1, got {part.new_tokens}")
    loaded = session.loaded
    context = part.context or default_context(loaded)
    reading = PerplexityPart(max_windows=part.max_windows, batch_size=part.batch_size)
    input_ids, windows = cut(loaded, text, reading, context)
    reference_model = in_fp32(loaded.model)
    runs = [REFERENCE, *session.backends]
    tokens = compare(
        session, text, input_ids, windows, context, runs, reading, name="fidelity", reference_model=reference_model
    )
    results = tokens.backends
    working = [run for run, result in zip(runs, results, strict=True) if run is not REFERENCE and not result.failure]
    full = [input_ids[window.begin : window.end] for window in windows if window.length == context]
    measured = full[: part.head_windows] if working else []
    heads = head_errors(session, reference_model, measured, working) if measured else []
    prompt_tokens = context // 2
    starts = [ids[:prompt_tokens] for ids in full[: part.prompts]]
    edges = bucket_edges(tokens.position_edges)
    return FidelitySection(
        tokens=tokens,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        bucket_edges=edges,
        bucket_change={
            result.label: bucket_changes(results[0], result, windows, tokens.position_edges, edges)
            for result in results[1:]
        },
        head_windows=len(measured),
        heads=heads,
        prompt_tokens=prompt_tokens,
        new_tokens=part.new_tokens,
        divergence=_divergence(session, reference_model, working, starts, part.new_tokens) if starts else [],
    )


def in_fp32(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself if its weights are fp32, else a copy with the same weights in fp32.

    Raises:
        UserError: There is no memory for the copy, or the weights are packed.
    """
    if model.dtype == torch.float32:
        return model
    packed = next((name for name, weight in model.named_parameters() if not _is_plain(weight)), None)
    if packed is not None:
        raise UserError(f"the reference needs weights that fp32 can hold as they are, and {packed} is packed")
    try:
        # Not the model's own float(): that refuses whatever came from a quantised file, be it dequantised by now.
        converted: PreTrainedModel = nn.Module.float(copy.deepcopy(model))
    except (torch.OutOfMemoryError, MemoryError) as error:
        gib = 4 * model.num_parameters() / 2**30
        raise UserError(
            f"the reference needs {gib:,.1f} GiB more for the weights in fp32; use a larger device"
        ) from error
    return converted


def _is_plain(weight: nn.Parameter) -> bool:
    """Whether a weight is a tensor of floating-point numbers, and not one of a library's packed ones."""
    return weight.is_floating_point() and type(weight) is nn.Parameter and type(weight.data) is Tensor


def bucket_edges(edges: Sequence[int]) -> list[int]:
    """Every few of the fine edges, so that at most 8 buckets remain."""
    step = math.ceil((len(edges) - 1) / BUCKETS)
    return [*edges[:-1:step], edges[-1]]


def bucket_changes(
    reference: BackendResult,
    result: BackendResult,
    windows: Sequence[Window],
    fine: Sequence[int],
    coarse: Sequence[int],
) -> list[float | None]:
    """Change of perplexity in percent in each coarse bucket, of the losses in the fine ones."""
    if not result.position_nll or not reference.position_nll:
        return []
    counts = [
        sum(max(0, min(high, window.length) - max(low, window.first)) for window in windows)
        for low, high in pairwise(fine)
    ]
    changes: list[float | None] = []
    for low, high in pairwise(coarse):
        total, difference = 0, 0.0
        for begin, count, one, two in zip(fine, counts, result.position_nll, reference.position_nll, strict=False):
            if low <= begin < high and one is not None and two is not None:
                total += count
                difference += count * (one - two)
        changes.append(100 * math.expm1(difference / total) if total and difference / total < 700 else None)
    return changes


def _divergence(
    session: Session,
    reference_model: PreTrainedModel,
    backends: Sequence[Backend],
    prompts: Sequence[Tensor],
    new_tokens: int,
) -> list[Divergence]:
    """Processes split the backends, not the prompts: a prompt's tokens may hang on the batch that it is in."""
    own = session.processes.share(backends)
    expected = _continue(reference_model, REFERENCE, prompts, new_tokens) if own else []
    found: dict[str, Divergence] = {}
    for backend in own:
        tokens = _continue(session.loaded.model, backend, prompts, new_tokens)
        same = [common_prefix(first, second) for first, second in zip(expected, tokens, strict=True)]
        found[backend.label] = Divergence(label=backend.label, same_tokens=same)
    everything = {label: each for share in session.processes.gathered(found) for label, each in share.items()}
    return [everything[backend.label] for backend in backends]


def _continue(model: PreTrainedModel, backend: Backend, prompts: Sequence[Tensor], new_tokens: int) -> list[list[int]]:
    """Exactly ``new_tokens`` greedy tokens after each prompt, all prompts in one batch."""
    activate(model, backend)
    return continued(model, backend, torch.stack(list(prompts)), new_tokens, min_new_tokens=new_tokens)
