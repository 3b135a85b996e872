"""The parts of a measurement with their options, and suites of parts in TOML files.

A field of a part is a key of a suite's table. If it is also an option of the command line, the default is the same. The
suites in the folder ``suites`` come with the package.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from .command import KEY, REQUIRED, option
from .errors import UserError
from .files import parse
from .results import RetrievalKind

SUITES = resources.files("dma_eval") / "suites"
DEFAULT_CONTEXT = 2048
"""Tokens per window, or the model's maximum if that is less."""
window, task, piece, prompt = (partial(option, panel=name) for name in ("Windows", "Tasks", "Parts", "Prompts"))
"""Options in a section of the help."""
context_option = partial(
    window,
    None,
    "--context",
    "-c",
    min=2,
    shown="2048, or the model's maximum if that is less",
    help="Tokens per window.",
)
batch_size_option = partial(window, 1, "--batch-size", min=1, help="Windows per forward pass.")
limit_option = partial(task, None, "--limit", min=1, shown="all", help="Use the first samples of each task.")


def sequences_option(default: int | None = 8, shown: str | bool = True) -> Any:
    """How many sequences of a task to read at once."""
    return task(default, "--batch-size", min=1, shown=shown, help="Sequences per forward pass.")


def max_windows_option(default: int | None = None) -> Any:
    """How many windows to read."""
    shown = "all" if default is None else True
    return window(default, "--max-windows", min=1, shown=shown, help="Read at most this many windows.")


@dataclass(frozen=True, kw_only=True)
class PerplexityPart:
    """Perplexity, and divergence from the first backend."""

    # Tokens per window, one section for each; in a suite, those beyond the model's maximum are skipped. By default
    # 2,048, or the model's maximum if that is less.
    contexts: list[int] = field(default_factory=list)
    data: str | None = None  # the text, as for ``dma-hf ppl``; the command line's by default
    stride: int | None = window(
        None,
        "--stride",
        min=1,
        shown="the context",
        help="Distance of two windows. Below the context, windows overlap and each scores only its new tokens.",
    )
    max_windows: int | None = max_windows_option()
    skip_windows: int = window(0, "--skip-windows", min=0, help="Skip the first windows of the text.")
    spread: bool = window(
        False, "--spread", help="Spread --max-windows over the whole text instead of taking the first ones."
    )
    batch_size: int = batch_size_option()


@dataclass(frozen=True, kw_only=True)
class FidelityPart:
    """Fidelity to SDPA in fp32."""

    data: str | None = None  # the text; the command line's by default
    context: int | None = context_option()
    max_windows: int | None = max_windows_option()
    batch_size: int = batch_size_option()
    head_windows: int = piece(2, "--head-windows", min=0, help="Windows for the errors by head; 0 skips them.")
    prompts: int = piece(
        4, "--prompts", min=0, help="Greedy continuations, each of the first half of a window; 0 skips them."
    )
    new_tokens: int = piece(64, "--new-tokens", min=1, help="Tokens of each continuation.")


@dataclass(frozen=True, kw_only=True)
class TasksPart:
    """lm-eval tasks."""

    names: list[str] = task(
        REQUIRED,
        "--tasks",
        "-t",
        metavar="TASK...",
        help="Tasks or groups of lm-eval, or YAML files. Takes several values, separated by commas or spaces.",
    )
    limit: int | None = limit_option()
    num_fewshot: int | None = task(
        None, "--num-fewshot", min=0, shown="what each task says", help="Examples in each prompt."
    )
    batch_size: int = sequences_option()
    lengths: list[int] = task(  # in a suite, those beyond the model's maximum are skipped
        [],
        "--lengths",
        metavar="TOKENS...",
        min=1,
        shown="what each task says",
        help="Tokens per prompt of tasks that make their prompts themselves, such as ruler_vt.",
    )
    chat_template: bool = task(False, "--apply-chat-template", help="Format prompts with the model's chat template.")


