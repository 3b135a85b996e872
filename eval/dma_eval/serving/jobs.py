"""Generate answers: one after another with ``generate``, or together with continuous batching.

A :class:`Job` is one answer. The event loop owns it. The generation thread hands over tokens and checks whether the job
was cancelled. An engine (:class:`Sequential`, :class:`Batched`) starts and stops jobs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from dma_eval.errors import UserError, one_line
from dma_eval.load.models import LoadedModel
from dma_hf.integrations.serving import response_events_to_chunks

from .checks import ApiError, GenerationRequest

STOP_SECONDS = 1.0
WATCH_SECONDS = 0.5  # between two checks of the generation thread
CPU_BATCH_TOKENS = 2048  # a batch cannot be interrupted; Transformers' default of 8,192 takes half a minute on a CPU
END = None  # the last item of a job's queue
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the decoded form of an incomplete character


class StopFilter:
    """Cuts a streamed text at the first stop string, and holds back text that may be the beginning of one."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_found = False

    def feed(self, text: str) -> str:
        """Return the text that may be shown."""
        held = self._held + text
        found = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if found:
            self.is_found = True
            self._held = ""
            return held[: min(found)]
        shown = len(held) - max((self._begun(stop, held) for stop in self._stops), default=0)
        self._held = held[shown:]
        return held[:shown]

    @staticmethod
    def _begun(stop: str, text: str) -> int:
        """Return how many characters at the end of a text may begin a stop string."""
        sizes = range(min(len(stop) - 1, len(text)), 0, -1)
        return next((size for size in sizes if stop.startswith(text[-size:])), 0)

    def flush(self) -> str:
        """Return the text that was held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held


class Job:
    """One unfinished answer. Its methods run on the event loop unless they say otherwise.

    ``queue`` has the pieces of text, reasoning and tool calls for Transformers' handlers, then ``None``.
    """

    def __init__(self, tokenizer: Any, prompt_tokens: int, limit: int, stops: Iterable[str], parser: Any) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.prompt_tokens = prompt_tokens
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.error: ApiError | None = None
        self.is_cancelled = threading.Event()
        self.on_cancel: Callable[[], Any] = lambda: None
        self.loop = asyncio.get_running_loop()
        self.started = time.perf_counter()
        self.first_token_seconds: float | None = None
        self.evictions = 0  # how often it lost its pages to other requests, and was computed again
        self._tokenizer, self._parser, self._limit = tokenizer, parser, limit
        self._stop = StopFilter(stops)
        self._shown = self._read = 0  # tokens before these are shown; are decoded
        if parser is not None:
            self._emit_events(parser.initial_events)

    @property
    def total_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.ids)

    @property
    def is_over(self) -> bool:
        """Whether the answer is finished."""
        return self.finish_reason is not None or self.error is not None or self.is_cancelled.is_set()

    def feed(self, tokens: Iterable[int]) -> None:
        """Add new tokens."""
        for token in tokens:
            if self.is_over:
                return
            if self.first_token_seconds is None:
                self.first_token_seconds = time.perf_counter() - self.started
            self.ids.append(token)
            text = self._decode()
            if text and (shown := self._stop.feed(text)):
                self._emit(shown)
            if self._stop.is_found:
                self._end("stop")
                self._halt()

    def finish(self) -> None:
        """Finish the answer: the model has generated its last token."""
        if not self.is_over:
            rest = self._stop.feed(self._decode(is_last=True))
            if rest := rest + self._stop.flush():
                self._emit(rest)
            self._end("length" if len(self.ids) >= self._limit and not self._stop.is_found else "stop")

    def fail(self, error: ApiError) -> None:
        """Finish the answer with an error."""
        if not self.is_over:
            self.error = error
            self.queue.put_nowait(END)
            self._halt()

    def cancel(self) -> None:
        """Cancel the answer: nobody waits for it."""
        if not self.is_over:
            self._halt()

    def _halt(self) -> None:
        self.is_cancelled.set()
        self.on_cancel()

    def _end(self, reason: str) -> None:
        if self._parser is not None:
            try:
                _, events = self._parser.finalize()
            except (ValueError, RuntimeError):  # cut off within a tool call
                events = []
            self._emit_events(events)
        self.finish_reason = reason
        self.queue.put_nowait(END)

    def _emit(self, text: str) -> None:
        if self._parser is None:
            self.queue.put_nowait(text)
        else:
            self._emit_events(self._parser.feed(text))

    def _emit_events(self, events: list[Any]) -> None:
        for item in response_events_to_chunks(events):
            self.queue.put_nowait(item)

    def _decode(self, is_last: bool = False) -> str:
        """Return the text of the tokens that were not decoded yet, if it ends with a complete character.

        Earlier tokens are decoded again, because a tokenizer may need them as context.
        """
        skip = self._parser is None  # parsers look for special tokens
        before = self._tokenizer.decode(self.ids[self._shown : self._read], skip_special_tokens=skip)
        text = self._tokenizer.decode(self.ids[self._shown :], skip_special_tokens=skip)
        if len(text) <= len(before) or (text.endswith(UNFINISHED) and not is_last):
            return ""
        self._shown, self._read = self._read, len(self.ids)
        return str(text[len(before) :])


class Engine(ABC):
    """The engine that generates the answers of a server."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def room(self) -> int | None:
        """Maximum tokens of a request, prompt and answer together; ``None`` without a limit."""
        return self._loaded.max_context

    @abstractmethod
    def start(self, job: Job, inputs: Any, config: GenerationConfig, body: GenerationRequest) -> None:
        """Generate the answer of a job.

        Raises:
            ApiError: The engine does not support the request.
        """

    def is_alive(self) -> bool:
        """Whether answers can be generated."""
        return True

    def cache_use(self) -> float | None:
        """Share of the paged cache that is in use; ``None`` without one."""
        return None

    def close(self) -> None:  # noqa: B027 (without batches nothing runs there)
        """Stop what runs in the background, on all ranks."""


