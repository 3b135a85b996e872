"""Texts, and the windows in which a model reads them."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dma_eval.config import PerplexityPart
from dma_eval.environment import portable
from dma_eval.errors import UserError, one_line
from dma_eval.names import BUILDERS, text_file
from dma_eval.results import DataInfo

PARAGRAPH_BREAK = "\n\n"


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text and where it comes from."""

    content: str  # the whole text
    name: str  # the given file or dataset
    config: str | None = None  # of the dataset, if any; so are the split and the column
    split: str | None = None
    column: str | None = None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()

    def info(self, tokens: int) -> DataInfo:
        facts: dict[str, Any] = {name: getattr(self, name) for name in ("config", "split", "column", "sha256")}
        return DataInfo(name=portable(self.name), **facts, characters=len(self.content), tokens=tokens)


@dataclass(frozen=True)
class Window:
    """The ``prefix`` first tokens of the text, which are special ones, then its tokens ``begin`` to ``end``."""

    begin: int
    end: int
    first: int  # index of the first token that is scored
    prefix: int = 0

    @property
    def length(self) -> int:
        return self.prefix + self.end - self.begin

    @property
    def scored(self) -> int:
        return self.length - self.first

    def of(self, tokens: Tensor) -> Tensor:
        """Return the window's tokens ``[length]`` from those of the text ``[N]``."""
        return torch.cat([tokens[: self.prefix], tokens[self.begin : self.end]])


@dataclass(frozen=True)
class Tokens:
    """A text as a model reads it."""

    ids: Tensor  # int64 ``[N]``, special tokens that the tokenizer adds by default included
    begins_with: list[str]  # the special tokens that it begins with, as every window must

    def windows(self, count: int, length: int) -> Tensor:
        """Return the first windows of the text, ``[count, length]``."""
        prefix = len(self.begins_with)
        rows = self.ids[prefix : prefix + count * (length - prefix)].view(count, length - prefix)
        return torch.cat([self.ids[:prefix].expand(count, -1), rows], 1)


def load_text(data: str, *, column: str = "text") -> Text:
    """Read a text.

    Args:
        data: A file (plain text in UTF-8; or .json, .jsonl, .csv, .parquet, read by ``datasets``), or a dataset of the
            Hub as ``NAME``, ``NAME:CONFIG`` or ``NAME:CONFIG:SPLIT`` (``NAME::SPLIT`` for the default configuration).
            Without a split it is ``test``.
        column: The dataset's column of text.
    """
    path = text_file(data)
    if path is None:
        parts = data.split(":")
        if len(parts) > 3 or not parts[0]:
            raise UserError(f"--data: expected NAME, NAME:CONFIG or NAME:CONFIG:SPLIT, got {data!r}")
        name, config, split = (*parts, "", "")[:3]
        text = _load_dataset(data, name, config or None, split or "test", column)
    elif (suffix := path.suffix.lower()) in BUILDERS:
        text = _load_dataset(data, BUILDERS[suffix], None, "train", column, data_files=glob.escape(str(path)))
    else:
        if column != "text":
            raise UserError(f"--column: {data} is plain text, which has no columns; leave it out")
        try:
            text = Text(content=path.read_text(encoding="utf-8-sig"), name=data)
        except UnicodeDecodeError as error:
            raise UserError(f"--data: {path} is not UTF-8 text (byte {error.start}); convert it first") from error
        except OSError as error:
            raise UserError(f"--data: cannot read {path}: {error.strerror}") from error
    if not text.content.strip():
        raise UserError(f"--data: {data} holds no text")
    return text


def _load_dataset(data: str, name: str, config: str | None, split: str, column: str, **options: str) -> Text:
    import datasets  # takes a second to import, and plain files do not need it

    load: Callable[..., Any] = datasets.load_dataset
    try:
        rows = load(name, config, split=split, **options)
    except StopIteration as error:  # from inside `datasets`: a file without a row
        raise UserError(f"--data: {data} holds no text") from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        kind = "file" if options else "local file, nor a dataset that can be loaded"
        is_broken = isinstance(error, datasets.exceptions.DatasetGenerationError)  # whose cause says how
        why = one_line(error.__cause__ or error if is_broken else error)
        raise UserError(f"--data: {data!r} is not a readable {kind}: {why}") from error
    if column not in rows.column_names:
        raise UserError(f"--data: {data} has no column {column!r}; it has: {', '.join(rows.column_names)}")
    values = rows[column][:]
    for index, value in enumerate(values):
        if not isinstance(value, str):
            kind = "nothing" if value is None else f"{type(value).__name__}, not text"
            raise UserError(f"--data: column {column!r} of {data} holds {kind} in row {index}")
    name = data if options else name
    return Text(content=PARAGRAPH_BREAK.join(values), name=name, config=config, split=split, column=column)


def leading_tokens(tokenizer: Any) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text: BOS, or none."""
    plain: list[int] = tokenizer("x", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("x")["input_ids"]
    return whole[: whole.index(plain[0])] if plain else whole


def make_windows(tokens: int, context: int, part: PerplexityPart, prefix: int = 0) -> list[Window]:
    """Cut a text of ``tokens`` tokens into windows of ``context``, as the perplexity guide of Transformers does.

    Every window begins with the ``prefix`` special tokens that the text begins with. Every other token is scored once.
    Without a stride, windows do not overlap. Each scores all its tokens, except the first if there is no prefix to
    predict it from. With a stride below ``context``, each window after the first scores its last ``stride`` tokens. The
    last window may be shorter. Spread windows are full ones.
    """
    room = context - prefix
    stride = room if part.stride is None else part.stride
    limit, skip = part.max_windows, part.skip_windows
    if room < 2 - bool(prefix):
        raise UserError(f"--context must be at least {max(2, prefix + 1)} tokens, got {context}")
    part.check(context)
    stride = min(stride, room)  # as far as a window reaches
    if tokens < context:
        raise UserError(
            f"--data: the text has {tokens:,} tokens, too few for one window of {context:,}; "
            "give more text or a smaller --context"
        )
    first = max(1, prefix)
    begins = range(prefix, tokens - room + stride, stride)  # up to the first window that reaches the end
    cut = [
        Window(begin, min(begin + room, tokens), first if begin == prefix else max(first, context - stride), prefix)
        for begin in begins
    ]
    windows = [window for window in cut if window.scored > 0]
    if skip >= len(windows):
        raise UserError(f"--skip-windows: the text has {len(windows):,} windows of {context:,}; {skip:,} are skipped")
    windows = windows[skip:]
    if limit is None or limit >= len(windows):
        return windows
    if part.spread and windows[-1].length < context:  # full windows only, so that all have the same weight
        windows = windows[:-1]
    last = len(windows) - 1
    return [windows[round(i * last / max(1, limit - 1))] for i in range(limit)] if part.spread else windows[:limit]
