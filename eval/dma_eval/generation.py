"""Greedy continuations of one prompt by several backends, with the KV cache: what a user would see of a difference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .backends import Backend, activate, new_cache
from .results import Generation
from .session import Session

SHOWN_PROMPT_CHARACTERS = 300


def continue_greedily(session: Session, prompt: Tensor, new_tokens: int) -> list[Generation]:
    """Let every backend continue ``prompt`` (token ids, ``[T]``) by ``new_tokens`` tokens or to the end of the text."""
    model, tokenizer = session.loaded.model, session.loaded.tokenizer
    session.progress.begin("Generating", len(session.backends))
    prompt_end = tokenizer.decode(prompt, skip_special_tokens=True)[-SHOWN_PROMPT_CHARACTERS:]
    generations: list[Generation] = []
    for backend in session.backends:
        activate(model, backend)
        began = time.perf_counter()
        (tokens,) = continued(model, backend, prompt[None], new_tokens)
        seconds = time.perf_counter() - began
        first = generations[0].tokens if generations else tokens
        generations.append(
            Generation(
                label=backend.label,
                prompt_tokens=len(prompt),
                prompt_end=prompt_end,
                continuation=tokenizer.decode(tokens, skip_special_tokens=True),
                tokens=tokens,
                same_tokens=common_prefix(first, tokens),
                seconds=seconds,
            )
        )
        session.progress.advance(backend.label)
    return generations


@torch.inference_mode()
def continued(
    model: PreTrainedModel, backend: Backend, prompts: Tensor, new_tokens: int, **options: Any
) -> list[list[int]]:
    """Greedy tokens after each of ``prompts`` ``[B, T]``, of a model that has been switched to ``backend``."""
    ids = prompts.to(model.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        past_key_values=new_cache(model, backend),
        **options,
    )
    tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return tokens


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading elements that are equal."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
