"""The routes that generate. They check requests, and Transformers' handlers answer them in OpenAI's format."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from transformers import GenerationConfig

from dma_eval.errors import one_line
from dma_eval.models import LoadedModel
from dma_hf.integrations.serving import (
    ChatCompletionHandler,
    CompletionHandler,
    GenerationState,
    ModelManager,
    ResponseHandler,
    get_response_template,
)

from .checks import ApiError, ChatRequest, CompletionRequest, Request, ResponseRequest, check
from .gate import register
from .jobs import Batched, Engine, Job

SSE = "text/event-stream"
GREEDY_TEMPERATURE = 1e-5  # and below: logits would overflow
SAMPLE = 64  # characters for each token of the server's limit


class _Generation(GenerationState):  # type: ignore[misc]
    """The generator that Transformers' handlers call for one request. It makes a job of the call."""

    def __init__(self, loaded: LoadedModel, engine: Engine, body: Request, param: str) -> None:
        super().__init__(isinstance(engine, Batched))
        self._loaded, self._engine, self._body, self._param = loaded, engine, body, param
        self.job: Job | None = None

    def use_continuous_batching(self, *arguments: Any) -> bool:
        """Return whether the engine is :class:`Batched`. Handlers then pass lists instead of tensors."""
        return isinstance(self._engine, Batched)

    def get_manager(self, *arguments: Any, **options: Any) -> _Generation:
        """Return itself, because it is also the manager."""
        return self

    def init_cb(self, *arguments: Any) -> None:
        """Do nothing, because the engine already runs."""

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[Any, Job]:
        """Start a job, and return its queue and itself.

        Raises:
            ApiError: The prompt is empty or too long, or the engine does not support the request.
        """
        ids = inputs["input_ids"]
        prompt_tokens = len(ids) if isinstance(ids, list) else ids.shape[-1]
        self._settle(gen_config, prompt_tokens)
        stops = self._body.stops
        job = Job(self._loaded.tokenizer, prompt_tokens, gen_config.max_new_tokens, stops, response_parser)
        self._engine.start(job, inputs, gen_config, self._body)
        self.job = job
        register(job)
        return job.queue, job

    async def generate_non_streaming(self, *arguments: Any, **options: Any) -> tuple[str, int, list[int]]:
        """Run a job to its end. Return the text, the prompt's length and the new tokens."""
        queue, job = self.generate_streaming(*arguments, **options)
        while await queue.get() is not None:
            pass
        if job.error is not None:
            raise job.error
        return self._loaded.tokenizer.decode(job.ids, skip_special_tokens=True), job.prompt_tokens, job.ids

    def _settle(self, config: GenerationConfig, prompt_tokens: int) -> None:
        """Apply the request's limit and sampling to a configuration. Missing values come from the model's own."""
        body, room = self._body, self._engine.room()
        if prompt_tokens == 0:
            raise ApiError(f"{self._param}: it has no tokens", param=self._param)
        name, limit = body.limit
        if room is not None and prompt_tokens + (limit or 1) > room:
            asked = f"{prompt_tokens} tokens" + (f" and {name} is {limit}" if limit is not None else "")
            raise too_long(room, asked, self._param if prompt_tokens >= room else name)
        if body.generation_config is not None:
            for option, value in body.generation_config.model_dump(exclude_none=True).items():
                setattr(config, option, value)
        config.max_new_tokens = limit or config.max_new_tokens
        if room is not None:
            config.max_new_tokens = min(config.max_new_tokens or room, room - prompt_tokens)
        vocabulary = self._loaded.model.config.get_text_config().vocab_size
        if any(token >= vocabulary for token in body.bias):
            raise ApiError(f"logit_bias: the model has {vocabulary} tokens", param="logit_bias")
        if body.temperature is not None or body.top_p is not None:
            config.do_sample = True
        if body.temperature is not None:
            config.temperature = body.temperature
        if body.top_p is not None:
            config.top_p = body.top_p
        if config.temperature is not None and config.temperature < GREEDY_TEMPERATURE:
            config.do_sample = False
        if getattr(body, "ignore_eos", None):
            config.eos_token_id = -1  # no token
        if not config.do_sample:
            config.temperature = config.top_p = config.top_k = None
        elif config.top_k is None:
            config.top_k = 0  # none, where Transformers' default would be 50


def too_long(room: int, asked: str, param: str) -> ApiError:
    """Return the error of a request that asks for more tokens than there is room for."""
    message = f"this server takes {room} tokens, prompt and answer together; the prompt has {asked}"
    return ApiError(message, param=param, code="context_length_exceeded")


