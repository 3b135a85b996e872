"""The finished pieces of a run, such as a batch of windows or the answers of a backend to a task.

A section of a report is made of pieces, and only pieces are saved, so an interrupted run resumes after the last one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from .files import parse, slug, write_text
from .results import Origin

Kind = TypeVar("Kind")


@dataclass(frozen=True, kw_only=True)
class Piece(Generic[Kind]):
    """A finished piece of a run."""

    identity: dict[str, Any]  # everything it depends on, as JSON values
    origin: Origin  # how it was measured
    content: Kind  # what was measured


@dataclass(frozen=True)
class Store:
    """The finished pieces of a run, one file for each. An interrupted run resumes from them."""

    folder: Path | None = None  # the run's folder; without one nothing is saved or found

    def load(self, kind: type[Kind], identity: Mapping[str, Any], *names: str) -> Piece[Kind] | None:
        """Return the piece of these names, if there is one of the same identity."""
        path = self._path(names)
        if path is None or not path.is_file():
            return None
        try:
            piece = parse(Piece[kind], path.read_bytes())  # type: ignore[valid-type]
        except ValueError:  # incomplete, or of another version: measure it again
            return None
        return piece if piece.identity == json.loads(json.dumps(identity)) else None

    def save(self, kind: type[Kind], piece: Piece[Kind], *names: str) -> None:
        """Save a piece under these names."""
        path = self._path(names)
        if path is not None:
            # Answers may hold infinities, which become null.
            write_text(TypeAdapter(Piece[kind]).dump_json(piece).decode(), path)  # type: ignore[valid-type]

    def scratch(self, identity: Mapping[str, Any], *names: str) -> Path | None:
        """Return the file for an unfinished piece, one for each identity; ``None`` if nothing is saved."""
        path = self._path(names)
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
        return None if path is None else path.with_suffix(f".{digest}.partial")

    def _path(self, names: tuple[str, ...]) -> Path | None:
        *folders, last = map(slug, names)
        return None if self.folder is None else self.folder.joinpath(*folders, f"{last}.json")
