"""Parts of the reference pages that are generated from the code: commands, fields and presets."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from types import ModuleType

import dma_eval.bench.results
import dma_eval.cli
import dma_eval.results
import dma_kernels
import kernel_bench.results  # while the hooks extend the path
import typer
from dma_eval.show.render import table
from dma_kernels import Recipe
from typer.cli import get_docs_for_click

import dma_hf
from dma_hf import PRESETS, DMAConfig

FIRST = ("configure", "DMAConfig", "PRESETS", "DMACache", "stats")
"""Names of ``dma_hf`` that most users need; the reference begins with them."""
EXAMPLES = re.compile(r"^Examples:\n((?:  .*\n)+)", re.MULTILINE)
ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)


def _directives(package: ModuleType, *first: str) -> str:
    """Return a directive of mkdocstrings for each public name: the first ones, then the others."""
    paths = []
    for name in dict.fromkeys([*first, *package.__all__]):
        value = getattr(package, name)
        # A module may have the name of a function of the package, so name the function's own module.
        is_definition = inspect.isfunction(value) or inspect.isclass(value)
        paths.append(f"{value.__module__}.{value.__qualname__}" if is_definition else f"{package.__name__}.{name}")
    return "\n".join(f"::: {path}" for path in paths)


def field_table() -> str:
    """Return a row for each field of a configuration, with its default and its description in the docstrings."""
    descriptions = {**_attributes(Recipe), **_attributes(DMAConfig)}
    return table(
        ("field", "default", "meaning"),
        [[f"`{f.name}`", f"`{f.default!r}`", descriptions[f.name]] for f in fields(DMAConfig)],
    )


def preset_table() -> str:
    """Return a row for each field in which presets differ."""
    values = {name: config.to_dict() for name, config in PRESETS.items()}
    rows = [[f"`{f.name}`", *(f"`{each[f.name]!r}`" for each in values.values())] for f in fields(DMAConfig)]
    return table(["field", *(f"`{name}`" for name in values)], [row for row in rows if len(set(row[1:])) > 1])


def command_reference() -> str:
    """Return a section for each command, by the generator of ``typer utils docs``, with examples as code."""
    command = typer.main.get_command(dma_eval.cli.make_app())
    text = get_docs_for_click(obj=command, ctx=command.make_context("dma-hf", ["env"]), name="dma-hf")
    sections = text.partition("\n## ")[2]  # the page has a title of its own
    return EXAMPLES.sub(lambda found: f"```sh\n{textwrap.dedent(found[1])}```\n", f"## {sections}")


def _source(module: ModuleType) -> str:
    """Return the source of every dataclass of a module, in which comments describe the fields."""
    classes = [cls for cls in vars(module).values() if getattr(cls, "__module__", "") == module.__name__]
    source = "\n\n".join(inspect.getsource(cls) for cls in classes if is_dataclass(cls))
    return f"```python\n{source}```"


def _attributes(cls: type) -> dict[str, str]:
    """Return the descriptions in the section "Attributes" of a docstring, each on one line of Markdown."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    return {name: _markdown(" ".join(text.split())) for name, text in ATTRIBUTE.findall(section)}


def _markdown(text: str) -> str:
    """Return text of a docstring with its roles and literals as Markdown."""
    return re.sub(r":\w+:`~?([^`]+)`", lambda match: f"`{match[1].rpartition('.')[2]}`", text).replace("``", "`")


GENERATORS: dict[str, Callable[[], str]] = {
    "plugin": partial(_directives, dma_hf, *FIRST),
    "kernels": partial(_directives, dma_kernels, "attention", "attention_with_lse", "Recipe", "quantize"),
    "fields": field_table,
    "presets": preset_table,
    "commands": command_reference,
    "quality": partial(_source, dma_eval.results),
    "speed": partial(_source, dma_eval.bench.results),
    "kernel_speed": partial(_source, kernel_bench.results),
}
"""By the name in ``<!-- generate: NAME -->``."""
