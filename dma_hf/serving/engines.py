"""Generate answers: one after another with ``generate``, or together with continuous batching.

Transformers' streamers decode tokens and parse reasoning and tool calls. Their queue is an :class:`Answer`.
"""

from __future__ import annotations

import asyncio
import random
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList

from dma_hf.integrations.serving import (
    BatchTopK,
    BatchTopP,
    CBStreamer,
    DirectStreamer,
    GenerationCancelled,
    decode_any_bytes,
    infer_max_single_request_tokens,
)

from .requests import ApiError, CompletionRequest, GenerationRequest

SECONDS = 1.0  # between two looks for a stopped thread
CPU_BATCH_TOKENS = 2048  # a batch cannot be interrupted; Transformers' default of 8,192 takes half a minute on a CPU


class Answer(asyncio.Queue[Any]):
    """The text, reasoning and tool calls of one answer, then ``None``. Text ends before the first stop string.

    A streamer writes it, and a route reads it. Its methods run on the event loop.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        super().__init__()
        self.prompt_tokens = self.max_new_tokens = 0  # set when they are known, before the answer starts
        self.end_tokens: Sequence[int] = ()  # set with them
        self.streamer: Any = None  # counts the tokens; set by the engine, like the next
        self.on_cancel: Callable[[], Any] = lambda: None
        self.last_token: int | None = None
        self.error: ApiError | None = None
        self.is_cancelled = self.is_stopped = self._is_over = False
        self._stops, self._held = tuple(stops), ""

    @property
    def total_tokens(self) -> int:
        """Number of generated tokens."""
        return int(self.streamer.total_tokens)

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens so far, in OpenAI's format."""
        prompt, new = self.prompt_tokens, self.total_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    @property
    def finish_reason(self) -> str:
        """Why the answer ended, in OpenAI's words."""
        is_ended = self.is_stopped or self.last_token in self.end_tokens
        return "length" if self.total_tokens >= self.max_new_tokens and not is_ended else "stop"

    def _put(self, item: Any) -> None:
        """Append an item, or extend a text that has not been read yet."""
        items: Any = self._queue  # type: ignore[attr-defined]
        if items and isinstance(item, str) and type(item) is type(items[-1]):
            items[-1] = type(item)(items[-1] + item)
        else:
            super()._put(item)

    def put_nowait(self, item: Any) -> None:
        """Add an item, or ``None`` at the end."""
        if self._is_over:
            return
        if type(item) is str:  # and not reasoning, which is a subclass
            shown = [self._cut(item)]
        else:  # which ends the text before it
            shown, self._held = [self._held, item], ""
        for each in filter(None, shown):
            super().put_nowait(each)
        if item is None or self.is_stopped:
            self._is_over = True
            super().put_nowait(None)
        if self.is_stopped:
            self._halt()

    def _cut(self, text: str) -> str:
        """Return the text that may be shown, and hold back what may be the beginning of a stop string."""
        held = self._held + text
        found = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            return held[: min(found)]
        shown = len(held) - max((_begun(stop, held) for stop in self._stops), default=0)
        self._held = held[shown:]
        return held[:shown]

    def fail(self, error: ApiError) -> None:
        """End the answer with an error."""
        if not self._is_over:
            self.error = error
            self.put_nowait(None)
            self._halt()

    def cancel(self) -> None:
        """Stop generating, because nobody waits for the answer."""
        if not self._is_over:
            self._halt()

    def _halt(self) -> None:
        self.is_cancelled = True
        self.on_cancel()


def _begun(stop: str, text: str) -> int:
    """Return how many characters at the end of a text may begin a stop string."""
    sizes = range(min(len(stop), len(text)), 0, -1)
    return next((size for size in sizes if stop.startswith(text[-size:])), 0)


