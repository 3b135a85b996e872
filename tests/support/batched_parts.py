"""Compare requests of continuous batching with isolated ones, computed in the same steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import dma_hf
from dma_hf.integrations.cache_argument import CACHE_ARGUMENT

Parts = dict[str, list[tuple[int, int]]]
"""The calls that computed a request: earlier tokens, and new ones."""


def note_parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """Return a mapping that records how requests are computed over packed pages."""
    from dma_hf.integrations.paged_cache import PackedPagedCache  # older versions of Transformers cannot import it

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
    """Run each request's tokens through the model in the same steps, and check that it selects the same tokens.

    Args:
        model: The model.
        outputs: What ``generate_batch`` returned.
        parts: How each request was computed.
        tolerance: How far a token's logit may be below the best, for near ties.
    """
    wrong = []
    for name, output in outputs.items():
        tokens = torch.tensor([output.prompt_ids + output.generated_tokens], device=model.device)
        known = end = 0
        for past, length in parts[name]:
            if past == 0:  # at the start, and after an eviction
                cache = dma_hf.DMACache(model.config)
                end = 0
            assert past == end
            end = past + length
            logits = model(tokens[:, past:end], **{CACHE_ARGUMENT: cache}).logits[0, -1].double()
            if len(output.prompt_ids) <= end < tokens.shape[1]:
                below = float(logits.max() - logits[tokens[0, end]])
                known += 1
                if not below <= tolerance:  # NaN is wrong, too
                    wrong.append(f"{name}: token {end} is {below:.2g} below the best; it has {output.generated_tokens}")
                    break  # the later ones follow from it
        else:
            assert known >= len(output.generated_tokens)
    assert not wrong, "\n".join(wrong)