class Route:
    """A route. It checks a request, has it answered, and converts the answer to OpenAI's format."""

    body_type: type[Request]
    handler: type[Any]
    param: str  # the field with the prompt

    def __init__(self, models: ModelManager, loaded: LoadedModel, engine: Engine) -> None:
        self._models, self._loaded, self._engine = models, loaded, engine

    async def answer(self, fields: dict[str, Any]) -> Response:
        """Answer a request, at once or as a stream.

        Raises:
            ApiError: It cannot be answered.
        """
        body = check(self.body_type, fields)
        if body.model not in (None, self._loaded.name):
            message = f"this server is pinned to {self._loaded.name!r}; requested {body.model!r}"
            raise ApiError(message, param="model", code="model_not_found")
        self._check_template(body)
        await self._check_length(body.text)
        generation = _Generation(self._loaded, self._engine, body, self.param)
        handler = self.handler(self._models, generation)
        passed = body.passed_on() | {"model": self._loaded.name, "stream": self._is_streamed(body)}
        try:
            answer = await handler.handle_request(passed, self.name_answer())
        except (ValueError, TypeError, TemplateError) as error:  # of the template
            raise ApiError(one_line(error), param=self.param) from error
        return await self._finish(answer, generation, body)

    def name_answer(self) -> str:
        """Return an id for an answer."""
        return uuid.uuid4().hex

    def _is_streamed(self, body: Request) -> bool:
        """Whether the handler streams. By default it always does, so that both kinds of answers share one path."""
        return True

    def _check_template(self, body: Request) -> None:
        if self.param == "prompt":
            return
        tokenizer = self._loaded.tokenizer
        if tokenizer.chat_template is None:
            message = "the model's tokenizer has no chat template; /v1/completions takes plain text"
            raise ApiError(message, param=self.param)
        if body.passed_on().get("tools") and (
            "tools" not in str(tokenizer.chat_template) or get_response_template(tokenizer, self._loaded.model) is None
        ):
            raise ApiError("tools: the model's chat template has none", param="tools")

    async def _check_length(self, text: str) -> None:
        """Refuse a text that is far too long on another thread, because the handler counts tokens on the event loop."""
        room = self._engine.room()
        if room is not None and len(text) > 4 * room:
            ids = await asyncio.to_thread(self._loaded.tokenizer.encode, text[: SAMPLE * room])
            if len(ids) > 2 * room:
                raise too_long(room, f"more than {2 * room} tokens", self.param)

    async def _finish(self, answer: Any, generation: _Generation, body: Request) -> Response:
        chunks = _chunks(answer, generation)
        if body.stream:
            options = getattr(body, "stream_options", None)
            has_usage = bool(options and options.include_usage)
            return StreamingResponse(_stream(chunks, has_usage), media_type=SSE)
        return JSONResponse(self._join([chunk async for chunk in chunks]))

    def _join(self, chunks: list[dict[str, Any]]) -> dict[str, Any]:
        """Join the pieces of an answer."""
        raise NotImplementedError


class Chat(Route):
    """``/v1/chat/completions``."""

    body_type = ChatRequest
    handler = ChatCompletionHandler
    param = "messages"

    def name_answer(self) -> str:
        return f"chatcmpl-{super().name_answer()}"

    def _join(self, chunks: list[dict[str, Any]]) -> dict[str, Any]:
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        message: dict[str, Any] = {"role": "assistant", "content": _text(deltas, "content"), "refusal": None}
        if reasoning := _text(deltas, "reasoning_content"):
            message["reasoning_content"] = reasoning
        if calls := [call for delta in deltas for call in delta.get("tool_calls", ())]:
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
            message["content"] = message["content"] or None
        choice = {"message": message}
        return _one_answer(chunks, "chat.completion", choice)


class Complete(Route):
    """``/v1/completions``."""

    body_type = CompletionRequest
    handler = CompletionHandler
    param = "prompt"

    def name_answer(self) -> str:
        return f"cmpl-{super().name_answer()}"

    def _join(self, chunks: list[dict[str, Any]]) -> dict[str, Any]:
        return _one_answer(chunks, "text_completion", {"text": _text([c["choices"][0] for c in chunks], "text")})


class Respond(Route):
    """``/v1/responses``, which streams only if the request says so, as OpenAI's does."""

    body_type = ResponseRequest
    handler = ResponseHandler
    param = "input"

    def _is_streamed(self, body: Request) -> bool:
        return bool(body.stream)

    async def _finish(self, answer: Response, generation: _Generation, body: Request) -> Response:
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = _events(answer.body_iterator, generation)
        return answer


async def _chunks(answer: Any, generation: _Generation) -> AsyncIterator[dict[str, Any]]:
    """Yield the pieces of a streamed answer. The last has the usage and the finish reason.

    Raises:
        ApiError: Generating failed.
    """
    job = generation.job
    async for text in answer.body_iterator:
        if job is not None and job.error is not None:
            raise job.error
        for line in filter(None, text.split("\n\n")):
            chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
            choice = chunk["choices"][0]
            if choice.get("finish_reason") not in (None, "tool_calls") and job is not None:
                choice["finish_reason"] = job.finish_reason
            yield chunk


async def _stream(chunks: AsyncIterator[dict[str, Any]], has_usage: bool) -> AsyncIterator[str]:
    """Write chunks as server-sent events. With ``has_usage`` an extra one at the end has the usage."""
    chunk: dict[str, Any] = {}
    try:
        async for chunk in chunks:
            chunk["choices"][0].setdefault("finish_reason", None)
            yield f"data: {json.dumps(chunk)}\n\n"
    except ApiError as error:
        yield f"data: {json.dumps(error.body)}\n\n"
        return
    if has_usage:
        yield f"data: {json.dumps(chunk | {'choices': []})}\n\n"
    yield "data: [DONE]\n\n"


async def _events(pieces: Any, generation: _Generation) -> AsyncIterator[str]:
    """Pass on the events of ``/v1/responses``. If generation fails, an error ends them."""
    job = generation.job
    async for piece in pieces:
        if job is not None and job.error is not None:
            yield f"data: {json.dumps({'type': 'error', **job.error.body['error']})}\n\n"
            return
        yield piece


def _text(parts: list[dict[str, Any]], name: str) -> str:
    return "".join(part.get(name) or "" for part in parts)


def _one_answer(chunks: list[dict[str, Any]], kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    last = chunks[-1]
    choice |= {"index": 0, "logprobs": None, "finish_reason": last["choices"][0]["finish_reason"]}
    kept = {name: last[name] for name in ("id", "created", "model", "usage")}
    return kept | {"object": kind, "choices": [choice]}
