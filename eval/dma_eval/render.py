"""Reports as Markdown, as one HTML file and as model cards, from the templates of the package."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from .environment import Environment
from .names import reads_cache
from .pages import MISSING, PAGES, Page, Table
from .results import ModelInfo, Report, backend_configs, backend_groups


@dataclass(frozen=True)
class Plot:
    """A plot on a page."""

    caption: str  # what it shows
    path: str  # where it is, relative to the page
    section: Any = None  # the section that it belongs to; it comes after all sections by default


@cache
def templates(*, html: bool = False) -> jinja2.Environment:
    """The templates of the package: of Markdown, or of HTML, where all text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dma_eval"),
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|")
    environment.filters["quote"] = lambda text: "\n".join(f"> {line}".rstrip() for line in text.strip().splitlines())
    environment.filters["code"] = lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
    return environment


def to_markdown(report: Report, plots: Sequence[Plot] = ()) -> str:
    """The report as Markdown, each plot with the section that it belongs to."""
    return tidy(templates().get_template("report.md").render(content(report, plots)))


def to_html(report: Report, plots: Sequence[Plot], folder: Path) -> str:
    """The report as one HTML file that needs no other: the plots, from ``folder``, are in it, and tables sort."""
    images = {
        plot.path: f"data:image/png;base64,{base64.b64encode((folder / plot.path).read_bytes()).decode()}"
        for plot in plots
    }
    return templates(html=True).get_template("report.html").render(content(report, plots), images=images)


def content(report: Report, plots: Sequence[Plot] = ()) -> dict[str, Any]:
    """What the templates of a report show."""
    sections = [
        (PAGES[name](section), [plot for plot in plots if plot.section is section]) for name, section in report.sections
    ]
    return {
        "title": f"Attention backends on {Path(report.model.name).name}",
        "measured": measured(report.model),
        "sections": sections,
        "plots": [plot for plot in plots if plot.section is None],
        "generations": report.generations,
        "appendix": [*_backends(report), *_configurations(report), _facts(report)],
    }


def page_to_markdown(page: Page, heading: str = "#") -> str:
    """One section as Markdown."""
    return tidy(templates().get_template("macros.md").module.section(page, heading))  # type: ignore[attr-defined]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return str(templates().get_template("macros.md").module.table(headers, rows))  # type: ignore[attr-defined]


def tidy(text: str) -> str:
    """Markdown with one empty line at most between two others, and none at its ends."""
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def measured(model: ModelInfo) -> str:
    """Say which weights were measured, and in which form."""
    revision = f" at `{model.commit or model.revision}`" if model.commit or model.revision else ""
    weights = f"`{model.name}`{revision}, weights in {model.dtype}"
    if model.quantization is not None:
        weights += f", quantised to {model.quantization} in the file or checkpoint"
    positions = "" if model.yarn is None else f"; {model.yarn:g} times its positions by YaRN"
    return f"Measured: {weights}{positions}; on {model.device}."


def cache_of(label: str, config: dict[str, Any] | None) -> str:
    """Which cache a backend read every sequence through."""
    if config is not None and config.get("cache"):
        return f"DMACache, {config['cache']}"
    return f"QuantizedCache of Transformers, {label.rpartition('+')[2]}" if reads_cache(label) else "none"


def versions(machine: Environment) -> str:
    """The version of every package, and the commit of the source tree where it is known."""
    packages = [f"{name} {version}" for name, version in machine.packages.items()]
    return ", ".join([*packages, *([f"commit {machine.commit}"] if machine.commit else [])])


def _backends(report: Report) -> list[Table]:
    every = {each.label: each for group in backend_groups(report) for each in group}
    rows = [[f"`{each.label}`", each.implementation, cache_of(each.label, each.config)] for each in every.values()]
    headers = ("backend", "attention", "cache that it read through")
    return [Table(headers, rows, "Backends")] if rows else []


def _configurations(report: Report) -> list[Table]:
    shown = backend_configs(report)
    names = list(dict.fromkeys(name for config in shown.values() for name in config))
    rows = [[f"`{name}`", *(_plain(config.get(name)) for config in shown.values())] for name in names]
    return [Table(("field", *shown), rows, "Configurations")] if shown else []


def _facts(report: Report) -> Table:
    model, machine = report.model, report.environment
    heads = f"{model.query_heads} query heads, {model.kv_heads} kv heads, head_dim {model.head_dim}"
    revision = f" at `{model.commit or model.revision}`" if model.commit or model.revision else ""
    seconds = ", ".join(f"{name} {value:,.1f}" for name, value in report.part_seconds.items())
    rows = {
        "model": f"`{model.name}`{revision}",
        "architecture": f"{model.architecture}, {model.parameters:,} parameters, {model.layers} layers, {heads}",
        "weights, device": f"{model.form}, {model.device}",
        "machine": ", ".join([machine.cpu, f"{machine.threads} threads", *machine.gpus]),
        "versions": versions(machine),
        "Python, system": f"{machine.python}, {machine.system}" + (f", CUDA {machine.cuda}" if machine.cuda else ""),
        "command": f"`{report.command}`",
        "seed, date": f"{report.seed}, {report.created}",
        "seconds": seconds,
    }
    return Table(("", ""), [[name, text] for name, text in rows.items() if text], "Model and machine")


def _plain(value: object) -> str:
    return MISSING if value is None else str(value).lower() if isinstance(value, bool) else str(value)
