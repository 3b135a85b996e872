"""Forward passes and greedy continuations of a model, in one pass or through a cache.

A backend with a cache reads in chunks of one tile. Low-precision keys are in complete tiles at least one tile back. So
every low-precision key and value is read from the cache, and the scores measure the stored values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from dma_kernels.numerics.formats import TILE
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from dma_hf.integrations.internals import CACHE_ARGUMENT, attention_name

from .backends import Backend, in_chunks, is_hybrid, new_cache
from .models import heads_of

UNFUSED_STEP = 4096
"""Tokens that SDPA reads at once without a fused kernel, because it then holds all scores of a layer twice."""
PROBE = "dma_eval_probe"


def sdpa_is_unfused(model: PreTrainedModel, backend: Backend) -> bool:
    """Return whether SDPA holds all scores of a layer: no fused kernel of PyTorch takes grouped heads in fp32."""
    text = model.config.get_text_config(decoder=True)
    heads, kv_heads, _ = heads_of(text)
    return (
        (backend.implementation, backend.reads_cache, model.device.type) == ("sdpa", False, "cuda")
        and model.dtype == torch.float32
        and kv_heads != heads
        and not is_hybrid(model)
    )


@torch.inference_mode()
def read(
    model: PreTrainedModel, backend: Backend, ids: Tensor, *, mask: Tensor | None = None, last: int | None = None
) -> Tensor:
    """Return the logits ``[B, last, V]`` of the last tokens (by default all) of ``ids`` ``[B, T]``.

    The model already runs ``backend``. The mask ``[B, T]`` is 1 for tokens and 0 for padding, which is on the
    left if the backend reads through a cache.
    """
    length = ids.shape[1]
    last = length if last is None else last
    cache = new_cache(model, backend)
    step = length if cache is None else TILE
    if length > UNFUSED_STEP and sdpa_is_unfused(model, backend):
        cache, step = new_cache(model, in_chunks(backend)), UNFUSED_STEP
    skips = takes_last(model)
    found: Tensor | None = None
    for begin in range(0, length, step):
        end = min(begin + step, length)
        wanted = min(end - begin, last - (length - end))  # below 1 before the requested positions
        inputs: dict[str, Any] = {"input_ids": ids[:, begin:end], "use_cache": cache is not None}
        if skips and wanted < end - begin:
            inputs["logits_to_keep"] = max(wanted, 1)
        if mask is not None:
            inputs["attention_mask"] = mask[:, :end]
        if cache is not None:
            inputs[CACHE_ARGUMENT] = cache
            if mask is not None:
                inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, begin:end]
        logits: Tensor = model(**inputs).logits
        if wanted == last:
            return logits[:, -wanted:]
        if wanted > 0:
            found = logits.new_empty((len(ids), last, logits.shape[2])) if found is None else found
            place = last - (length - end) - wanted
            found[:, place : place + wanted] = logits[:, -wanted:]
    assert found is not None
    return found


def continuation_log_probs(
    model: PreTrainedModel, backend: Backend, pairs: Sequence[tuple[list[int], list[int]]]
) -> Iterator[Tensor]:
    """Yield fp32 log-probabilities ``[T, V]`` at the positions that predict the ``T`` last tokens of each sequence.

    Each pair has the tokens before these, and these. The model already runs ``backend``, and reads all pairs at once.
    """
    rows = [torch.tensor([*before, *after][:-1]) for before, after in pairs]
    longest = max(map(len, rows))
    # A cache needs padding on the left, which it does not store. Without one, padding is on the right.
    side = "left" if backend.reads_cache else "right"
    ids = pad_sequence(rows, batch_first=True, padding_side=side).to(model.device)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
    ends = [longest if side == "left" else len(row) for row in rows]
    first = min(end - len(after) for end, (_, after) in zip(ends, pairs, strict=True))  # position of the first logits
    inputs: dict[str, Any] = {"last": longest - first, "mask": None if bool(mask.all()) else mask.to(model.device)}
    for row, end, (_, after) in zip(read(model, backend, ids, **inputs), ends, pairs, strict=True):
        log_probs = row[end - len(after) - first : end - first].float().log_softmax(-1)
        if bool(log_probs.isnan().any()):  # some models use minus infinity to exclude a token
            where = origin(model, lambda: read(model, backend, ids, **inputs))
            raise NonFiniteLogitsError(f"NaN or infinite logits{where}")
        yield log_probs


def log_likelihood(log_probs: Tensor, tokens: Sequence[int]) -> tuple[float, bool]:
    """Return the log-likelihood of ``tokens``, which the last rows ``[T, V]`` predict, and whether they are greedy."""
    ids = torch.tensor(tokens, device=log_probs.device)
    rows = log_probs[-len(tokens) :]
    return float(rows.gather(-1, ids[:, None]).sum()), bool((rows.argmax(-1) == ids).all())


class NonFiniteLogitsError(RuntimeError):
    """A forward pass gave NaN or infinity."""


def takes_last(model: PreTrainedModel) -> bool:
    """Return whether a model can compute the logits of the last positions only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


@contextmanager
def probed(model: PreTrainedModel, attend: Callable[..., tuple[Tensor, None]]) -> Iterator[dict[str, Any]]:
    """Let the layers of a model call ``attend``, with SDPA's masks, within a ``with`` block.

    ``attend`` has the interface of Transformers' ``AttentionInterface``. The value of the block is the arguments of a
    forward pass whose logits are not needed.
    """
    AttentionInterface.register(PROBE, attend)
    AttentionMaskInterface.register(PROBE, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before = attention_name(model.config)
    try:
        model.set_attn_implementation(PROBE)
        yield {"use_cache": False} | ({"logits_to_keep": 1} if takes_last(model) else {})
    finally:
        model.set_attn_implementation(before)


@torch.inference_mode()
def origin(model: PreTrainedModel, again: Callable[[], object]) -> str:
    """Name the first module with an output that is not finite, by running the pass ``again``."""
    names = {module: name for name, module in model.named_modules() if name}
    found: list[str] = []

    def check(module: torch.nn.Module, inputs: tuple[object, ...], output: object) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if not found and module in names and isinstance(tensor, Tensor) and not tensor.isfinite().all():
            found.append(names[module])

    with torch.nn.modules.module.register_module_forward_hook(check):
        again()
    return f"; they begin in the output of {found[0]}" if found else ""


@torch.inference_mode()
def continued(model: PreTrainedModel, backend: Backend, prompts: Tensor, new_tokens: int, **options: Any) -> Tensor:
    """Return the greedy tokens after each of ``prompts`` ``[B, T]``. The model already runs ``backend``."""
    ids = prompts.to(model.device)
    output: Tensor = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        **{CACHE_ARGUMENT: new_cache(model, backend)},
        **options,
    )
    return output[:, ids.shape[1] :].cpu()
