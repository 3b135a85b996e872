"""Suites: what to measure, as TOML files. Those in the folder ``suites`` come with the package."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from .errors import UserError
from .results import parse

FOLDER = "suites"


@dataclass(frozen=True, kw_only=True)
class PerplexityPart:
    """Perplexity at several contexts.

    Attributes:
        contexts: Tokens per window; those beyond the model's maximum are skipped.
        data: The text, as for ``dma-hf ppl``; the command line's by default.
        max_windows: Read at most so many windows; all by default.
        batch_size: Windows per forward pass.
    """

    contexts: list[int]
    data: str | None = None
    max_windows: int | None = None
    batch_size: int = 1


@dataclass(frozen=True, kw_only=True)
class FidelityPart:
    """Fidelity to SDPA in fp32.

    Attributes:
        data: The text; the command line's by default.
        context: Tokens per window; 2,048 by default.
        max_windows: Read at most so many windows; all by default.
        head_windows: Windows for the errors by head.
        prompts: Greedy continuations.
        new_tokens: Tokens of each.
    """

    data: str | None = None
    context: int | None = None
    max_windows: int | None = None
    head_windows: int = 2
    prompts: int = 4
    new_tokens: int = 64


@dataclass(frozen=True, kw_only=True)
class TasksPart:
    """lm-eval tasks.

    Attributes:
        names: Tasks and groups.
        limit: Samples per task; all by default.
        num_fewshot: Examples in each prompt; what each task says by default.
    """

    names: list[str]
    limit: int | None = None
    num_fewshot: int | None = None


@dataclass(frozen=True, kw_only=True)
class RetrievalPart:
    """Retrieval from long prompts.

    Attributes:
        kinds: ``needle``, ``kv`` or both.
        data: The prose for needles; the command line's text by default.
        lengths: Tokens per prompt; those beyond the model's maximum are skipped.
        depths: Places of the answer.
        samples: Questions for each length and depth.
    """

    kinds: list[str]
    data: str | None = None
    lengths: list[int] = field(default_factory=list)
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    samples: int = 5


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What to measure.

    Attributes:
        name: Its name, or the file that it was read from.
        description: What it is for, in a line.
        perplexity: Perplexity, if asked for; so are the others.
        fidelity: Fidelity.
        tasks: Tasks.
        retrieval: Retrieval.
    """

    name: str
    description: str
    perplexity: PerplexityPart | None = None
    fidelity: FidelityPart | None = None
    tasks: TasksPart | None = None
    retrieval: RetrievalPart | None = None

    @property
    def needs_text(self) -> bool:
        """Whether a part has no text of its own."""
        parts = [self.perplexity, self.fidelity]
        if self.retrieval is not None and "needle" in self.retrieval.kinds:
            parts.append(self.retrieval)  # type: ignore[arg-type]
        return any(part is not None and part.data is None for part in parts)


PARTS: Mapping[str, type[Any]] = {
    "perplexity": PerplexityPart,
    "fidelity": FidelityPart,
    "tasks": TasksPart,
    "retrieval": RetrievalPart,
}


def suite_names() -> list[str]:
    """Names of the suites that come with the package."""
    folder = resources.files("dma_eval") / FOLDER
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_suite(name: str) -> Suite:
    """Read a suite of the package, by name, or a file of one's own.

    Raises:
        UserError: There is none, or it is not as described; the message lists the names, or the keys, that there are.
    """
    if name in suite_names():
        content = (resources.files("dma_eval") / FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    elif name.endswith(".toml"):
        try:
            content = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--suite: cannot read {name}: {getattr(error, 'strerror', None) or error}") from error
    else:
        raise UserError(f"--suite: unknown suite {name!r}; valid: {', '.join(suite_names())}, or a TOML file")
    try:
        return parse_suite(name, tomllib.loads(content))
    except ValueError as error:  # TOMLDecodeError is one
        raise UserError(f"--suite: {name}: {error}") from error


def parse_suite(name: str, values: Mapping[str, Any]) -> Suite:
    """Make a suite of what a TOML file holds.

    Raises:
        ValueError: A key is unknown or missing, a value is of another type, or there is nothing to measure.
    """
    _check_keys("", values, ["description", *PARTS])
    parts: dict[str, Any] = {}
    for key, kind in PARTS.items():
        if key not in values:
            continue
        section = values[key]
        if not isinstance(section, dict):
            raise ValueError(f"{key} must be a table, got {section!r}")
        _check_keys(f"[{key}] ", section, [each.name for each in fields(kind)])
        parts[key] = parse(kind, _defaults(kind, key, section) | section, key)
    if not parts:
        raise ValueError(f"nothing to measure; give one of the tables {', '.join(f'[{part}]' for part in PARTS)}")
    description = parse(str, values.get("description", ""), "description")
    return Suite(name=name, description=description, **parts)


def _check_keys(where: str, values: Mapping[str, Any], valid: list[str]) -> None:
    unknown = [key for key in values if key not in valid]
    if unknown:
        raise ValueError(f"{where}unknown key {unknown[0]!r}; valid: {', '.join(valid)}")


def _defaults(kind: type[Any], key: str, section: Mapping[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for each in fields(kind):
        if each.default is not MISSING:
            defaults[each.name] = each.default
        elif each.default_factory is not MISSING:
            defaults[each.name] = each.default_factory()
        elif each.name not in section:
            raise ValueError(f"[{key}] lacks the key {each.name!r}")
    return defaults
