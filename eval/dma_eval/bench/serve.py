"""Time continuous batching with several attentions and caches on one model.

A set of requests is named ``COUNTxPROMPT+NEW``: number of requests, tokens of each prompt, tokens to generate. A length
may be a range (``256x512-4096+64-512``), from which each request draws its own uniformly. All requests of a set arrive
at the same time. Transformers' scheduler admits as many as fit in the paged cache.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from dma_eval.errors import UserError, one_line
from dma_eval.load.backends import Backend, activate, parse_backends
from dma_eval.load.models import batching_settings
from dma_eval.names import refuse_repeats
from dma_hf.integrations.manager import ContinuousBatchingManager, PagedAttentionCache, WorkloadHints

from .requests import Request, RequestSet, figures
from .results import ServeResult
from .timing import FAILURES, measure_each
from .vllm_engine import VLLM
from .vllm_engine import answer as answer_with_vllm

POLL_SECONDS = 1.0  # between two looks at whether the generation loop still runs
STOP_SECONDS = 30.0


def parse_served(names: Sequence[str]) -> list[Backend]:
    """Resolve what is compared: backends, and :data:`~dma_eval.bench.vllm_engine.VLLM` by its names.

    Raises:
        UserError: As for :func:`dma_eval.load.backends.parse_backends`; or vLLM is named twice.
    """
    peers = [name for name in names if name in VLLM]
    if peers:
        refuse_repeats("--attn", peers)
    others = [name for name in names if name not in VLLM]
    backends = iter(parse_backends(others) if others or not peers else ())
    return [Backend(name, name) if name in VLLM else next(backends) for name in names]


def check(model: PreTrainedModel, sets: Sequence[RequestSet], cache_gib: float | None) -> None:
    """Check that a model has positions for every request, and the paged cache room for a page.

    Raises:
        UserError: They have not.
    """
    batching_settings(model, cache_gib)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for requests in sets:
        if most is not None and requests.longest > most:
            raise UserError(
                f"--requests: {requests.name} has {requests.longest} tokens, and the model {most} positions"
            )


def measure(
    model: PreTrainedModel,
    sets: Sequence[RequestSet],
    backends: Sequence[Backend],
    *,
    seed: int,
    cache_gib: float | None,
    is_compiled: bool = False,
) -> Iterator[ServeResult]:
    """Answer every set of requests with every backend, and yield each result at once.

    The model is in evaluation mode on its device. ``speedup`` is relative to the first backend. Without ``cache_gib``
    the paged cache takes the free memory that Transformers finds, and on a CPU what all requests need.
    """
    return measure_each(
        {requests.name: requests for requests in sets},
        {backend.label: backend for backend in backends},
        lambda requests, backend: _measure_one(model, requests, backend, seed, cache_gib, is_compiled),
        lambda result: result.seconds,
    )


def _measure_one(
    model: PreTrainedModel,
    requests: RequestSet,
    backend: Backend,
    seed: int,
    cache_gib: float | None,
    is_compiled: bool,
) -> ServeResult:
    gc.collect()  # the manager of the run before, and its graphs, are cycles
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    result = ServeResult(label=backend.label, config=backend.info["config"], requests=requests.name)
    vocabulary = model.config.get_text_config().vocab_size
    rehearsal = requests.rehearsal
    drawn, warm = requests.draw(seed, vocabulary), rehearsal.draw(seed + 1, vocabulary)
    config = batching_settings(model, cache_gib, is_compiled=is_compiled)
    if cache_gib is None and model.device.type == "cpu":  # whose free memory is not for one program
        config.num_blocks = requests.count * (requests.longest // config.page_size + 4)  # a slot is two
    hints = WorkloadHints(
        max_prompt_length=requests.prompt[1],
        max_generated_length=max(requests.new[1], rehearsal.new[1]),
        num_requests=requests.count,
    )
    try:
        if backend.label in VLLM:
            longest = max(requests.longest, rehearsal.longest)
            found = answer_with_vllm(model, backend.label, warm, drawn, longest=longest, seed=seed, cache_gib=cache_gib)
            return replace(result, **found)
        activate(model, backend)
        with model.continuous_batching_context_manager(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=config,
            workload_hints=hints,
            timeout=STOP_SECONDS,
        ) as manager:
            sizes = _sizes(manager.batch_processor.cache)
            _answer(manager, warm)
            return replace(result, **sizes, **_answer(manager, drawn))
    except FAILURES as error:
        return replace(result, failure=one_line(error))


def _sizes(cache: PagedAttentionCache) -> dict[str, Any]:
    """Return the bytes of a paged cache: in total, per token, and per request regardless of its length."""
    allocators = cache.cache_allocators.values()
    slots = [each for each in allocators if getattr(each, "has_one", False)]  # of packed pages
    pages = [each for each in allocators if each not in slots]
    return {
        "cache_bytes": cache.num_sectors * cache.bytes_per_sector,
        "cache_bytes_per_token": sum(each.bytes_per_block / each.tokens_per_page for each in pages),
        "cache_bytes_per_request": sum(each.bytes_per_block for each in slots),
    }


def _answer(manager: ContinuousBatchingManager, requests: Sequence[Request]) -> dict[str, Any]:
    """Hand in requests, wait for all answers, and return the figures.

    Raises:
        RuntimeError: One failed.
    """
    start = time.perf_counter()
    for request in requests:
        manager.add_request(request.prompt, max_new_tokens=request.new_tokens, record_timestamps=True)
    outputs: list[Any] = []
    while len(outputs) < len(requests):
        output = manager.get_result(timeout=POLL_SECONDS)
        if output is not None and output.error is not None:
            raise RuntimeError(f"a request failed: {output.error}")
        if output is not None:
            outputs.append(output)
        elif not manager.is_running():
            raise RuntimeError(f"the generation loop ended: {manager.background_thread_status.fatal_error}")
    # One that was evicted and computed again has lost the times of its first tokens.
    kept = [each.timestamps for each in outputs if len(each.timestamps) == len(each.generated_tokens)]
    return figures(
        max(output.timestamps[-1] for output in outputs) - start,
        sum(len(output.generated_tokens) for output in outputs),
        [times[0] - start for times in kept],
        [1e3 * (after - before) for times in kept for before, after in itertools.pairwise(times)],
    ) | {
        "most_at_once": _most_at_once([output.lifespan for output in outputs]),
        "evicted": len(outputs) - len(kept),
    }


def _most_at_once(spans: list[tuple[float, float]]) -> int:
    """Return how many spans of time overlap at most; one that ends when another begins does not overlap it."""
    events = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    return max(itertools.accumulate(change for _, change in events))
