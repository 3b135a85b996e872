"""Check requests against OpenAI's reference: a field is honoured, or the request is refused by the field's name.

Fields that only concern OpenAI's own service (``user``, ``metadata``, ``prompt_cache_key``) are accepted and have no
effect. Other fields that this server lacks are accepted with the value that changes nothing.
"""

from __future__ import annotations

import json
import re
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

INT32, INT64 = 2**31 - 1, 2**63 - 1


class ApiError(Exception):
    """An error for the client, in OpenAI's format."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
        if status == 429:
            kind = "rate_limit_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def event(self, path: str) -> str:
        """The server-sent event that ends a stream of this path."""
        body = {"type": "error", **self.body["error"]} if path == "/v1/responses" else self.body
        return f"data: {json.dumps(body)}\n\n"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, int)) else value


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_text(value: Any) -> Any:
    """Unpack a list of one prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    if isinstance(value, list):
        raise ValueError("expected one text; this server takes neither several prompts nor token ids")
    return value


def _check_object(text: str) -> str:
    try:
        TypeAdapter(Json[dict[str, Any]]).validate_python(text)
    except ValidationError as error:
        raise ValueError("expected a JSON object, as text") from error
    return text


JsonObject = Annotated[str, AfterValidator(_check_object)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    absent: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields of OpenAI that this server lacks, with the values that change nothing; ``null`` always does."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_absent(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, allowed in cls.absent.items():
            value = body.get(name)
            if value is not None and not any(type(value) is type(each) and value == each for each in allowed):
                way_out = "".join(f" or send {json.dumps(each)}" for each in allowed)
                raise ValueError(f"{name}: this server does not support it; leave it out{way_out}")
        return {name: value for name, value in body.items() if name not in cls.absent}


class StreamOptions(_Model):
    """How an answer is streamed."""

    absent = {"include_obfuscation": (False,)}
    include_usage: bool | None = None


class TextPart(_Model):
    """A part of a message's content. Images, audio and files are refused, because the model takes text only."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: Any = None  # of an answer that is sent back
    logprobs: Any = None


class ItemPart(TextPart):
    """A part of an item of ``/v1/responses``, which may be reasoning."""

    type: Literal["text", "input_text", "output_text", "reasoning_text"]  # type: ignore[assignment]


Content = Annotated[list[TextPart], BeforeValidator(_as_parts)]


class CalledFunction(_Model):
    """The function of a tool call."""

    name: str
    arguments: JsonObject


class ToolCall(_Model):
    """A tool call in an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(_Model):
    """A message of a conversation."""

    absent = {
        "name": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
        "function_call": (),
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None  # of an earlier answer; chat templates leave it out

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content: expected a text or a list of text parts")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id: a message of role 'tool' needs it")
        if self.role == "developer":  # OpenAI's newer name; chat templates know the older one
            self.role = "system"
        return self


class Function(_Model):
    """A function that the model may call."""

    absent = {"strict": (False,)}
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Model):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


class ResponseTool(_Model):
    """A tool in the form of ``/v1/responses``; the first wrong field is the one that is named."""

    absent = Function.absent
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class TemplateOptions(_Model):
    """Variables of a chat template. The template, and how its text becomes tokens, are the server's choice."""

    model_config = ConfigDict(extra="allow", strict=True)
    absent = {
        "chat_template": (),
        "padding": (False,),
        "truncation": (False,),
        "max_length": (),
        "tokenizer_kwargs": (),
        "return_assistant_tokens_mask": (False,),
    }


Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=INT32)]
Token = Annotated[int, Field(ge=-1, le=INT32)]  # -1 is none


class GenerationOptions(_Model):
    """Fields of Transformers' ``GenerationConfig`` for one sampled answer. Others choose caches, beams and helpers."""

    absent = {"use_cache": (True,)}
    do_sample: bool | None = None
    temperature: float | None = Field(None, gt=0, le=2)
    top_k: Count | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    typical_p: float | None = Field(None, gt=0, le=1)
    epsilon_cutoff: Share | None = None
    eta_cutoff: Share | None = None
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    no_repeat_ngram_size: Count | None = None
    max_new_tokens: int | None = Field(None, ge=1)
    min_new_tokens: Count | None = None
    eos_token_id: Annotated[list[Token], BeforeValidator(_as_list)] | None = None
    # Fields without an effect on an answer.
    bos_token_id: Token | None = Field(None, exclude=True)
    pad_token_id: Token | None = Field(None, exclude=True)
    transformers_version: str | None = Field(None, exclude=True)


