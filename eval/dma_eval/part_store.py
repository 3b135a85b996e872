"""The finished parts of a run, one file each, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from .results import parse
from .task_records import slug, write_whole

FOLDER = "parts"
Section = TypeVar("Section")


@dataclass(frozen=True)
class PartStore:
    """Sections of results in the folder ``parts`` of a run; none if there is no folder.

    Attributes:
        folder: The run's folder.
    """

    folder: Path | None

    def load(self, name: str, kind: type[Section], fingerprint: Mapping[str, Any]) -> tuple[Section, float] | None:
        """Return a part and the seconds that it took, if there is one of this kind and fingerprint."""
        path = self._path(name)
        if path is None or not path.is_file():
            return None
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["fingerprint"] != json.loads(json.dumps(fingerprint)):
                return None
            return parse(kind, kept["section"], name), float(kept["seconds"])
        except (ValueError, KeyError, TypeError):  # cut off, or written by another version: measure again
            return None

    def save(self, name: str, section: Any, seconds: float, fingerprint: Mapping[str, Any]) -> None:
        """Write a part; it appears whole or not at all.

        Raises:
            UserError: The folder cannot be written.
        """
        path = self._path(name)
        if path is None:
            return
        kept = {"fingerprint": fingerprint, "seconds": seconds, "section": asdict(section)}
        write_whole(path, json.dumps(kept, ensure_ascii=False, allow_nan=False))

    def _path(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / FOLDER / f"{slug(name)}.json"