ONE_STREAM = {"num_beams": 1, "num_return_sequences": 1, "penalty_alpha": 0.0}
"""Settings of a ``generation_config`` with which an answer can be streamed."""
UNBATCHED = frozenset({
    *("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "guidance_scale"),
    *("watermarking_config", "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
    *("min_length", "min_new_tokens", "stop_strings", "max_time"),
})  # fmt: skip
"""Settings of a ``generation_config`` that continuous batching lacks."""


class Engine(ABC):
    """What generates the answers of a server, with one model and its tokenizer.

    It warns of settings in the model's own ``generation_config`` that it ignores.

    Raises:
        TypeError: The tokenizer is not one of the tokenizers library, which decodes streams.
    """

    ignored_settings: ClassVar[frozenset[str]] = frozenset(ONE_STREAM)
    """Settings of a model's ``generation_config`` that have no effect on answers."""

    is_alive: Any = True
    """Whether answers can be generated."""
    room: int | None
    """Maximum tokens of a request, prompt and answer together; ``None`` without a limit."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if not hasattr(tokenizer, "backend_tokenizer"):
            kind = type(tokenizer).__name__
            raise TypeError(f"tokenizer: expected one of the tokenizers library, which decodes streams; got a {kind}")
        own = {name: getattr(model.generation_config, name, None) for name in sorted(self.ignored_settings)}
        if ignored := [f"{name}={value}" for name, value in own.items() if (value or 0) not in (0, 1)]:
            message = f"the server ignores settings of the model's generation_config: {', '.join(ignored)}"
            warnings.warn(message, stacklevel=3)
        self.model, self.tokenizer = model, tokenizer
        self.prompts = ThreadPoolExecutor(1)  # tokenizes one prompt at a time; meanwhile streams go on
        self.room = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def _attach(self, streamer: Any, answer: Answer, body: GenerationRequest) -> None:
        """Let a streamer of Transformers write an answer."""
        answer.streamer = streamer
        continues = isinstance(body, CompletionRequest)
        decode_any_bytes(streamer, self.tokenizer.backend_tokenizer, continues=continues)

    @abstractmethod
    def start(self, answer: Answer, ids: list[int], config: GenerationConfig, body: Any, parser: Any) -> None:
        """Generate an answer to the tokens of a request, whose body is a :class:`GenerationRequest`.

        Raises:
            ApiError: The engine does not support the request.
        """


class _Penalties(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's frequency and presence penalties, for the tokens generated so far."""

    def __init__(self, prompt_tokens: int, frequency: float, presence: float) -> None:
        self._prompt_tokens, self._frequency, self._presence = prompt_tokens, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = input_ids[:, self._prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, ids, torch.ones_like(ids, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


class _Streamer(DirectStreamer):  # type: ignore[misc]
    """Decodes the tokens of an answer, notes its last one, and removes the hooks of its prompt."""

    hooks: Sequence[Any] = ()

    def put(self, value: Tensor) -> None:
        self._queue.last_token = int(value.flatten()[-1])
        super().put(value)
        if self.total_tokens == 1:
            self.remove_hooks()

    def remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()


class Sequential(Engine):
    """Runs ``generate`` for one request after another.

    A cancelled request ends at its next token, or within one layer of its prompt.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self._thread = ThreadPoolExecutor(1)  # torch.compile's graphs belong to a thread
        self._seeds = random.Random(torch.initial_seed())  # of requests without one, whatever the others have
        lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
        self._layers = [layer for layers in lists for layer in layers]

    def start(
        self, answer: Answer, ids: list[int], config: GenerationConfig, body: GenerationRequest, parser: Any
    ) -> None:
        loop = asyncio.get_running_loop()
        streamer = _Streamer(self.tokenizer.backend_tokenizer, loop, answer, parser)
        self._attach(streamer, answer, body)
        future = loop.run_in_executor(self._thread, self._generate, answer, ids, config, body)

        def settle(done: asyncio.Future[None]) -> None:  # a cancelled answer has no reader for its error
            if (error := done.exception()) is not None:
                answer.fail(ApiError(f"generation failed: {error}", status=500))

        answer.on_cancel = streamer.cancel
        future.add_done_callback(settle)

    def _generate(self, answer: Answer, ids: list[int], config: GenerationConfig, body: GenerationRequest) -> None:
        if body.logit_bias:
            config.sequence_bias = {(token,): float(bias) for token, bias in body.logit_bias.items()}
        processors = LogitsProcessorList()
        if body.frequency_penalty or body.presence_penalty:
            processors.append(_Penalties(len(ids), body.frequency_penalty, body.presence_penalty))
        if config.do_sample:
            torch.manual_seed(self._seeds.getrandbits(63) if body.seed is None else body.seed)
        prompt = torch.tensor([ids], device=self.model.device)
        options = {"generation_config": config, "logits_processor": processors, "tokenizer": self.tokenizer}

        def check(*_: Any) -> None:
            if answer.is_cancelled:
                raise GenerationCancelled

        # Only for the prompt: steps of a model with hooks would not be CUDA graphs.
        answer.streamer.hooks = [layer.register_forward_pre_hook(check) for layer in self._layers]
        try:
            self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options, streamer=answer.streamer)
        finally:
            answer.streamer.remove_hooks()


class _BreakTies(LogitsProcessor):  # type: ignore[misc]
    """Raises the first of the largest logits by one rounding step, so that ``top_k=1`` is the greedy choice."""

    supports_continuous_batching = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        best = scores.argmax(-1, keepdim=True)
        value = scores.gather(-1, best)
        return scores.scatter(-1, best, torch.nextafter(value, torch.full_like(value, torch.inf)))


class _TopK(BatchTopK):  # type: ignore[misc]
    """Leaves the requests' values to :class:`_TopP`, which applies them."""

    values: Tensor

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        self.values = tensor_arg[: len(scores), None]
        return scores


class _TopP(BatchTopP):  # type: ignore[misc]
    """Applies ``top_k``, then ``top_p``, with one sort of the logits. Transformers' processors sort them twice."""

    def __init__(self, processor: Any, top_k: _TopK) -> None:
        super().__init__(processor)
        self._top_k = top_k

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # PyTorch 2.11 and 2.12 fail to compile the sum
    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        top_p = tensor_arg[: len(scores), None].view(torch.float32)
        ranked = scores.sort(-1, descending=True).values
        is_kept = torch.arange(scores.shape[-1], device=scores.device) < self._top_k.values
        shares = ranked.masked_fill(~is_kept, -torch.inf).softmax(-1)
        is_kept &= (shares.cumsum(-1) - shares < top_p) | (top_p >= 1)  # the share of those before it
        last = (is_kept.sum(-1, keepdim=True) - 1).clamp(min=0)
        return scores.masked_fill(scores < ranked.gather(-1, last), -torch.inf)


BATCHED = {"do_sample", "temperature", "top_p", "top_k", "max_new_tokens", "eos_token_id"}
"""Fields of a request's ``generation_config`` that continuous batching has."""


class Batched(Engine):
    """Continuous batching. Each request has its own temperature (0 is greedy), ``top_p`` and ``top_k``.

    Raises:
        RuntimeError: The batches do not compile or run.
    """

    ignored_settings = UNBATCHED | ONE_STREAM.keys()

    def __init__(self, model: Any, tokenizer: Any, batches: ContinuousBatchingConfig | None = None) -> None:
        super().__init__(model, tokenizer)
        batches = ContinuousBatchingConfig() if batches is None else batches
        batches.per_request_processors = True
        if model.device.type == "cpu" and batches.max_batch_tokens is None:
            batches.max_batch_tokens = CPU_BATCH_TOKENS
        eos = model.generation_config.eos_token_id
        # Any values except the neutral ones create the processors. Requests then set their own values.
        config = GenerationConfig(do_sample=True, temperature=0.5, top_p=0.5, top_k=1, eos_token_id=eos)
        self._manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batches)
        processors = self._manager.logit_processor.logits_processor
        temperature, top_k, top_p = processors
        top_k = _TopK(top_k)
        processors[:] = _BreakTies(), temperature, top_k, _TopP(top_p, top_k)
        self._manager.warmup()  # otherwise the first requests would wait for captured graphs and compilers
        room = infer_max_single_request_tokens(self._manager.batch_processor.cache)
        self.room = min(room, self.room or room)
        self._start()

    def _start(self) -> None:
        """Start the thread, and answer two requests: the warm-up only logs that batches do not compile or run."""
        manager = self._manager
        requests = 2 if manager.is_tp_driver else 0
        for index in range(requests):
            manager.add_request([0, 0], request_id=f"first-{index}", max_new_tokens=2, eos_token_id=-1)
        manager.start()
        for _ in range(requests):
            output = None
            while output is None and self.is_alive:
                output = manager.get_result(timeout=SECONDS)
            error = manager.background_thread_status.fatal_error if output is None else output.error
            if error is not None:
                self.close()
                raise RuntimeError(f"batches do not run: {error}")

    @property
    def is_alive(self) -> bool:
        return bool(self._manager.is_running()) and self._manager.background_thread_status.fatal_error is None

    def start(
        self, answer: Answer, ids: list[int], config: GenerationConfig, body: GenerationRequest, parser: Any
    ) -> None:
        self._refuse(config, body)
        manager, name, loop = self._manager, uuid.uuid4().hex, asyncio.get_running_loop()
        while manager.get_result(timeout=0) is not None:
            pass  # late tokens of cancelled requests, with their prompts; otherwise they would fill the memory
        streamer = CBStreamer(manager, name, self.tokenizer.backend_tokenizer, loop, answer, response_parser=parser)
        self._attach(streamer, answer, body)

        def take(output: Any) -> None:
            error = output.error
            answer.last_token = next(reversed(output.generated_tokens), None)
            try:
                streamer.put(output)
                if error is None and output.is_finished():
                    streamer.end()
            except Exception as failure:  # the tokenizers library raises nothing narrower; other answers wait, too
                error = failure
            if error is not None:
                answer.fail(ApiError(f"generation failed: {error}", status=500 if self.is_alive else 503))

        def cancel() -> None:
            streamer.cancel()
            manager.output_router.result_handlers.pop(name, None)

        answer.on_cancel = cancel
        manager.register_result_handler(name, take)
        accepted = manager.add_request(
            ids,
            request_id=name,
            streaming=True,
            max_new_tokens=config.max_new_tokens,
            eos_token_id=-1 if config.eos_token_id is None else config.eos_token_id,
            temperature=float(config.temperature or 1.0),  # without sampling, the configuration has none of these
            top_p=1.0 if config.top_p is None else float(config.top_p),
            top_k=(config.top_k or self.model.config.get_text_config().vocab_size) if config.do_sample else 1,
        )
        if accepted is None:
            answer.cancel()
            reason = manager.background_thread_status.fatal_error or "no error is known"
            raise ApiError(f"the generation thread ended: {reason}", status=503)

    def _refuse(self, config: GenerationConfig, body: GenerationRequest) -> None:
        asked = [name for name in ("logit_bias", "frequency_penalty", "presence_penalty") if getattr(body, name)]
        if body.seed is not None and config.do_sample:
            asked.append("seed")
        given = body.generation_config.model_dump(exclude_none=True)
        asked += [f"generation_config.{name}" for name in given if name not in BATCHED]
        if asked:
            message = f"{asked[0]}: continuous batching does not support it; serve without --continuous-batching"
            raise ApiError(message, param=asked[0])

    def close(self) -> None:
        """Stop generating, on all ranks of a tensor-parallel group."""
        self._manager.stop(block=True, timeout=SECONDS, hard_stop=True)

    def follow(self) -> None:
        """Run what rank 0 of a tensor-parallel group schedules, until the group stops."""
        while self.is_alive:
            self._manager.get_result(timeout=SECONDS)  # answers are for rank 0; here they would fill the memory
