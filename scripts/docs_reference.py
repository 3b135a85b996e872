"""Parts of the reference pages that are generated from the code: commands, fields and presets."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import ModuleType
from typing import Any, get_type_hints

import dma_eval.cli
import dma_kernels
import typer
from dma_kernels import Recipe

import dma_hf
from dma_hf import PRESETS, DMAConfig

FIRST = ("configure", "DMAConfig", "PRESETS", "DMACache", "stats", "equalize", "continuous_batching", "counted_tiles")
"""Names of ``dma_hf`` that most users need; the reference begins with them."""
ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)


def plugin_api() -> str:
    """Return a directive of mkdocstrings for each public name of ``dma_hf``."""
    return _directives(dma_hf, FIRST)


def kernels_api() -> str:
    """Return a directive of mkdocstrings for each public name of ``dma_kernels``."""
    return _directives(dma_kernels, ("attention", "attention_with_lse", "Recipe", "quantize"))


def _directives(package: ModuleType, first: tuple[str, ...]) -> str:
    """Return a directive for each public name: the first ones, then the others."""
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
    """Return a section for each command: its help, and a table of its options for each panel."""
    return "\n\n".join(_sections(typer.main.get_command(dma_eval.cli.make_app()), "dma-hf"))


def _sections(command: Any, name: str) -> Iterator[str]:
    """Yield the section of a command, or of each command of a group."""
    for last, each in getattr(command, "commands", {}).items():
        yield from _sections(each, f"{name} {last}")
    if hasattr(command, "commands"):
        return
    text, _, examples = inspect.cleandoc(command.help or "").partition("Examples:")
    parts = [f"## {name}", _markdown(text.strip())]
    if examples.strip():
        parts.append(f"```sh\n{inspect.cleandoc(examples.strip())}\n```")
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(_option(parameter))
    for panel, rows in panels.items():
        parts.append("\n".join([f"**{panel}**", "", "| option | default | meaning |", "|---|---|---|", *rows]))
    yield "\n\n".join(parts)


def _option(parameter: Any) -> str:
    """Return the row of an option or argument."""
    if parameter.param_type_name == "argument":
        names = parameter.metavar or parameter.name.upper()
    else:
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    shown, default = parameter.show_default, parameter.default
    if isinstance(shown, str):
        default = shown
    elif parameter.required:
        default = "required"
    elif default is None or default is False or callable(default):
        default = ""
    elif isinstance(default, (list, tuple)):
        default = " ".join(map(str, default))
    return f"| `{names}` | {default} | {_markdown(' '.join((parameter.help or '').split()))} |"


def suite_keys() -> str:
    """Return a table of keys for each part of a suite."""
    return _class_tables("dma_eval.parts")


def quality_fields() -> str:
    """Return a table of fields for each class of a report on quality."""
    return _class_tables("dma_eval.results")


def speed_fields() -> str:
    """Return a table of fields for each class of a report on speed."""
    return _class_tables("dma_eval.bench.results")


def _class_tables(module: str) -> str:
    """Return a section for each public class of a module, with its fields and the comments that describe them."""
    loaded = importlib.import_module(module)
    source = inspect.getsource(loaded)
    lines = source.splitlines()
    parts = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        rows = []
        hints = get_type_hints(getattr(loaded, node.name), include_extras=True)
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                helps = (getattr(option, "help", None) for option in getattr(hints[each.target.id], "__metadata__", ()))
                default = "required" if each.value is None else f"`{_default(each.value)}`"
                comment = _markdown(next(filter(None, helps), None) or _comment(lines, each))
                rows.append(f"| `{each.target.id}` | {default} | {comment} |")
        if rows:
            head = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
            table = ["| field | default | meaning |", "|---|---|---|", *rows]
            parts.append("\n".join([f"### {node.name}", "", _markdown(head), "", *table]))
    return "\n\n".join(parts)


def _default(node: ast.expr) -> str:
    """Return the source of a default; of ``field(default_factory=...)`` what the factory makes."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "field":
        factory = next((each.value for each in node.keywords if each.arg == "default_factory"), None)
        if factory is not None:
            return {"list": "[]", "dict": "{}"}.get(ast.unparse(factory), ast.unparse(factory).removeprefix("lambda: "))
    return ast.unparse(node)


def _comment(lines: list[str], node: ast.AnnAssign) -> str:
    """Return the comment at the end of a field, or else the comment lines above it."""
    end = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :]
    if end.strip().startswith("#"):
        return end.strip("# ")
    above: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.strip().startswith("#"):
            break
        above.insert(0, line.strip("# "))
    return " ".join(above)


def _attributes(cls: type) -> dict[str, str]:
    """Return the descriptions in the section "Attributes" of a docstring, each on one line of Markdown."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = {name: " ".join(text.split()) for name, text in ATTRIBUTE.findall(section)}
    return {name: _markdown(text) for name, text in found.items()}


def _markdown(text: str) -> str:
    """Return text of a docstring with its roles and literals as Markdown, safe in a table."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda match: f"`{match[1].rpartition('.')[2]}`", text)
    return text.replace("``", "`").replace("|", r"\|")


GENERATORS: dict[str, Callable[[], str]] = {
    "plugin": plugin_api,
    "kernels": kernels_api,
    "fields": field_table,
    "presets": preset_table,
    "commands": command_reference,
    "suites": suite_keys,
    "quality": quality_fields,
    "speed": speed_fields,
}
"""By the name in ``<!-- generate: NAME -->``."""
