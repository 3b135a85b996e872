"""Which batches have prompts, and which have decoding requests."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from dma_hf.integrations import manager
from dma_hf.integrations.manager import PROMPT_INTERVAL, PromptScheduler

BUDGET = 1000  # tokens of a batch
REQUESTS = 8  # of a batch


@pytest.fixture
def scheduler(monkeypatch) -> PromptScheduler:
    monkeypatch.setattr(manager, "FEW_DECODING", 0)
    cache = MagicMock(use_prefix_sharing=False, max_blocks_per_request=4, max_decode_fast_path_length=512)
    cache.compute_free_capacity.return_value = 1.0
    cache.read_cache_limit = None
    return PromptScheduler(cache, None, REQUESTS)


def add(scheduler: PromptScheduler, name: str, tokens: int) -> None:
    scheduler.add_waiting_request(RequestState(name, list(range(tokens))))


def step(scheduler: PromptScheduler) -> dict[str, int]:
    """Run a batch, and return how many tokens of which request it has."""
    batch, *_ = scheduler.schedule_batch(BUDGET, 10**6)
    found = {}
    for future in batch:
        state = future.state
        found[state.request_id] = len(state.tokens_to_process)
        state.position_offset += len(state.tokens_to_process)
        if state.status == RequestStatus.DECODING:
            state.tokens_to_process = [0]
    return found


def test_prompts_wait_for_each_other_while_requests_decode(scheduler):
    add(scheduler, "a", 100)
    assert step(scheduler) == {"a": 100}
    add(scheduler, "b", 100)
    for _ in range(PROMPT_INTERVAL - 2):
        assert step(scheduler) == {"a": 1}
    add(scheduler, "c", 100)
    assert step(scheduler) == {"a": 1}
    assert step(scheduler) == {"b": 100, "c": 100}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1}


def test_prompts_join_few_decoding_requests(scheduler, monkeypatch):
    monkeypatch.setattr(manager, "FEW_DECODING", 1)
    add(scheduler, "a", 100)
    step(scheduler)
    add(scheduler, "b", 100)
    assert step(scheduler) == {"a": 1, "b": 100}
    add(scheduler, "c", 100)
    for _ in range(PROMPT_INTERVAL - 1):
        assert step(scheduler) == {"a": 1, "b": 1}
    assert step(scheduler) == {"c": 100}


def test_a_prompt_that_comes_late_does_not_wait(scheduler):
    add(scheduler, "a", 100)
    for _ in range(PROMPT_INTERVAL):
        step(scheduler)
    add(scheduler, "b", 100)
    assert step(scheduler) == {"b": 100}


def test_a_prompt_does_not_wait_if_no_request_decodes(scheduler):
    add(scheduler, "a", 100)
    step(scheduler)
    scheduler.finish_request("a")
    add(scheduler, "b", 100)
    assert step(scheduler) == {"b": 100}


def test_prompts_that_fill_a_batch_wait_for_a_single_one(scheduler):
    add(scheduler, "a", 100)
    step(scheduler)
    add(scheduler, "b", BUDGET - 1)
    assert step(scheduler) == step(scheduler) == {"a": 1}
    add(scheduler, "c", 1)
    assert step(scheduler) == {"b": BUDGET - 1, "c": 1}


def test_a_prompt_that_fits_a_batch_is_not_split(scheduler):
    add(scheduler, "a", BUDGET - 1)
    add(scheduler, "b", 2)
    assert step(scheduler) == {"a": BUDGET - 1}
    assert step(scheduler) == {"a": 1}
    for _ in range(PROMPT_INTERVAL - 2):
        step(scheduler)
    assert step(scheduler) == {"b": 2}


def test_a_split_prompt_and_decoding_take_turns(scheduler):
    add(scheduler, "a", 100)
    step(scheduler)
    add(scheduler, "b", 2 * BUDGET + 100)
    taken = [step(scheduler) for _ in range(6)]
    assert taken == [{"a": 1}, {"b": BUDGET}, {"a": 1}, {"b": BUDGET}, {"a": 1}, {"b": 100}]


@pytest.mark.parametrize("reason", ["blocked", "beyond the safety margin"])
def test_prompts_wait_for_memory_while_requests_decode(scheduler, reason):
    add(scheduler, "a", 100)
    step(scheduler)
    if reason == "blocked":  # as after requests were offloaded
        scheduler.block_new_requests = True
    else:
        scheduler.cache.compute_free_capacity.return_value = 0.0
        scheduler.cache.evict_cached_blocks.return_value = False
    add(scheduler, "b", 100)
    for _ in range(2 * PROMPT_INTERVAL):
        assert step(scheduler) == {"a": 1}
    scheduler.block_new_requests = False
    scheduler.cache.compute_free_capacity.return_value = 1.0
    assert step(scheduler) == {"b": 100}


def test_no_more_requests_are_admitted_than_a_batch_takes(scheduler):
    for name in range(REQUESTS):
        add(scheduler, f"a{name}", 1)
    assert len(step(scheduler)) == REQUESTS
    add(scheduler, "b", 100)
    for _ in range(PROMPT_INTERVAL):
        assert "b" not in step(scheduler)
    scheduler.finish_request("a0")
    assert step(scheduler) == {"b": 100}


def test_requests_decode_if_a_prompt_does_not_fit(scheduler):
    add(scheduler, "a", 100)
    step(scheduler)
    add(scheduler, "b", BUDGET)
    scheduler.cache.can_store_request_tokens = lambda state, _: state.request_id == "a"
    assert step(scheduler) == step(scheduler) == {"a": 1}


def test_without_memory_there_is_no_batch(scheduler):
    scheduler.cache.can_store_request_tokens.return_value = False
    add(scheduler, "a", 100)
    batch, *_ = scheduler.schedule_batch(BUDGET, 10**6)
    assert batch is None
