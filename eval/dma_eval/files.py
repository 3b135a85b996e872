"""Result files: JSON, checked when read and written atomically."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from .errors import UserError

Kind = TypeVar("Kind")

schema: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
"""Returns the schema of a type. It takes long to build, so it is built once."""


def parse(kind: type[Kind], content: bytes | Mapping[str, Any]) -> Kind:
    """Convert JSON to a dataclass. A ``ValueError`` names the first wrong field."""
    text = content if isinstance(content, bytes) else json.dumps(content, default=str)
    try:
        return schema(kind).validate_json(text, strict=True)  # type: ignore[no-any-return]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        got = "" if first["type"] in ("missing", "json_invalid") else f", got {first['input']!r:.60}"
        raise ValueError(f"{place}{': ' if place else ''}{first['msg']}{got}") from None


def write_json(value: Any, path: Path, indent: int = 2) -> None:
    """Write a dataclass as JSON (RFC 8259: NaN is an error)."""
    values = schema(type(value)).dump_python(value, mode="json")
    write_text(json.dumps(values, indent=indent, ensure_ascii=False, allow_nan=False) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Replace a file atomically. A link or a device (``/dev/stdout``) is written through."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # another run may write to the same folder
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_special = _is_written_through(path)
        (path if is_special else partial).write_text(text, encoding="utf-8")
        if not is_special:
            partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"cannot write to {path}: {error.strerror}") from error


def check_folder(folder: Path, option: str = "--out") -> None:
    """Check before a long run that a folder can be created and written to, by trying it with one of another name."""
    nearest = next(each for each in (folder, *folder.parents) if each.exists())
    if not nearest.is_dir():
        what = "it" if nearest == folder else nearest
        raise UserError(f"{option}: cannot create the folder {folder}: {what} is a file")
    try:
        TemporaryDirectory(dir=nearest).cleanup()  # some folders, such as /proc, have the right and refuse
    except OSError as error:
        what = "write to" if nearest == folder else "make"
        raise UserError(f"{option}: cannot {what} the folder {folder}: {error.strerror}") from error


def check_file(path: Path | None, option: str) -> None:
    """Check before a long run that its results can be written to a file."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option}: cannot write to {path}: it is a folder; name a file in it")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{option}: cannot write to {path}: Permission denied")
    if not _is_written_through(path):
        check_folder(path.parent, option)


def _is_written_through(path: Path) -> bool:
    """Return whether a file is a link or a device, which must not be replaced."""
    return path.is_symlink() or (path.exists() and not path.is_file())


def slug(name: str) -> str:
    """Return a readable file name, different for every ``name``."""
    readable = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.")
    return name if readable == name else f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
