"""Parts of the reference pages that are generated from the code: commands, fields and presets."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields

import dma_eval.cli
from dma_kernels import Recipe

from dma_hf import PRESETS, DMAConfig

ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)


def field_table() -> str:
    """Return a row for each field of a configuration, with its default and its description in the docstrings."""
    descriptions = {**_attributes(Recipe), **_attributes(DMAConfig)}
    rows = [f"| `{f.name}` | `{f.default!r}` | {descriptions[f.name]} |" for f in fields(DMAConfig)]
    return "\n".join(["| field | default | meaning |", "|---|---|---|", *rows])


def preset_table() -> str:
    """Return a row for each field in which presets differ."""
    values = {name: config.to_dict() for name, config in PRESETS.items()}
    names = [field.name for field in fields(DMAConfig) if len({repr(v[field.name]) for v in values.values()}) > 1]
    header = ["| field | " + " | ".join(f"`{name}`" for name in values) + " |", "|---" * (len(values) + 1) + "|"]
    rows = [f"| `{name}` | " + " | ".join(f"`{v[name]!r}`" for v in values.values()) + " |" for name in names]
    return "\n".join([*header, *rows])


def command_reference() -> str:
    """Return a section for each command with what its ``--help`` prints."""
    parts = [f"## {name}\n\n```text\n{text.strip()}\n```" for name, text in _helps()]
    return "\n\n".join(parts)


def _attributes(cls: type) -> dict[str, str]:
    """Return the descriptions in the section "Attributes" of a docstring, each on one line of Markdown."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = {name: " ".join(text.split()) for name, text in ATTRIBUTE.findall(section)}
    return {name: _markdown(text) for name, text in found.items()}


def _markdown(text: str) -> str:
    """Return text of a docstring with its roles and literals as Markdown, safe in a table."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda match: f"`{match[1].rpartition('.')[2]}`", text)
    return text.replace("``", "`").replace("|", r"\|")


def _helps() -> Iterator[tuple[str, str]]:
    """Yield the name and the help of every command."""
    yield from _argparse_helps(dma_eval.cli.make_parser(), "dma-hf")


def _argparse_helps(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, str]]:
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield name, parser.format_help()
    for group in groups:
        for last, command in group.choices.items():
            yield from _argparse_helps(command, f"{name} {last}")


GENERATORS: dict[str, Callable[[], str]] = {
    "fields": field_table,
    "presets": preset_table,
    "commands": command_reference,
}
"""By the name in ``<!-- generate: NAME -->``."""
