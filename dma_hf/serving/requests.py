"""The bodies of requests, after OpenAI's reference: a field is honoured, or the request is refused by the field's name.

A field that a model lacks is refused too, unless it is ``null`` or cannot change an answer: see :data:`NEUTRAL` and
:data:`IGNORED`.
"""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from transformers import PreTrainedTokenizerBase

INT32, INT64 = 2**31 - 1, 2**63 - 1
LONGEST_MESSAGE = 400  # characters; errors of libraries may have tracebacks
IGNORED = {
    *("user", "safety_identifier", "metadata", "prompt_cache_key", "prompt_cache_retention"),  # of OpenAI's service
    *("annotations", "encrypted_content", "phase", "reasoning_content", "status", "summary"),  # of earlier answers
    "index",  # of a tool call that OpenAI's client has assembled from a stream
    *("bos_token_id", "pad_token_id", "transformers_version"),  # of a generation_config
}
"""Fields without an effect on an answer."""
NEUTRAL: dict[str, list[Any]] = {
    "background": [False],
    "best_of": [1],
    "echo": [False],
    "include": [[]],
    "include_obfuscation": [False],
    "logprobs": [False, []],
    "modalities": [["text"]],
    "n": [1],
    "parallel_tool_calls": [True],
    "repetition_penalty": [1.0],
    "response_format": [{"type": "text"}],
    "service_tier": ["auto", "default"],
    "store": [False],
    "strict": [False],
    "text": [{"format": {"type": "text"}}],
    "top_logprobs": [0],
    "truncation": ["disabled"],
    "use_cache": [True],
}
"""Fields that this server lacks, with the values that change nothing."""
_APPLY = inspect.signature(PreTrainedTokenizerBase.apply_chat_template)
TEMPLATE_ARGUMENTS = {"messages", *_APPLY.parameters.keys()} - {"documents"}
"""Arguments of ``apply_chat_template`` that are no variables of the template. They are the server's choice."""


class ApiError(Exception):
    """An error for the client, in OpenAI's format. The first paragraph of the message is shown, as one line."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        message = " ".join(message.partition("\n\n")[0].split())[:LONGEST_MESSAGE]
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        kind = "rate_limit_error" if status == 429 else kind
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def event(self, path: str) -> bytes:
        """The server-sent event that ends a stream of this path."""
        body = self.body["error"] | {"type": "error"} if path == "/v1/responses" else self.body
        return event(body)


_BODY = TypeAdapter(dict[str, Any])


def event(body: dict[str, Any]) -> bytes:
    """Return a server-sent event. Pydantic writes it in a third of the time that the module ``json`` takes."""
    return b"data: %b\n\n" % _BODY.dump_json(body)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, int)) else value


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_text(value: Any) -> Any:
    """Unpack a list of one prompt."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, (list, int)):
        raise ValueError("expected one text; this server takes neither several nor token ids")
    return value


def _as_items(value: Any) -> Any:
    """Convert a text to a message, and drop reasoning, which Transformers leaves out of prompts."""
    if isinstance(value, list):
        return [item for item in value if not (isinstance(item, dict) and item.get("type") == "reasoning")]
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _check_variables(options: dict[str, Any]) -> dict[str, Any]:
    for name in options.keys() & TEMPLATE_ARGUMENTS:
        raise ValueError(f"{name}: it is no variable of the chat template")
    return options


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: Any) -> Any:
        def is_neutral(name: str, value: Any) -> bool:
            neutral = map(json.dumps, NEUTRAL.get(name, ()))  # because 0 == False in Python
            return value is None or (name not in cls.model_fields and (name in IGNORED or json.dumps(value) in neutral))

        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if not is_neutral(name, value)}


class StreamOptions(_Model):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # of vLLM: the usage so far in every piece, where it is included


class TextPart(_Model):
    """A part of a message's content. Images, audio and files are refused, because the model takes text only."""

    type: Literal["text", "input_text", "output_text"]
    text: str


Content = Annotated[list[TextPart], BeforeValidator(_as_parts)]
older_name = AfterValidator(lambda role: "system" if role == "developer" else role)  # which chat templates know


class CalledFunction(_Model):
    name: str
    arguments: Json[dict[str, Any]]


class ToolCall(_Model):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(_Model):
    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], older_name]
    content: Content | None = None
    name: str | None = None  # of the tool
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.name is not None and self.role != "tool":
            raise ValueError("name: this server supports it for messages of role 'tool' alone; leave it out")
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content: expected a text or a list of text parts")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id: a message of role 'tool' needs it")
        return self


class Function(_Model):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Model):
    type: Literal["function"]
    function: Function