class Request(_Model):
    """The fields that all routes share."""

    absent = {
        "service_tier": ("auto", "default"),
        "store": (False,),
        "moderation": (),
        "prompt_cache_options": (),
    }
    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)
    """Fields that limit new tokens, by precedence."""
    model: str | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-INT64, le=INT64)
    generation_config: Json[GenerationOptions] | None = None  # Transformers' own, as JSON
    # Fields of OpenAI's service, without an effect on an answer.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits new tokens, and its value."""
        name = next((name for name in self.limits if getattr(self, name) is not None), self.limits[0])
        return name, getattr(self, name)

    @property
    def stops(self) -> list[str]:
        """Strings that end an answer."""
        return []

    @property
    def penalties(self) -> tuple[float, float]:
        """The frequency and the presence penalty."""
        return 0.0, 0.0

    @property
    def bias(self) -> dict[int, float]:
        """Biases of the logits, by token."""
        return {}

    def passed_on(self) -> dict[str, Any]:
        """The fields that Transformers' handler reads."""
        names = {"messages", "prompt", "input", "instructions", "tools", "chat_template_kwargs"}
        fields = self.model_dump(exclude_none=True, include=names)
        if getattr(self, "tool_choice", None) == "none":
            fields.pop("tools", None)
        return fields


Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class _TextRequest(Request):
    """The fields that chats and completions share."""

    absent = {**Request.absent, "n": (1,)}
    max_tokens: int | None = Field(None, ge=1)
    stop: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=4), BeforeValidator(_as_list)] | None
    ) = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[TokenId, Bias] | None = None
    ignore_eos: bool | None = None  # of vLLM and SGLang

    @model_validator(mode="after")
    def _check_stream(self) -> _TextRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream: true")
        return self

    @property
    def stops(self) -> list[str]:
        return self.stop or []

    @property
    def penalties(self) -> tuple[float, float]:
        return self.frequency_penalty or 0.0, self.presence_penalty or 0.0

    @property
    def bias(self) -> dict[int, float]:
        return {int(token): bias for token, bias in (self.logit_bias or {}).items()}


class ChatRequest(_TextRequest):
    """The body of ``/v1/chat/completions``."""

    absent = {
        **_TextRequest.absent,
        "parallel_tool_calls": (True,),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "functions": (),
        "function_call": (),
    }
    limits = ("max_completion_tokens", "max_tokens")
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: TemplateOptions | None = None  # Transformers' own


class CompletionRequest(_TextRequest):
    """The body of ``/v1/completions``."""

    absent = {
        **_TextRequest.absent,
        "best_of": (1,),
        "echo": (False,),
        "logprobs": (),
        "suffix": (),
    }
    prompt: Annotated[str, BeforeValidator(_as_text)]


class Item(_Model):
    """An item of the input of ``/v1/responses``: a message, a function call, its output, or reasoning."""

    absent = {"phase": ()}
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Annotated[list[ItemPart], BeforeValidator(_as_parts)] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: JsonObject | None = None
    output: str | None = None
    summary: Any = None
    encrypted_content: Any = None

    @model_validator(mode="after")
    def _check(self) -> Item:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
        }
        for name in needed.get(self.type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"{name}: an item of type {self.type!r} needs it")
        if any((part.type == "reasoning_text") != (self.type == "reasoning") for part in self.content or ()):
            raise ValueError(f"content: expected text, for an item of type {self.type!r}")
        if self.role == "developer":
            self.role = "system"
        return self


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponseRequest(Request):
    """The body of ``/v1/responses``."""

    absent = {
        **Request.absent,
        "parallel_tool_calls": (True,),
        "background": (False,),
        "include": ([],),
        "text": ({"format": {"type": "text"}},),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "conversation": (),
        "context_management": (),
        "max_tool_calls": (),
        "previous_response_id": (),
        "prompt": (),
        "reasoning": (),
        "stream_options": (),
    }
    limits = ("max_output_tokens",)
    input: Annotated[list[Item], Field(min_length=1), BeforeValidator(_as_items)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: TemplateOptions | None = None


Body = TypeVar("Body", bound=Request)


def check(kind: type[Body], body: dict[str, Any]) -> Body:
    """Check and return the body of a request.

    Raises:
        ApiError: A field is unknown, has a wrong type or value, or requests something unsupported.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    names = [f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"] if each != "[key]"]
    param = "".join(names).lstrip(".")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown field"
    inner = re.match(r"(\w+): (.*)", message)  # of a check of several fields, which names the one
    if first["type"] == "value_error" and inner is not None:
        param, message = f"{param}.{inner[1]}".lstrip("."), inner[2]
    raise ApiError(f"{param}: {message}", param=param or None)