class _Cancelled(Exception):
    """Ends ``generate`` after the job was cancelled."""


class _Streamer(BaseStreamer):  # type: ignore[misc]
    """Hands tokens from ``generate`` to a job, on the generation thread."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        """Receive the prompt, then each new token."""
        if self._job.is_cancelled.is_set():
            raise _Cancelled
        if self._has_prompt:
            self._job.loop.call_soon_threadsafe(self._job.feed, value.tolist())
        self._has_prompt = True

    def end(self) -> None:
        """Do nothing, because the future of the call reports the end."""


class _Penalties(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's frequency and presence penalties, for the tokens generated so far."""

    def __init__(self, prompt_tokens: int, frequency: float, presence: float) -> None:
        self._prompt_tokens, self._frequency, self._presence = prompt_tokens, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = input_ids[:, self._prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, ids, torch.ones_like(ids, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


class Sequential(Engine):
    """Runs ``generate`` for one request after another. A cancelled request ends within one layer of the model."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._thread = ThreadPoolExecutor(1)  # torch.compile's graphs belong to a thread
        self._running: Job | None = None
        for layers in loaded.model.modules():
            if isinstance(layers, torch.nn.ModuleList):
                for layer in layers:
                    layer.register_forward_pre_hook(self._check)

    def start(self, job: Job, inputs: Any, config: GenerationConfig, body: GenerationRequest) -> None:
        future = job.loop.run_in_executor(self._thread, self._generate, job, inputs, config, body)
        job.on_cancel = future.cancel  # a waiting call never begins, and the flag stops a running one
        future.add_done_callback(lambda done: self._settle(job, done))

    def _generate(self, job: Job, inputs: Any, config: GenerationConfig, body: GenerationRequest) -> None:
        if body.logit_bias:
            config.sequence_bias = {(token,): float(bias) for token, bias in body.logit_bias.items()}
        processors = LogitsProcessorList()
        if body.frequency_penalty or body.presence_penalty:
            processors.append(_Penalties(job.prompt_tokens, body.frequency_penalty, body.presence_penalty))
        if body.seed is not None:
            torch.manual_seed(body.seed)
        self._running = job
        try:
            self._loaded.model.generate(
                **inputs,
                generation_config=config,
                logits_processor=processors,
                streamer=_Streamer(job),
                tokenizer=self._loaded.tokenizer,
            )
        except _Cancelled:
            pass
        finally:
            self._running = None

    def _check(self, *_: Any) -> None:
        if self._running is not None and self._running.is_cancelled.is_set():
            raise _Cancelled

    @staticmethod
    def _settle(job: Job, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            job.finish()
        else:
            job.fail(ApiError(f"generation failed: {one_line(error)}", status=500))


class _BreakTies(LogitsProcessor):  # type: ignore[misc]
    """Raises the first of the largest logits by one rounding step, so that ``top_k=1`` is the greedy choice."""

    supports_continuous_batching = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        best = scores.argmax(-1, keepdim=True)
        value = scores.gather(-1, best)
        return scores.scatter(-1, best, torch.nextafter(value, torch.full_like(value, torch.inf)))


UNBATCHED = (
    *("epsilon_cutoff", "eta_cutoff", "min_new_tokens", "min_p"),
    *("no_repeat_ngram_size", "repetition_penalty", "typical_p"),
)
"""Fields of a request's ``generation_config`` that continuous batching lacks, in alphabetical order."""


class Batched(Engine):
    """Continuous batching. Each request has its own temperature (0 is greedy), ``top_p`` and ``top_k``.

    Raises:
        UserError: The batches do not compile, or the generation thread does not start.
    """

    def __init__(self, loaded: LoadedModel, batches: ContinuousBatchingConfig) -> None:
        super().__init__(loaded)
        self._vocabulary = loaded.model.config.get_text_config().vocab_size
        batches.per_request_processors = True
        if loaded.model.device.type == "cpu" and batches.max_batch_tokens is None:
            batches.max_batch_tokens = CPU_BATCH_TOKENS
        eos = loaded.model.generation_config.eos_token_id
        # Any values except the neutral ones create the processors. Requests then set their own values.
        config = GenerationConfig(do_sample=True, temperature=0.5, top_p=0.5, top_k=1, eos_token_id=eos)
        self._manager = loaded.model.init_continuous_batching(
            generation_config=config, continuous_batching_config=batches
        )
        self._manager.logit_processor.logits_processor.insert(0, _BreakTies())
        self._jobs: dict[str, Job] = {}
        self._count = 0
        self._is_watched = False
        if batches.varlen_compile_config is not None:
            try:
                self._manager.warmup()  # otherwise the first request would wait for the compiler
            except (RuntimeError, ValueError) as error:
                raise UserError(f"--compile: {one_line(error)}") from error
        self._manager.start()
        while self._manager.batch_processor is None and self._manager.is_running():
            time.sleep(0.01)
        if not self.is_alive():
            raise UserError(f"--continuous-batching: {self._reason()}")

    def room(self) -> int | None:
        cache = self._manager.batch_processor.cache
        allocators = cache.cache_allocators.values()
        fixed = [each.bytes_per_block for each in allocators if getattr(each, "has_one", False)]
        tokens = [
            each.bytes_per_block / each.tokens_per_page for each in allocators if not getattr(each, "has_one", False)
        ]
        # A sector belongs to one kind of block at a time, so that one of each kind may be filled in part.
        free = (cache.num_sectors - len(allocators)) * cache.bytes_per_sector - sum(fixed)
        room = int(free / sum(tokens))
        return min(room, self._loaded.max_context or room)

    def start(self, job: Job, inputs: Any, config: GenerationConfig, body: GenerationRequest) -> None:
        self._refuse(config, body)
        is_greedy = not config.do_sample
        self._count += 1
        name = f"request-{self._count}"
        seen, created = 0, None

        def take(output: Any) -> None:
            nonlocal seen, created
            new, seen = output.generated_tokens[seen:], len(output.generated_tokens)
            job.evictions += created not in (None, output.created_time)  # the scheduler has made it a new request
            created = output.created_time
            if output.error is not None:
                job.fail(ApiError(f"generation failed: {output.error}", status=500 if self.is_alive() else 503))
            else:
                job.feed(new)
                if output.is_finished():
                    job.finish()
            if output.error is not None or output.is_finished():
                self._jobs.pop(name, None)

        def cancel() -> None:
            if self._jobs.pop(name, None) is not None:
                self._manager.cancel_request(name)
                self._manager.output_router.result_handlers.pop(name, None)

        self._jobs[name] = job
        job.on_cancel = cancel
        self._manager.register_result_handler(name, take)
        accepted = self._manager.add_request(
            inputs["input_ids"],
            request_id=name,
            streaming=True,
            max_new_tokens=config.max_new_tokens,
            eos_token_id=-1 if config.eos_token_id is None else config.eos_token_id,
            temperature=1.0 if is_greedy else float(config.temperature or 1.0),
            top_p=1.0 if is_greedy or config.top_p is None else float(config.top_p),
            top_k=1 if is_greedy else config.top_k or self._vocabulary,
        )
        if accepted is None:
            job.cancel()
            raise ApiError(f"the generation thread ended: {self._reason()}", status=503)
        if not self._is_watched:
            self._watch(job.loop)

    def is_alive(self) -> bool:
        return bool(self._manager.is_running()) and self._manager.background_thread_status.fatal_error is None

    def cache_use(self) -> float | None:
        return 1.0 - float(self._manager.batch_processor.cache.compute_free_capacity())

    def close(self) -> None:
        self._manager.stop(block=True, timeout=STOP_SECONDS, hard_stop=True)

    def follow(self) -> None:
        """Run what the first rank of a tensor-parallel group schedules, until the generation thread ends."""
        while self.is_alive():
            self._manager.get_result(timeout=1.0)  # answers are for the first rank; here they would fill the memory

    def _refuse(self, config: GenerationConfig, body: GenerationRequest) -> None:
        asked = [name for name in ("logit_bias", "frequency_penalty", "presence_penalty") if getattr(body, name)]
        asked += ["seed"] if body.seed is not None and config.do_sample else []
        options = body.generation_config
        asked += [f"generation_config.{name}" for name in UNBATCHED if getattr(options, name) is not None]
        if asked:
            message = f"{asked[0]}: continuous batching does not support it; serve without --continuous-batching"
            raise ApiError(message, param=asked[0])

    def _reason(self) -> str:
        error = self._manager.background_thread_status.fatal_error
        return "the generation thread has ended" if error is None else one_line(error)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail all jobs after the thread has died, because it may not have done so."""
        if not self.is_alive():
            for job in list(self._jobs.values()):
                job.fail(ApiError(f"the generation thread ended: {self._reason()}", status=503))
        self._is_watched = bool(self._jobs)
        if self._jobs:
            loop.call_later(WATCH_SECONDS, self._watch, loop)
