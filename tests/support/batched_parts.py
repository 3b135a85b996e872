"""Run requests of continuous batching, and compare them with isolated ones, computed in the same steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

import dma_hf
from dma_hf.integrations.internals import CACHE_ARGUMENT

Parts = dict[str, list[tuple[int, int]]]
"""The calls that computed a request: earlier tokens, and new ones."""


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return prompts of these lengths without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]


def generate_batch(
    model: PreTrainedModel,
    prompts: list[list[int]],
    new_tokens: int,
    *,
    persistent_manager: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Return the outputs of greedy requests. The options are those of ``ContinuousBatchingConfig``."""
    settings = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, bos_token_id=1)
    batching = ContinuousBatchingConfig(**options)
    outputs: dict[str, Any] = model.generate_batch(
        prompts, generation_config=settings, continuous_batching_config=batching, persistent_manager=persistent_manager
    )
    assert [output.error for output in outputs.values()] == [None] * len(prompts)
    return outputs


def note_parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """Return a mapping that records how requests are computed over packed pages."""
    from dma_hf.integrations.paged_cache import PackedPagedCache  # older versions of Transformers cannot import it

    found: Parts = defaultdict(list)

    def noted(original: Callable[..., None]) -> Callable[..., None]:
        def call(self: Any, request_id: str, past_length: int, query_length: int, *others: Any) -> None:
            found[request_id].append((past_length, query_length))
            original(self, request_id, past_length, query_length, *others)

        return call

    for name in ("fill_block_table", "extend_read_and_write_indices"):
        monkeypatch.setattr(PackedPagedCache, name, noted(getattr(PackedPagedCache, name)))
    return found


@torch.no_grad()
def assert_as_alone(
    model: PreTrainedModel,
    outputs: Mapping[str, Any],
    parts: Parts,
    tolerance: float = 1e-5,
    *,
    in_batches: bool = False,
) -> None:
    """Run each request's tokens through the model in the same steps, and check that it selects the same tokens.

    For near ties, a token's logit may be ``tolerance`` below the best. With ``in_batches``, requests of equal lengths
    and steps run as a batch without padding, which takes less time.
    """
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, output in outputs.items():
        lengths = len(output.prompt_ids), len(output.generated_tokens)
        groups[(*lengths, *parts[name]) if in_batches else name].append(name)
    wrong: dict[str, str] = {}  # the first token of a request: the later ones follow from it
    for names in groups.values():
        members = [outputs[name] for name in names]
        prompt_length, new_tokens = len(members[0].prompt_ids), len(members[0].generated_tokens)
        tokens = torch.tensor([each.prompt_ids + each.generated_tokens for each in members], device=model.device)
        known = end = 0
        for past, length in parts[names[0]]:
            if past == 0:  # at the start, and after an eviction
                cache = dma_hf.DMACache(model.config)
                end = 0
            assert past == end
            end = past + length
            logits = model(tokens[:, past:end], **{CACHE_ARGUMENT: cache}).logits[:, -1].double()
            if prompt_length <= end < tokens.shape[1]:
                known += 1
                gaps = logits.amax(1) - logits.gather(1, tokens[:, end, None])[:, 0]
                for name, gap in zip(names, gaps.tolist(), strict=True):
                    if not gap <= tolerance:  # NaN is wrong, too
                        wrong.setdefault(name, f"{name}: token {end} is {gap:.2g} below the best")
        assert known >= new_tokens
    assert not wrong, "\n".join(wrong.values())
