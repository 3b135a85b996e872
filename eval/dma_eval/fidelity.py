"""How far each backend is from SDPA in fp32: by token, by position, by head, and in what it generates."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .backends import Backend, activate, new_cache
from .comparison import DEFAULT_CONTEXT, describe_text
from .data import Text, Window, make_windows, tokenize
from .distributed import Processes
from .errors import UserError
from .generation import common_prefix
from .heads import head_errors
from .models import LoadedModel
from .perplexity import check_context, measure
from .results import BackendResult, FidelitySection, PerplexitySection
from .sections import Divergence
from .summary import position_edges, summarize

REFERENCE = Backend("sdpa, fp32", "sdpa")
BUCKETS = 8
HEAD_WINDOWS = 2
PROMPTS, NEW_TOKENS = 4, 64


def compare_with_fp32(
    loaded: LoadedModel,
    text: Text,
    backends: Sequence[Backend],
    *,
    context: int | None = None,
    max_windows: int | None = None,
    batch_size: int = 1,
    head_windows: int = HEAD_WINDOWS,
    prompts: int = PROMPTS,
    new_tokens: int = NEW_TOKENS,
    processes: Processes | None = None,
    on_start: Callable[[int], None] = lambda passes: None,
    on_pass: Callable[[Backend], None] = lambda backend: None,
) -> FidelitySection:
    """Measure the fidelity of every backend.

    Args:
        loaded: The model and its tokenizer. The backends run in its dtype; the reference runs on a copy of it in fp32.
        text: What to read.
        backends: The backends.
        context: Tokens per window; 2,048 by default, or the model's maximum where that is less.
        max_windows: Read at most so many windows.
        batch_size: Windows per forward pass.
        head_windows: Windows for the errors by head; 0 leaves them out.
        prompts: Greedy continuations, each of the first half of a window; 0 leaves them out.
        new_tokens: Tokens to generate after each prompt.
        processes: The processes that split the work; one by default. Each must make this call, and gets all results.
        on_start: Called once with the number of passes to come in this process, or a few more, continuations
            not counted.
        on_pass: Called after each pass with its backend.

    Raises:
        UserError: An option is out of range, the text is too short, or the model cannot run it.
    """
    for name, value in (("--head-windows", head_windows), ("--prompts", prompts)):
        if value < 0:
            raise UserError(f"{name} must be at least 0, got {value}")
    if new_tokens < 1:
        raise UserError(f"--new-tokens must be at least 1, got {new_tokens}")
    if context is None:
        context = min(DEFAULT_CONTEXT, loaded.max_context or DEFAULT_CONTEXT)
    input_ids = tokenize(loaded.tokenizer, text.content)
    windows = make_windows(len(input_ids), context, None, max_windows)
    check_context(loaded, input_ids, context)
    reference_model = in_fp32(loaded.model)
    runs = [REFERENCE, *backends]
    full = [input_ids[window.begin : window.end] for window in windows if window.length == context]
    measured = full[:head_windows]
    processes = processes or Processes()
    on_start(math.ceil(len(windows) / processes.count) * len(runs) + len(processes.share(measured)))
    measurements, memory_kind = measure(
        loaded.model,
        input_ids,
        windows,
        runs,
        batch_size=batch_size,
        reference_model=reference_model,
        processes=processes,
        on_pass=on_pass,
    )
    results = summarize(measurements, windows, context)
    working = [run for run, result in zip(runs, results, strict=True) if run is not REFERENCE and not result.failure]
    heads = (
        head_errors(
            reference_model,
            measured,
            working,
            dtype=loaded.model.dtype,
            processes=processes,
            on_window=lambda: on_pass(REFERENCE),
        )
        if measured and working
        else []
    )
    prompt_tokens = context // 2
    starts = [ids[:prompt_tokens] for ids in full[:prompts]]
    tokens = PerplexitySection(
        data=describe_text(text, input_ids),
        context=context,
        stride=context,
        batch_size=batch_size,
        windows=len(windows),
        tokens_scored=sum(window.scored for window in windows),
        memory_kind=memory_kind,
        position_edges=position_edges(context),
        backends=results,
    )
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
        new_tokens=new_tokens,
        divergence=_divergence(loaded, reference_model, working, starts, new_tokens, processes) if starts else [],
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
    loaded: LoadedModel,
    reference_model: PreTrainedModel,
    backends: Sequence[Backend],
    prompts: Sequence[Tensor],
    new_tokens: int,
    processes: Processes,
) -> list[Divergence]:
    """Processes split the backends, not the prompts: a prompt's tokens may hang on the batch that it is in."""
    own = processes.share(backends)
    expected = _continue(reference_model, REFERENCE, prompts, new_tokens) if own else []
    found: dict[str, Divergence] = {}
    for backend in own:
        tokens = _continue(loaded.model, backend, prompts, new_tokens)
        same = [common_prefix(first, second) for first, second in zip(expected, tokens, strict=True)]
        found[backend.label] = Divergence(label=backend.label, same_tokens=same)
    everything = {label: each for share in processes.gathered(found) for label, each in share.items()}
    return [everything[backend.label] for backend in backends]


@torch.inference_mode()
def _continue(model: PreTrainedModel, backend: Backend, prompts: Sequence[Tensor], new_tokens: int) -> list[list[int]]:
    """Exactly ``new_tokens`` greedy tokens after each prompt, all prompts in one batch."""
    activate(model, backend)
    ids = torch.stack(list(prompts)).to(model.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        past_key_values=new_cache(model, backend),
    )
    tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return tokens
