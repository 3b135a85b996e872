"""Transformers' manager of continuous batching, for a model that runs ``dma_mxfp``.

``tests/compat`` runs it on the oldest and the newest supported version of Transformers.
"""

from __future__ import annotations

import copy
import math
import weakref
from itertools import accumulate
from typing import Any

from dma_kernels.numerics.formats import TILE
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from ..config import cache_of
from .paged_attention import enter_batching, leave_batching
from .paged_cache import DEFAULT_BLOCKS, PackedPagedCache, check_layers

PROMPT_INTERVAL = 8
"""Batches from one with new prompts to the next, while many requests decode (H200, 1.5B parameters)."""
FEW_DECODING = 16
"""Decoding requests up to which prompts do not wait: apart, each prompt would cost these a batch (H200, 8 clients)."""


class DMAManager(ContinuousBatchingManager):  # type: ignore[misc]
    """Transformers' manager of continuous batching for a model that runs ``dma_mxfp``, with the cache in its settings.

    The attention of the model has a name for batching while the manager runs, and its own name afterwards.
    """

    _batching: weakref.finalize[..., Any] | None = None
    _refusal: ValueError | None = None  # of a request of ``generate_batch``

    def __init__(
        self, model: PreTrainedModel, settings: GenerationConfig, batching: ContinuousBatchingConfig, hints: Any
    ) -> None:
        self.cache_format = cache_of(model)
        if self.cache_format is not None:
            check_layers(model.config.get_text_config(decoder=True))
        batching = copy.deepcopy(batching)
        blocks, decode_compile_config = batching.max_blocks_per_request, batching.decode_compile_config
        if self.cache_format is not None:
            batching.max_blocks_per_request = None  # it would select FlashAttention's kernel
            batching.decode_compile_config = None  # which would be ignored without these blocks
        elif batching.use_cuda_graph is None:
            batching.use_cuda_graph = False  # lengths are read on the host
        try:
            super().__init__(model, settings, batching, hints)
        except Exception:
            self._leave()
            raise
        resolved = self.continuous_batching_config
        if self.cache_format is not None:
            if blocks is None:
                longest = 0 if hints is None else hints.max_prompt_length + hints.max_generated_length
                blocks = math.ceil(longest / TILE) + 1 if longest else DEFAULT_BLOCKS
            resolved.max_blocks_per_request = blocks
            resolved.decode_compile_config = decode_compile_config if blocks > 0 else None
            # No graph for prompts: their number and lengths are read on the host.
            resolved.use_cuda_graph = False, resolved.cuda_graph_booleans[1] and blocks > 0

    def switch_to_cb_friendly_attn(self, model: PreTrainedModel, auto_switch_to_flash: bool = True) -> None:
        """Rename the attention of the model, until the manager stops or is dropped. The implementation stays."""
        if self._batching is None or not self._batching.alive:
            enter_batching(model)
            self._batching = weakref.finalize(self, leave_batching, weakref.ref(model))
            self._batching.atexit = False

    def _leave(self) -> None:
        if self._batching is not None:
            self._batching()

    def warmup(self) -> None:
        try:
            super().warmup()
        except Exception:
            self._leave()
            raise

    def add_request(self, input_ids: list[int], *arguments: Any, **options: Any) -> str | None:
        """Add a request to the queue.

        Raises:
            ValueError: The prompt is empty. The generation thread would die, or return tokens of another prompt.
        """
        _refuse_empty([input_ids])
        request_id: str | None = super().add_request(input_ids, *arguments, **options)
        return request_id

    def add_requests(self, inputs: list[list[int]], *arguments: Any, **options: Any) -> list[str]:
        """Add the requests of ``generate_batch``. It logs an error, and :meth:`stop` or :meth:`destroy` raises it."""
        try:
            _refuse_empty(inputs)
        except ValueError as error:
            self._refusal = error
            raise
        request_ids: list[str] = super().add_requests(inputs, *arguments, **options)
        return request_ids

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stop the generation thread.

        Raises:
            RuntimeError: The manager should be kept, but its thread has died.
            ValueError: The manager should be kept, but ``generate_batch`` got an empty prompt.
        """
        error = self.background_thread_status.fatal_error
        is_kept = keep_for_next_session and error is None
        super().stop(block=block, timeout=timeout, keep_for_next_session=is_kept, hard_stop=hard_stop)
        if not self.is_running():  # it may still run after stop(block=False)
            self._leave()
        if keep_for_next_session:
            self._raise_errors()

    def destroy(self) -> None:
        """Release the cache of the manager. ``generate_batch`` calls it last.

        Raises:
            RuntimeError: The generation thread has died.
            ValueError: ``generate_batch`` got an empty prompt.
        """
        super().destroy()
        self._leave()
        self._raise_errors()

    def _raise_errors(self) -> None:
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal
        error = self.background_thread_status.fatal_error
        if error is not None:
            raise RuntimeError(f"the generation thread has died: {type(error).__name__}: {error}") from error

    def _run_generation_loop(self, *arguments: Any, **options: Any) -> None:
        try:
            super()._run_generation_loop(*arguments, **options)
        finally:
            self._leave()

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        if self.cache_format is None or isinstance(self.batch_processor, ContinuousBatchProcessor):
            return super()._create_batch_processor()
        resolved = self.continuous_batching_config
        cache = PackedPagedCache(self.model, resolved, self.distributed_helper)
        self._use_prefix_sharing = False
        update_cb_config_after_cache_creation(resolved, cache.num_blocks, cache.max_batch_tokens)
        # Each request has a slot.
        resolved.max_requests_per_batch = min(resolved.max_requests_per_batch, cache.num_sectors - 1)
        has_graphs = resolved.cuda_graph_booleans[1]
        schedulers = SCHEDULER_MAPPING | ({"fifo": PromptScheduler} if has_graphs else {})
        processor = ContinuousBatchProcessor(
            cache=cache,
            config=cache.config,
            generation_config=self.generation_config,
            continuous_batching_config=resolved,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue if self.is_tp_driver else None,
            cancel_queue=self.cancel_queue if self.is_tp_driver else None,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=cache.device,
            model_dtype=cache.dtype,
            scheduler=schedulers[resolved.scheduler_type](
                cache, resolved.safety_margin, resolved.max_requests_per_batch
            ),
            distributed_helper=self.distributed_helper,
        )
        _pad_decoding_alone(processor.model_runner)
        return processor


def _refuse_empty(prompts: list[list[int]]) -> None:
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("input_ids must have at least one token, such as the BOS token; got none")


class PromptScheduler(FIFOScheduler):  # type: ignore[misc]
    """Transformers' FIFO scheduler, except that batches of many decoding requests have no prompts.

    So these batches are CUDA graphs. Prompts then wait until they fill a batch, or for ``PROMPT_INTERVAL`` batches
    after the last prompts. Those that fill one, or were split, wait for a single batch.
    """

    def reset(self) -> None:
        super().reset()
        self._passed = 0  # batches since the last one that may have had prompts

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[Any] | None, bool, int, int]:
        active = self.active_requests.values()
        decoding = [state for state in active if state.status == RequestStatus.DECODING]
        prompts = [state for state in active if state.status == RequestStatus.PREFILLING]
        if not self.block_new_requests:
            prompts += self._get_waiting_candidates()
        prompts = prompts[: self.max_requests_per_batch - len(decoding)]
        self._passed += 1
        is_mixed = len(decoding) <= FEW_DECODING
        if is_mixed or (prompts and not self._waits(prompts, token_budget)):
            first = decoding if is_mixed else []
            # A prompt is split only if it is longer than a batch: its second part would read the first from the cache.
            ends = accumulate(len(state.remaining_prefill_tokens) for state in prompts)
            whole = sum(len(first) + end <= token_budget for end in ends)
            batch = self._schedule([*first, *prompts[: max(1, whole)]], token_budget, cache_budget)
            if is_mixed or batch[0]:
                self._passed = 0
                return batch
        return self._schedule(decoding, token_budget, cache_budget)

    def _waits(self, prompts: list[RequestState], token_budget: int) -> bool:
        """Return whether prompts wait for others, or for memory, while requests decode."""
        tokens = sum(len(state.remaining_prefill_tokens) for state in prompts)
        is_split = prompts[0].status == RequestStatus.PREFILLING
        interval = 2 if is_split or tokens >= token_budget else PROMPT_INTERVAL
        return self._passed < interval or not self._try_to_meet_safety_margin()

    def _schedule(
        self, candidates: list[RequestState], token_budget: int, cache_budget: int
    ) -> tuple[list[Any] | None, bool, int, int]:
        """Return a batch of some candidates, ``None`` if memory is short, as FIFO does."""
        scheduled: set[str] = set()
        batch, is_short, *others = self._process_candidates(candidates, token_budget, cache_budget, scheduled)
        self._cleanup_waiting_queue(scheduled)
        return (batch or (None if is_short else [])), *others


def _pad_decoding_alone(runner: ModelRunner) -> None:
    """Let batches with prompts keep their size if only decoding batches are captured or compiled.

    Transformers pads both, and then computes and sorts logits of ``max_requests_per_batch`` requests for each prompt.
    """
    if runner.use_cuda_graph_varlen or runner.cb_config.varlen_compile_config is not None:
        return
    pads, pad = runner.pad_inputs, runner.maybe_pad_inputs

    def maybe_pad_inputs(num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        runner.pad_inputs = pads and use_decode_fast_path
        padded: tuple[int, int] = pad(num_q_tokens, max_kv_read, use_decode_fast_path)
        return padded

    runner.maybe_pad_inputs = maybe_pad_inputs