class ResponseTool(_Model):
    """A tool in the form of ``/v1/responses``; the first wrong field is the one that is named."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Item(_Model):
    """An item of the input of ``/v1/responses``: a message, a function call or its output."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Annotated[Literal["system", "developer", "user", "assistant"], older_name] | None = None
    content: Content | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Json[dict[str, Any]] | None = None
    output: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Item:
        needed = {"message": ("role", "content"), "function_call": ("call_id", "name", "arguments")}
        for name in needed.get(self.type, ("call_id", "output")):
            if getattr(self, name) is None:
                raise ValueError(f"{name}: an item of type {self.type!r} needs it")
        return self


Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=INT32)]
Limit = Annotated[int, Field(ge=1)]
Token = Annotated[int, Field(ge=-1, le=INT32)]  # -1 is none
TokenId = Annotated[int, Field(strict=False, ge=0, le=INT32)]  # JSON has it as a text
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1)]


class GenerationOptions(_Model):
    """Fields of Transformers' ``GenerationConfig`` for one sampled answer. Others choose caches, beams and helpers."""

    do_sample: bool | None = None
    temperature: Annotated[float, Field(gt=0, le=2)] | None = None
    top_k: Count | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    epsilon_cutoff: Share | None = None
    eta_cutoff: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    no_repeat_ngram_size: Count | None = None
    max_new_tokens: Limit | None = None
    min_new_tokens: Count | None = None
    eos_token_id: Annotated[list[Token], BeforeValidator(_as_list)] | None = None


class GenerationRequest(_Model):
    """The fields that all routes share."""

    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)
    """Fields that limit new tokens, by precedence."""
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: Share | None = None
    seed: int | None = Field(None, ge=-INT64, le=INT64)
    stop: Annotated[list[Stop], Field(max_length=4), BeforeValidator(_as_list)] = []
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] = {}
    ignore_eos: bool = False  # of vLLM and SGLang
    generation_config: Json[GenerationOptions] = GenerationOptions()  # Transformers' own, as JSON

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("stream_options: only with stream: true")
        return self

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits new tokens, and its value."""
        name = next((name for name in self.limits if getattr(self, name) is not None), self.limits[0])
        return name, getattr(self, name)

    def dumped(self, name: str) -> Any:
        """The JSON value of a field."""
        return self.model_dump(exclude_none=True, include={name}).get(name)


class ConversationRequest(GenerationRequest):
    """The fields of chats."""

    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none"] = "auto"

    @model_validator(mode="after")
    def _drop_tools(self) -> ConversationRequest:
        if self.tool_choice == "none":
            self.tools = None
        return self


class ChatRequest(ConversationRequest):
    """The body of ``/v1/chat/completions``."""

    limits = ("max_completion_tokens", "max_tokens")
    messages: list[Message] = Field(min_length=1)
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_check_variables)] = {}  # Transformers' own


class CompletionRequest(GenerationRequest):
    """The body of ``/v1/completions``."""

    prompt: Annotated[str, BeforeValidator(_as_text)]
    max_tokens: Limit | None = None


class ResponseRequest(ConversationRequest):
    """The body of ``/v1/responses``."""

    limits = ("max_output_tokens",)
    input: Annotated[list[Item], Field(min_length=1), BeforeValidator(_as_items)]
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    tools: list[ResponseTool] | None = None

    @model_validator(mode="after")
    def _check_usage(self) -> ResponseRequest:
        if self.stream_options.continuous_usage_stats:
            raise ValueError("stream_options.continuous_usage_stats: only the last event has the usage; leave it out")
        return self

    @model_validator(mode="after")
    def _begin_with_message(self) -> ResponseRequest:
        if self.instructions:
            self.input.insert(0, Item.model_validate({"role": "system", "content": self.instructions}))
        elif self.input[0].type != "message":
            raise ValueError("input: expected a message before function calls and their outputs")
        return self


class LoadRequest(BaseModel):
    """The body of ``/load_model``."""

    model: str


Body = TypeVar("Body", bound=BaseModel)


def check(kind: type[Body], body: bytes) -> Body:
    """Parse and check the body of a request.

    Raises:
        ApiError: It is no JSON object; or a field is unknown, has a wrong type or value, or is not supported.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    names = [f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"] if each != "[key]"]
    param = "".join(names).lstrip(".")
    message = first["msg"]
    if first["type"] == "extra_forbidden":
        way_out = [f" or send {json.dumps(each)}" for each in NEUTRAL.get(str(first["loc"][-1]), ())]
        message = "".join(["this server does not support it; leave it out", *way_out])
    elif first["type"] == "value_error":
        *fields, message = str(first["ctx"]["error"]).split(": ", 1)
        param = ".".join([param, *fields]).lstrip(".")  # a check of several fields names the one
    raise ApiError(f"{param or 'the body: expected a JSON object'}: {message}", param=param or None)
