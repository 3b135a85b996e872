"""Transformers' HTTP server (``transformers serve``), which :mod:`dma_hf.serving` builds on.

Its handlers turn requests into prompts, and answers into OpenAI's format. Its streamers decode tokens, and its parser
finds reasoning and tool calls. Only the server imports this module, and with it the packages of the extra ``serve``.
"""

from __future__ import annotations

from typing import Any

from .internals import check_version, private_imports

check_version("transformers serve")
with private_imports():
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.utils import (
        CBStreamer,
        DirectStreamer,
        GenerationState,
        get_response_template,
        response_events_to_chunks,
    )
    from transformers.cli.serving.utils import _decode_prefix as decode_prompt
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
    "ChatCompletionHandler",
    "CompletionHandler",
    "DirectStreamer",
    "GenerationCancelled",
    "GenerationState",
    "ModelManager",
    "Parser",
    "ResponseHandler",
    "decode_as_continuation",
    "decode_prompt",
    "get_response_template",
    "infer_max_single_request_tokens",
]


def decode_as_continuation(streamer: Any, tokenizer: Any) -> None:
    """Let a new streamer decode its text as that after a word.

    Decoders in the style of SentencePiece, such as those of Llama 2 and Mistral, drop a space at the start of a text.
    """
    word = tokenizer.encode("a", add_special_tokens=False).ids
    streamer._decode_stream = type(streamer._decode_stream)(word, skip_special_tokens=True)


class Parser:
    """Transformers' parser of the reasoning and the tool calls of an answer. A malformed tool call becomes text.

    Transformers' own raises an error for it, so that the whole answer would fail.
    """

    def __init__(self, parser: Any) -> None:
        self._parser, self._body = parser, ""
        self.initial_events: list[dict[str, Any]] = parser.initial_events

    def fits(self, prompt: str) -> bool:
        """Return whether the prompt has the chat format of the parser, which Transformers chooses by the model type.

        In another format, the parser would take the prompt for a part of the answer.
        """
        anchor = self._parser._spec.start_anchor_re
        return anchor is None or anchor.search(prompt) is not None

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
