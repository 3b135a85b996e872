"""What can be measured, with the options of each part; and suites of parts, as TOML files.

The command line takes an option for each field of a part, with the same default; the tables of a suite have the fields
as keys. Suites in the folder ``suites`` come with the package.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from .errors import UserError
from .files import parse

FOLDER = "suites"


@dataclass(frozen=True, kw_only=True)
class PerplexityPart:
    """Perplexity, and divergence from the first backend."""

    # Tokens per window, one section for each; in a suite, those beyond the model's maximum are skipped. By default
    # 2,048, or the model's maximum if that is less.
    contexts: list[int] = field(default_factory=list)
    data: str | None = None  # the text, as for ``dma-hf ppl``; the command line's by default
    # Distance of two windows; the context by default. If less, windows overlap, and each scores its new tokens.
    stride: int | None = None
    max_windows: int | None = None  # read at most so many windows; all by default
    skip_windows: int = 0  # leave out so many windows at the beginning of the text
    spread: bool = False  # spread ``max_windows`` over the whole text instead of taking the first ones
    batch_size: int = 1  # windows per forward pass


@dataclass(frozen=True, kw_only=True)
class FidelityPart:
    """Fidelity to SDPA in fp32."""

    data: str | None = None  # the text; the command line's by default
    context: int | None = None  # tokens per window; 2,048 by default, or the model's maximum if that is less
    max_windows: int | None = None  # read at most so many windows; all by default
    batch_size: int = 1  # windows per forward pass
    head_windows: int = 2  # windows for the errors by head; 0 leaves them out
    prompts: int = 4  # greedy continuations, each of the first half of a window; 0 leaves them out
    new_tokens: int = 64  # tokens of each


@dataclass(frozen=True, kw_only=True)
class TasksPart:
    """lm-eval tasks."""

    names: list[str]  # tasks, groups or tags of lm-eval, or YAML files; several may stand in one string, with commas
    limit: int | None = None  # samples per task; all by default
    num_fewshot: int | None = None  # examples in each prompt; what each task says by default
    batch_size: int = 8  # sequences per forward pass
    chat_template: bool = False  # whether prompts go through the model's chat template


@dataclass(frozen=True, kw_only=True)
class RetrievalPart:
    """Retrieval from long prompts."""

    # ``needle`` (a sentence in prose), ``kv`` (one pair among pairs of keys and values) or both.
    kinds: list[str] = field(default_factory=lambda: ["kv"])
    data: str | None = None  # the prose for needles; the command line's text by default
    # Tokens per prompt, the answer counted; in a suite, those beyond the model's maximum are skipped. By default 1,024
    # and its doubles up to the model's maximum, four at most.
    lengths: list[int] = field(default_factory=list)
    # Places of the answer, from 0 (the prompt's begin) to 1 (its end).
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    samples: int = 5  # questions for each length and depth

    @property
    def needs_text(self) -> bool:
        """Whether there are needles to be hidden in prose."""
        return "needle" in self.kinds


@dataclass(frozen=True, kw_only=True)
class StressPart:
    """Perplexity and divergence on twins of the model whose keys, queries or values are harder to quantise."""

    data: str | None = None  # the text; the command line's by default
    context: int | None = None  # tokens per window; 2,048 by default, or the model's maximum if that is less
    max_windows: int | None = 2  # read at most so many windows for each twin
    batch_size: int = 1  # windows per forward pass


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What to measure."""

    name: str  # its name, or the file that it was read from
    description: str = ""  # what it is for, in a line
    perplexity: PerplexityPart | None = None  # if it is asked for; so are the others
    fidelity: FidelityPart | None = None
    tasks: TasksPart | None = None
    retrieval: RetrievalPart | None = None
    stress: StressPart | None = None

    @property
    def readers(self) -> list[Any]:
        """The parts that read a text."""
        retrieval = self.retrieval if self.retrieval is not None and self.retrieval.needs_text else None
        return [part for part in (self.perplexity, self.fidelity, retrieval, self.stress) if part is not None]

    @property
    def needs_text(self) -> bool:
        """Whether one of them has no text of its own."""
        return any(part.data is None for part in self.readers)


PARTS: Mapping[str, type[Any]] = {
    "perplexity": PerplexityPart,
    "fidelity": FidelityPart,
    "tasks": TasksPart,
    "retrieval": RetrievalPart,
    "stress": StressPart,
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
    tables = {"": (values, ["description", *PARTS])}
    tables |= {
        f"[{key}] ": (values[key], [each.name for each in fields(PARTS[key])]) for key in PARTS.keys() & values.keys()
    }
    for where, (table, valid) in tables.items():
        unknown = [key for key in table if key not in valid] if isinstance(table, Mapping) else []
        if unknown:
            raise ValueError(f"{where}unknown key {unknown[0]!r}; valid: {', '.join(valid)}")
    if not PARTS.keys() & values.keys():
        raise ValueError(f"nothing to measure; give one of the tables {', '.join(f'[{part}]' for part in PARTS)}")
    return parse(Suite, {**values, "name": name})
