"""The items of an answer of ``/v1/responses``, and the events that tell a client how they grow."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
"""Of the ids of items, by type."""


def make_id(prefix: str) -> str:
    """Return a new id, with at most the 40 characters that OpenAI's service takes back."""
    return f"{prefix}{uuid.uuid4().hex}"


class Items:
    """Items of an answer, in OpenAI's format. Text and reasoning extend the last item, if it is of their type."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._text: str | None = None  # of the last item, which may grow
        self._item: dict[str, Any] = {}

    def add(self, piece: Any) -> Iterator[dict[str, Any]]:
        """Add text, reasoning or a tool call, and yield its events."""
        if not isinstance(piece, str):
            yield from self.close()
            yield from self._add_call(piece.name, piece.arguments)
            return
        kind = "message" if type(piece) is str else "reasoning"  # a subclass of texts
        if self._text is None or self._item["type"] != kind:
            yield from self.close()
            yield from self._open(kind)
        assert self._text is not None
        self._text += piece
        yield self._in_part("delta", delta=piece)

    def finish(self, status: str) -> Iterator[dict[str, Any]]:
        """Complete the answer, which has at least one item, and yield the events. ``status`` is that of its end."""
        if not self.done and self._text is None:
            yield from self._open("message")
        yield from self.close(status)

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Complete the last item, unless it is complete, and yield the events."""
        if self._text is None:
            return
        yield self._in_part("done", text=self._text)
        part = self._part(self._text)
        yield self._at("response.content_part.done", content_index=0, part=part)
        yield from self._end({"status": status, "content": [part]})
        self._text = None

    def _open(self, kind: str) -> Iterator[dict[str, Any]]:
        fields: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        yield from self._begin(kind, fields | {"content": []})
        self._text = ""
        yield self._at("response.content_part.added", content_index=0, part=self._part(""))

    def _add_call(self, name: str, arguments: str) -> Iterator[dict[str, Any]]:
        yield from self._begin("function_call", {"call_id": make_id("call_"), "name": name, "arguments": ""})
        yield self._at("response.function_call_arguments.delta", delta=arguments)
        yield self._at("response.function_call_arguments.done", name=name, arguments=arguments)
        yield from self._end({"status": "completed", "arguments": arguments})

    def _begin(self, kind: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._item = {"id": make_id(PREFIXES[kind]), "type": kind, "status": "in_progress", **fields}
        yield {"type": "response.output_item.added", "output_index": len(self.done), "item": self._item}

    def _end(self, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        item = self._item | fields
        yield {"type": "response.output_item.done", "output_index": len(self.done), "item": item}
        self.done.append(item)

    def _at(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the last item."""
        return {"type": kind, "item_id": self._item["id"], "output_index": len(self.done), **fields}

    def _in_part(self, step: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the text of the last item."""
        if self._item["type"] == "reasoning":
            return self._at(f"response.reasoning_text.{step}", content_index=0, **fields)
        return self._at(f"response.output_text.{step}", content_index=0, logprobs=[], **fields)

    def _part(self, text: str) -> dict[str, Any]:
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
