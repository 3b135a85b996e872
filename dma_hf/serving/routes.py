"""The routes that generate. They check requests, tokenize prompts, and write answers in OpenAI's format."""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from transformers import GenerationConfig

from dma_hf.integrations.serving import Parser, chat_messages, make_parser, response_messages

from .engines import ONE_STREAM, Answer, Engine
from .items import Items, make_id
from .requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ResponseRequest,
    StreamOptions,
    check,
    event,
)

SSE = "text/event-stream"
GREEDY_TEMPERATURE = 1e-5  # and below: logits would overflow
SAMPLE = 64  # characters for each token of the server's limit
NEW_TOKENS = 1024  # by default, where the model's own configuration has less, as in ``transformers serve``


def too_long(room: int, asked: str, param: str) -> ApiError:
    """Return the error of a request that asks for more tokens than there is room for."""
    message = f"this server takes {room} tokens, prompt and answer together; the prompt has {asked}"
    return ApiError(message, param=param, code="context_length_exceeded")


class Route:
    """A route. It checks a request, has it answered, and converts the answer to OpenAI's format."""

    path: str
    body_type: type[GenerationRequest]
    param: str  # the field with the prompt
    prefix = ""  # of the ids of answers
    end = b"data: [DONE]\n\n"  # of a stream

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name

    async def answer(self, request: Request) -> Response:
        """Answer a request, at once or as a stream.

        Raises:
            ApiError: It cannot be answered.
        """
        body = check(self.body_type, await request.body())
        if body.model not in (None, self._name):
            message = f"this server is pinned to {self._name!r}; requested {body.model!r}"
            raise ApiError(message, param="model", code="model_not_found", status=404)
        loop = asyncio.get_running_loop()
        ids, parser = await loop.run_in_executor(self._engine.prompts, self._read, body)
        config, answer = self._configure(body, len(ids)), Answer(body.stop)
        answer.prompt_tokens, answer.max_new_tokens = len(ids), config.max_new_tokens
        ends = config.eos_token_id
        answer.end_tokens = [ends] if isinstance(ends, int) else ends or []
        self._engine.start(answer, ids, config, body, parser)
        request.state.answer = answer
        pieces = self._pieces(make_id(self.prefix), answer, body.stream_options)
        if body.stream:
            return StreamingResponse(self._stream(pieces), media_type=SSE)
        return JSONResponse(self._join([piece async for piece in pieces], answer))

    def _read(self, body: Any) -> tuple[list[int], Parser | None]:
        """Return the tokens of a prompt, and what parses the answer to it, if anything.

        Raises:
            ApiError: The prompt is far too long, or the chat template is missing or fails, or lacks tools.
        """
        room, text = self._engine.room, getattr(body, self.param)
        if not isinstance(text, str):
            text = "\n".join(part.text for message in text for part in message.content or ())
        if room is not None and len(text) > 4 * room:  # a part shows at once that it is far too long
            ids = self._engine.tokenizer.encode(text[: SAMPLE * room])
            if len(ids) > 2 * room:
                raise too_long(room, f"more than {2 * room} tokens", self.param)
        try:
            return self._tokenize(body)
        except (ValueError, TypeError, TemplateError) as error:  # of the chat template
            raise ApiError(str(error), param=self.param) from error

    def _tokenize(self, body: Any) -> tuple[list[int], Parser | None]:
        """Return what :meth:`_read` does, for a prompt that is not far too long."""
        raise NotImplementedError

    def _apply_template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **variables: Any
    ) -> tuple[list[int], Parser | None]:
        """Tokenize a chat. ``variables`` are those of its template."""
        tokenizer = self._engine.tokenizer
        if tokenizer.chat_template is None:
            message = "the model's tokenizer has no chat template; /v1/completions takes plain text"
            raise ApiError(message, param=self.param)
        ids = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors=None,
            **variables,
        )["input_ids"]
        parser = make_parser(tokenizer, self._engine.model, ids, tools)
        if tools and (parser is None or "tools" not in str(tokenizer.chat_template)):
            raise ApiError("tools: the model's chat template has none", param="tools")
        return ids, parser

    def _configure(self, body: GenerationRequest, prompt_tokens: int) -> GenerationConfig:
        """Return the model's own configuration with the request's limit and sampling.

        Raises:
            ApiError: The prompt is empty or too long, or ``logit_bias`` names no token.
        """
        model, room = self._engine.model, self._engine.room
        if prompt_tokens == 0:
            raise ApiError(f"{self.param}: it has no tokens", param=self.param)
        name, limit = body.limit
        if room is not None and prompt_tokens + (limit or 1) > room:
            asked = f"{prompt_tokens} tokens" + (f" and {name} is {limit}" if limit is not None else "")
            raise too_long(room, asked, self.param if prompt_tokens >= room else name)
        config: GenerationConfig = copy.deepcopy(model.generation_config)
        vars(config).update(ONE_STREAM)
        config.max_new_tokens = max(config.max_new_tokens or 0, NEW_TOKENS)
        vars(config).update(body.generation_config.model_dump(exclude_none=True))
        sampling = body.model_dump(include={"temperature", "top_p"}, exclude_none=True)
        vars(config).update(sampling, do_sample=config.do_sample or bool(sampling))
        config.max_new_tokens = limit or config.max_new_tokens
        if room is not None:
            config.max_new_tokens = min(config.max_new_tokens, room - prompt_tokens)
        vocabulary = model.config.get_text_config().vocab_size
        if any(token >= vocabulary for token in body.logit_bias):
            raise ApiError(f"logit_bias: the model has {vocabulary} tokens", param="logit_bias")
        if config.temperature is not None and config.temperature < GREEDY_TEMPERATURE:
            config.do_sample = False
        if body.ignore_eos:
            config.eos_token_id = -1  # no token
        if not config.do_sample:
            config.temperature = config.top_p = config.top_k = None
        elif config.top_k is None:
            config.top_k = 0  # none, where Transformers' default would be 50
        return config

    def _pieces(self, request_id: str, answer: Answer, options: StreamOptions) -> AsyncIterator[dict[str, Any]]:
        """Yield the pieces of a streamed answer.

        Raises:
            ApiError: Generating failed.
        """
        raise NotImplementedError

    def _join(self, pieces: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        """Join the pieces of an answer."""
        raise NotImplementedError

    async def _stream(self, pieces: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        """Write pieces as server-sent events."""
        try:
            async for piece in pieces:
                yield event(piece)
        except ApiError as error:
            yield error.event(self.path)
            return
        yield self.end


class _Choices(Route):
    """A route whose pieces have one choice.

    Transformers' handlers make each piece of objects of OpenAI's client, which takes several times as long.
    """

    kind: str  # of an answer
    piece_kind: str
    first: ClassVar[dict[str, Any]] = {}  # fields of the first piece, if any, and of the last
    last: ClassVar[dict[str, Any]]

    async def _pieces(self, request_id: str, answer: Answer, options: StreamOptions) -> AsyncIterator[dict[str, Any]]:
        common = {"id": request_id, "object": self.piece_kind, "created": int(time.time()), "model": self._name}

        def piece(fields: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
            made = common | {"choices": [{"index": 0, **fields, "finish_reason": reason}]}
            if options.include_usage:  # an extra piece at the end has it
                made["usage"] = answer.usage if options.continuous_usage_stats else None
            return made

        if self.first:
            yield piece(self.first)
        calls = 0
        while (item := await answer.get()) is not None:
            if not isinstance(item, str):
                function = {"name": item.name, "arguments": item.arguments}
                item = {"index": calls, "id": make_id("call_"), "type": "function", "function": function}
                calls += 1
            yield piece(self._fields(item))
        if answer.error is not None:
            raise answer.error
        reason = answer.finish_reason
        yield piece(self.last, "tool_calls" if calls and reason == "stop" else reason)
        if options.include_usage:
            yield common | {"choices": [], "usage": answer.usage}

    def _fields(self, item: Any) -> dict[str, Any]:
        """Return the fields of a piece with text, reasoning or a tool call."""
        raise NotImplementedError

    def _join(self, pieces: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        parts = [piece["choices"][0] for piece in pieces]
        choice = {"index": 0, "logprobs": None, "finish_reason": parts[-1]["finish_reason"]}
        return pieces[-1] | {"object": self.kind, "choices": [self._joined(parts) | choice], "usage": answer.usage}

    def _joined(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of the choice of a whole answer."""
        raise NotImplementedError


class Chat(_Choices):
    """The route of chats."""

    path, param, prefix = "/v1/chat/completions", "messages", "chatcmpl-"
    body_type = ChatRequest
    kind, piece_kind = "chat.completion", "chat.completion.chunk"
    first: ClassVar = {"delta": {"role": "assistant"}}
    last: ClassVar = {"delta": {}}

    def _tokenize(self, body: ChatRequest) -> tuple[list[int], Parser | None]:
        messages, tools = body.dumped("messages"), body.dumped("tools")
        return self._apply_template(chat_messages(messages), tools, **body.chat_template_kwargs)

    def _fields(self, item: Any) -> dict[str, Any]:
        if isinstance(item, dict):
            return {"delta": {"tool_calls": [item]}}
        return {"delta": {"content" if type(item) is str else "reasoning_content": item}}

    def _joined(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        deltas = [part["delta"] for part in parts]
        message: dict[str, Any] = {"role": "assistant", "content": _text(deltas, "content"), "refusal": None}
        if reasoning := _text(deltas, "reasoning_content"):
            message["reasoning_content"] = reasoning
        if calls := [call for delta in deltas for call in delta.get("tool_calls", ())]:
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
            message["content"] = message["content"] or None
        return {"message": message}


class Complete(_Choices):
    """The route of continuations of a text."""

    path, param, prefix = "/v1/completions", "prompt", "cmpl-"
    body_type = CompletionRequest
    kind = piece_kind = "text_completion"
    last: ClassVar = {"text": ""}

    def _tokenize(self, body: CompletionRequest) -> tuple[list[int], Parser | None]:
        return self._engine.tokenizer(body.prompt)["input_ids"], None

    def _fields(self, item: Any) -> dict[str, Any]:
        return {"text": item}

    def _joined(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {"text": _text(parts, "text")}


class Respond(Route):
    """The route of OpenAI's newer interface. Its last event has the whole answer."""

    path, param, prefix, end = "/v1/responses", "input", "resp_", b""
    body_type = ResponseRequest

    def _tokenize(self, body: ResponseRequest) -> tuple[list[int], Parser | None]:
        return self._apply_template(*response_messages(body.dumped("input"), body.dumped("tools")))

    async def _pieces(self, request_id: str, answer: Answer, options: StreamOptions) -> AsyncIterator[dict[str, Any]]:
        items, numbers = Items(), itertools.count()
        common = {"id": request_id, "object": "response", "created_at": int(time.time()), "model": self._name}
        common |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None}

        def piece(kind: str, status: str, **fields: Any) -> dict[str, Any]:
            response = common | {"status": status, "incomplete_details": None, "output": [*items.done], "usage": None}
            return {"type": f"response.{kind}", "response": response | fields}

        async def events() -> AsyncIterator[dict[str, Any]]:
            yield piece("created", "in_progress")
            yield piece("in_progress", "in_progress")
            while (item := await answer.get()) is not None:
                for each in items.add(item):
                    yield each
            if answer.error is not None:
                raise answer.error
            is_cut = answer.finish_reason == "length"
            status = "incomplete" if is_cut else "completed"
            for each in items.finish(status):
                yield each
            reason = {"reason": "max_output_tokens"} if is_cut else None
            yield piece(status, status, incomplete_details=reason, usage=_response_usage(answer))

        async for each in events():
            yield each | {"sequence_number": next(numbers)}

    def _join(self, pieces: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        return dict(pieces[-1]["response"])


def _response_usage(answer: Answer) -> dict[str, Any]:
    """Return the numbers of tokens in the format of ``/v1/responses``."""
    new = answer.total_tokens
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": new,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + new,
    }


def _text(parts: list[dict[str, Any]], name: str) -> str:
    return "".join(part.get(name) or "" for part in parts)
