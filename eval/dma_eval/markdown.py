"""A report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .pages import MISSING, PAGES, Page
from .results import Report, backend_configs


@dataclass(frozen=True)
class Plot:
    """A plot on a page."""

    caption: str  # what it shows
    path: str  # where it is, relative to the page
    section: Any = None  # the section that it belongs to; it comes after all sections by default


def to_markdown(report: Report, plots: Sequence[Plot] = ()) -> str:
    """The report as Markdown, each plot with the section that it belongs to."""
    parts = [f"# Attention backends on {Path(report.model.name).name}\n"]
    for name, section in [*report.sections, ("", None)]:
        parts += [page_to_markdown(PAGES[name](section), heading="##")] if name else []
        parts += [f"![{plot.caption}]({plot.path})\n" for plot in plots if plot.section is section]
    parts += _configurations(report)
    if report.generations:
        parts.append("## Greedy continuations with the KV cache\n")
        parts.append(f"Prompt, its end: {_quote(report.generations[0].prompt_end)}\n")
        for generation in report.generations:
            parts.append(
                f"**{generation.label}**, {generation.same_tokens} of {len(generation.tokens)} tokens as the first:\n\n"
                f"{_quote(generation.continuation)}\n"
            )
    parts.append("## Model and machine\n")
    parts.append(table(("", ""), _facts(report)))
    return "\n".join(parts)


def page_to_markdown(page: Page, heading: str = "#") -> str:
    """One section, or the comparison of two runs, as Markdown."""
    parts = [f"{heading} {page.title}\n"]
    for each in page.tables:
        parts += [f"{each.caption}:\n"] if each.caption else []
        parts.append(table(each.headers, each.rows))
    parts += [f"> **Warning**: {line}\n" for line in page.warnings]
    parts.append("\n".join(f"- {line}" for line in page.notes) + "\n")
    return "\n".join(parts)


def _configurations(report: Report) -> list[str]:
    shown = backend_configs(report)
    if not shown:
        return []
    names = list(dict.fromkeys(name for config in shown.values() for name in config))
    rows = [[f"`{name}`", *(_plain(config.get(name)) for config in shown.values())] for name in names]
    return ["## Configurations\n", table(["field", *shown], rows)]


def _facts(report: Report) -> list[list[str]]:
    model, machine = report.model, report.environment
    heads = f"{model.query_heads} query heads, {model.kv_heads} kv heads, head_dim {model.head_dim}"
    revision = f" at `{model.commit or model.revision}`" if model.commit or model.revision else ""
    return [
        ["model", f"`{model.name}`{revision}"],
        ["architecture", f"{model.architecture}, {model.parameters:,} parameters, {model.layers} layers, {heads}"],
        ["dtype, device", f"{model.form}, {model.device}"],
        ["machine", ", ".join([machine.cpu, f"{machine.threads} threads", *machine.gpus])],
        ["versions", ", ".join(f"{name} {version}" for name, version in machine.packages.items())],
        ["Python, system", f"{machine.python}, {machine.system}"],
        ["command", f"`{report.command}`"],
        ["seed, date", f"{report.seed}, {report.created}"],
        *(
            [["seconds", ", ".join(f"{name} {value:,.1f}" for name, value in report.part_seconds.items())]]
            if report.part_seconds
            else []
        ),
    ]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.strip().splitlines())


def _plain(value: object) -> str:
    return MISSING if value is None else str(value).lower() if isinstance(value, bool) else str(value)
