"""Transformers' HTTP server (``transformers serve``), which :mod:`dma_hf.serving` builds on.

Its handlers convert messages for chat templates. Its streamers decode tokens, and its parser finds reasoning and tool
calls. Only the server imports this module, and with it the packages of the extra ``serve``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from .internals import check_version, private_imports

check_version("transformers serve")
with private_imports():
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.utils import (
        BaseHandler,
        CBStreamer,
        DirectStreamer,
        Modality,
        build_response_parser,
        response_events_to_chunks,
    )
    from transformers.cli.serving.utils import _GenerationCancelled as GenerationCancelled
    from transformers.generation.continuous_batching.cb_logits_processors import (
        ContinuousBatchingTopKLogitsWarper as BatchTopK,
    )
    from transformers.generation.continuous_batching.cb_logits_processors import (
        ContinuousBatchingTopPLogitsWarper as BatchTopP,
    )
    from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

__all__ = [
    "BatchTopK",
    "BatchTopP",
    "CBStreamer",
    "DirectStreamer",
    "GenerationCancelled",
    "Parser",
    "chat_messages",
    "decode_any_bytes",
    "infer_max_single_request_tokens",
    "make_parser",
    "response_messages",
]


class _Decoder:
    """Decodes the tokens of an answer one by one, whatever bytes they stand for.

    A byte that is no UTF-8 after others changes the decoded text before it, which tokenizers' own stream refuses. The
    text then goes on with the next token.

    Args:
        kind: The class of tokenizers' stream.
        word: Tokens of a word. Decoders in the style of SentencePiece, such as those of Llama 2 and Mistral, drop a
            space at the start of a text, but not after a word.
        continues: Whether the text continues another one.
        skips: Whether to leave out special tokens.
    """

    def __init__(self, kind: Callable[..., Any], word: list[int], *, continues: bool, skips: bool) -> None:
        self._start_after = functools.partial(kind, skip_special_tokens=skips)
        self._word, self._stream = word, self._start_after(word if continues else [])

    def step(self, tokenizer: Any, token: int) -> str | None:
        """Return the text that a token adds, if it is known already."""
        try:
            text: str | None = self._stream.step(tokenizer, token)
        except Exception as error:  # the library raises nothing narrower
            if not str(error).startswith("Invalid prefix"):
                raise
            self._stream = self._start_after(self._word)
            text = self._stream.step(tokenizer, token)
        return text


def decode_any_bytes(streamer: Any, tokenizer: Any, *, continues: bool) -> None:
    """Let a new streamer decode an answer, or the continuation of a text, also where its bytes are no UTF-8."""
    word = tokenizer.encode("a", add_special_tokens=False).ids
    kind, skips = type(streamer._decode_stream), streamer._parser is None
    streamer._decode_stream = _Decoder(kind, word, continues=continues, skips=skips)


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's format as chat templates of text models take them."""
    converted: list[dict[str, Any]] = BaseHandler.get_processor_inputs_from_messages(messages, Modality.LLM)
    for given, made in zip(messages, converted, strict=True):
        if "name" in given:  # of a tool; Transformers leaves it out
            made["name"] = given["name"]
    return converted


def response_messages(
    items: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return the input items and the tools of ``/v1/responses`` as chat templates take them."""
    return chat_messages(ResponseHandler._normalize_response_items(items)), ResponseHandler._normalize_tools(tools)


def make_parser(tokenizer: Any, model: Any, ids: list[int], tools: Any) -> Parser | None:
    """Return what parses the answer to a prompt; ``None`` if Transformers knows no chat format of the model.

    It chooses the format by the model type. With a prompt in another format, it would take the prompt for a part of the
    answer, so there is no parser either.
    """
    takes_tools = "tools" in inspect.signature(build_response_parser).parameters  # since Transformers 5.23
    parser = build_response_parser(tokenizer, model, ids, **({"tools": tools} if takes_tools else {}))
    if parser is None:
        return None
    anchor = parser._spec.start_anchor_re
    fits = anchor is None or anchor.search(tokenizer.decode(ids)) is not None
    return Parser(parser) if fits else None


class Parser:
    """Transformers' parser of the reasoning and the tool calls of an answer. A malformed tool call becomes text.

    Transformers' own raises an error for it, so that the whole answer would fail.
    """

    def __init__(self, parser: Any) -> None:
        self._parser, self._body = parser, ""
        self.initial_events: list[dict[str, Any]] = parser.initial_events

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Parse more text and return its events."""
        try:
            return [self._checked(event) for event in self._parser.feed(text)]
        except ValueError:
            return [self._skipped(), *self.feed("")]

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the message and the last events.

        Raises:
            ValueError: The answer lacks a field that the template requires.
        """
        skipped = []
        try:
            message, events = self._parser.finalize()
        except ValueError:
            skipped = [self._skipped()]
            message, events = self._parser.finalize()
        return message, skipped + [self._checked(event) for event in events]

    def _checked(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return an event, or the text of a tool call without a name or arguments."""
        if event["field"] != "tool_calls":
            return event
        if event["type"] == "region_open":
            self._body = ""
        elif event["type"] == "region_chunk":
            self._body += event["text"]
        else:
            try:
                response_events_to_chunks([event])
            except (KeyError, TypeError):
                return _content(self._body)
        return event

    def _skipped(self) -> dict[str, Any]:
        """Leave the region that could not be parsed, and return its text."""
        event = _content(self._parser._body)
        self._parser._reset_to_implicit()
        return event


def _content(text: str) -> dict[str, Any]:
    return {"type": "region_chunk", "field": "content", "text": text}