@dataclass(frozen=True, kw_only=True)
class RetrievalPart:
    """Retrieval from long prompts."""

    kinds: list[RetrievalKind] = prompt(
        [RetrievalKind.KV],
        "--kind",
        metavar="KIND...",
        help="needle hides a sentence in the text of --data; kv hides a pair among key-value pairs.",
    )
    data: str | None = None  # the prose for needles; the command line's text by default
    lengths: list[int] = prompt(  # in a suite, those beyond the model's maximum are skipped
        [],
        "--lengths",
        metavar="TOKENS...",
        min=1,
        shown="the four largest powers of two from 1024 to the model's maximum",
        help="Tokens per prompt, including the answer.",
    )
    depths: list[float] = prompt(
        [0.0, 0.25, 0.5, 0.75, 1.0],
        "--depths",
        metavar="DEPTH...",
        min=0,
        max=1,
        help="Positions of the answer, from 0 (start of the prompt) to 1 (its end).",
    )
    samples: int = prompt(5, "--samples", min=1, help="Questions for each length and depth.")

    @property
    def needs_text(self) -> bool:
        """Whether needles are measured, which need a text."""
        return RetrievalKind.NEEDLE in self.kinds


@dataclass(frozen=True, kw_only=True)
class StressPart:
    """Perplexity and divergence on twins of the model with larger outlier channels."""

    data: str | None = None  # the text; the command line's by default
    context: int | None = context_option()
    max_windows: int | None = max_windows_option(2)
    batch_size: int = batch_size_option()


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What to measure."""

    name: str  # its name, or the file it was read from
    description: str = ""  # its purpose, in one line
    perplexity: PerplexityPart | None = None  # None if it is not measured; likewise below
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
        """Whether a part needs a text and names none."""
        return any(part.data is None for part in self.readers)


PARTS: Mapping[str, type[Any]] = {
    "perplexity": PerplexityPart,
    "fidelity": FidelityPart,
    "tasks": TasksPart,
    "retrieval": RetrievalPart,
    "stress": StressPart,
}


def suite_names() -> list[str]:
    """Return the names of the suites that come with the package."""
    return sorted(item.name.removesuffix(".toml") for item in SUITES.iterdir() if item.name.endswith(".toml"))


def load_suite(name: str) -> Suite:
    """Read a suite of the package, by name, or a TOML file."""
    is_known = name in suite_names()
    if not is_known and not name.endswith(".toml"):
        raise UserError(f"--suite: unknown suite {name!r}; valid: {', '.join(suite_names())}, or a TOML file")
    try:
        content = (SUITES / f"{name}.toml" if is_known else Path(name)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--suite: cannot read {name}: {getattr(error, 'strerror', None) or error}") from error
    try:
        return parse_suite(name, tomllib.loads(content))
    except ValueError as error:  # TOMLDecodeError is one
        raise UserError(f"--suite: {name}: {error}") from error


def parse_suite(name: str, values: Mapping[str, Any]) -> Suite:
    """Make a suite from the contents of a TOML file. A ``ValueError`` names a wrong key or value."""
    asked = [key for key in PARTS if key in values]
    tables = {"": (values, ["description", *PARTS])}
    tables |= {f"[{key}] ": (values[key], [each.name for each in fields(PARTS[key])]) for key in asked}
    for where, (table, valid) in tables.items():
        unknown = [key for key in table if key not in valid] if isinstance(table, Mapping) else []
        if unknown:
            raise ValueError(f"{where}unknown key {unknown[0]!r}; valid: {', '.join(valid)}")
    if not asked:
        raise ValueError(f"nothing to measure; give one of the tables {', '.join(f'[{part}]' for part in PARTS)}")
    suite = parse(Suite, {**values, "name": name})
    for key, each in ((part, each) for part in asked for each in fields(PARTS[part])):
        declared, value = each.metadata.get(KEY), getattr(getattr(suite, key), each.name)
        if value == [] and (each.default_factory is MISSING or each.default_factory()):
            raise ValueError(f"[{key}] {each.name}: expected at least one value")
        least, most = (getattr(declared, name, None) for name in ("min", "max"))
        for one in value if isinstance(value, list) else [value]:
            if least is not None and one is not None and not least <= one <= (math.inf if most is None else most):
                expected = f"at least {least}" if most is None else f"{least} to {most}"
                raise ValueError(f"[{key}] {each.name}: expected {expected}, got {one}")
    return suite
