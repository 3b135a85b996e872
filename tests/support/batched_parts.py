"""Requests of continuous batching against the same ones alone: how each was computed, and that again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import dma_hf

Parts = dict[str, list[tuple[int, int]]]
"""Of the calls that computed a request: tokens before, and new ones."""


def note_parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """Return a mapping that is filled while requests are computed over packed pages."""
    from dma_hf.integrations.paged_cache import PackedPagedCache  # which older versions of Transformers cannot import

    found: Parts = defaultdict(list)

    def note(name: str) -> None:
        original = getattr(PackedPagedCache, name)

        def noted(self: Any, request_id: str, past_length: int, query_length: int, *others: Any) -> None:
            found[request_id].append((past_length, query_length))
            original(self, request_id, past_length, query_length, *others)

        monkeypatch.setattr(PackedPagedCache, name, noted)

    note("fill_block_table")
    note("extend_read_and_write_indices")
    return found


@torch.no_grad()
def assert_as_alone(model: PreTrainedModel, outputs: Mapping[str, Any], parts: Parts, tolerance: float = 1e-5) -> None:
    """Give each request's tokens to the model in the same parts: it must choose the tokens that were generated.

    Args:
        model: The model.
        outputs: What ``generate_batch`` returned.
        parts: How it was computed.
        tolerance: How far below the best a token may be, in its logit, where rounding decides between two.
    """
    for name, output in outputs.items():
        tokens = torch.tensor([output.prompt_ids + output.generated_tokens], device=model.device)
        known = end = 0
        for past, length in parts[name]:
            if past == 0:  # at the start, and again after an eviction
                cache = dma_hf.DMACache(model.config)
                end = 0
            assert past == end
            end = past + length
            logits = model(tokens[:, past:end], past_key_values=cache).logits[0, -1].double()
            if len(output.prompt_ids) <= end < tokens.shape[1]:
                below = float(logits.max() - logits[tokens[0, end]])
                assert below <= tolerance, f"{name}: token {end} of {tokens.shape[1]} is {below:.2g} below the best"
                known += 1
        assert known >= len(output.generated_tokens)
