"""One pass of a model over token sequences, the way that a backend reads: at once, or through the cache it asks for.

A backend with a cache reads in chunks of one tile. Keys in low precision are complete tiles that lie at least one tile
back, so that with such chunks each of them, and its value, is read from where the cache stores it: what is scored is
what is stored. One pass at once gives the same numbers to rounding, which the tests hold; a cache is asked for to
measure it, not to believe it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from dma_kernels.numerics.formats import TILE
from torch import Tensor
from transformers import PreTrainedModel

from .backends import Backend, new_cache


@torch.inference_mode()
def read(
    model: PreTrainedModel, backend: Backend, ids: Tensor, *, mask: Tensor | None = None, last: int | None = None
) -> Tensor:
    """Run a causal model that has been switched to ``backend``.

    Args:
        model: The model.
        backend: How it reads.
        ids: Tokens, int64 ``[B, T]``.
        mask: 1 for tokens and 0 for padding, ``[B, T]``; for a backend with a cache, padding is on the left.
        last: How many of the last positions logits are wanted of; all by default.

    Returns:
        Logits, ``[B, last, V]``.
    """
    length = ids.shape[1]
    last = length if last is None else last
    takes_last = "logits_to_keep" in inspect.signature(model.forward).parameters
    cache = new_cache(model, backend)
    step = length if cache is None else TILE
    found: Tensor | None = None
    for begin in range(0, length, step):
        end = min(begin + step, length)
        wanted = min(end - begin, last - (length - end))  # below 1 before the positions that are wanted
        inputs: dict[str, Any] = {"input_ids": ids[:, begin:end], "use_cache": cache is not None}
        if takes_last and wanted < end - begin:
            inputs["logits_to_keep"] = max(wanted, 1)
        if mask is not None:
            inputs["attention_mask"] = mask[:, :end]
        if cache is not None:
            inputs["past_key_values"] = cache
            if mask is not None:
                inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, begin:end]
        logits: Tensor = model(**inputs).logits
        if wanted <= 0:
            continue
        if wanted == last:
            return logits[:, -wanted:]
        if found is None:
            found = logits.new_empty((len(ids), last, logits.shape[2]))
        place = last - (length - end) - wanted
        found[:, place : place + wanted] = logits[:, -wanted:]
    assert found is not None
    return found
