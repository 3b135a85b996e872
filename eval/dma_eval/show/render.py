"""The folder of a run: its results, pages, plots and configurations."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from markdown_it import MarkdownIt

from dma_eval.environment import Environment
from dma_eval.errors import UserError, one_line
from dma_eval.files import check_folder, slug
from dma_eval.results import ModelInfo, Origin, Report, backend_configs

from .pages import MISSING, PAGES, Page, Table, code_span, templates

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Plot:
    caption: str  # what it shows
    path: str  # where it is, relative to the page
    section: Any  # its section


def write_run(report: Report, folder: Path) -> list[str]:
    """Write the pages, plots and configurations of ``report`` to ``folder``. Return the names of the files."""
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plots = []
        taken = Counter[str]()
        for figure, stem, caption, section in _drawings(report):
            taken[stem] += 1
            file = f"{stem}.png" if taken[stem] == 1 else f"{stem}-{taken[stem]}.png"
            figure.savefig(folder / file)
            plots.append(Plot(caption, file, section))
        (folder / "report.md").write_text(to_markdown(report, plots), encoding="utf-8")
        (folder / "report.html").write_text(to_html(report, plots, folder), encoding="utf-8")
        configs = []
        for label, config in backend_configs(report).items():
            configs.append(f"configs/{slug(label.removeprefix('dma_mxfp:'))}.toml")
            (folder / "configs").mkdir(exist_ok=True)
            given = {name: value for name, value in config.items() if value is not None}
            (folder / configs[-1]).write_text(tomli_w.dumps(given), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: cannot write to {folder}: {one_line(error)}") from error
    return ["report.md", "report.html", *(plot.path for plot in plots), *configs]


def _drawings(report: Report) -> Iterator[tuple[Figure, str, str, Any]]:
    """Yield each plot, the stem of its file, its caption, and its section."""
    from .plots import plot_positions  # Matplotlib takes half a second to import, and a card needs none

    found: list[Any] = [
        (each, each, f"positions-{each.context}", f"context {each.context:,}") for each in report.perplexity
    ]
    found += [(each, each.tokens, "fidelity", "against SDPA in fp32") for each in report.fidelity]
    for section, tokens, stem, what in found:
        figure = plot_positions(tokens, f"{Path(section.origin.model.name).name}, {what}")
        yield figure, stem, f"Loss and divergence by position, {what}", section


def to_markdown(report: Report, plots: Sequence[Plot] = ()) -> str:
    """Return the report in Markdown, with each plot in its section."""
    return tidy(templates().get_template("report.md").render(_content(report, plots)))


def to_html(report: Report, plots: Sequence[Plot], folder: Path) -> str:
    """Return the report as one self-contained HTML file, with the plots from ``folder`` and sortable tables."""
    page = to_markdown(report, plots)
    body = MarkdownIt("js-default").render(page)  # which escapes HTML
    body = body.replace("<th>", '<th scope="col"><button type="button">').replace("</th>", "</button></th>")
    for plot in plots:
        image = base64.b64encode((folder / plot.path).read_bytes()).decode()
        body = body.replace(f'src="{plot.path}"', f'src="data:image/png;base64,{image}"')
    return templates().get_template("report.html").render(title=page.partition("\n")[0].removeprefix("# "), body=body)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return str(templates().get_template("macros.md").module.table(headers, rows))  # type: ignore[attr-defined]


def tidy(text: str) -> str:
    """Return Markdown with at most one empty line between two others, and none at its ends."""
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _content(report: Report, plots: Sequence[Plot]) -> dict[str, Any]:
    """Return the values that the templates of a report use."""
    pages = section_pages(report)
    sections = [
        (page, [plot for plot in plots if plot.section is section])
        for page, (_, section) in zip(pages, report.sections, strict=True)
    ]
    appendix = []
    configs = backend_configs(report)
    if configs:
        names = dict.fromkeys(name for config in configs.values() for name in config)
        rows = [[code_span(name), *(_plain(config.get(name)) for config in configs.values())] for name in names]
        appendix.append(Table(("field", *configs), rows, "Configurations"))
    origins = distinct_origins(report)
    for index, origin in enumerate(origins, 1):
        appendix.append(_facts(origin, f", {index} of {len(origins)}" if len(origins) > 1 else ""))
    names = dict.fromkeys(Path(each.model.name).name for each in origins)
    return {
        "title": f"Attention backends on {', '.join(names)}",
        "measured": "; ".join(dict.fromkeys(measured(each.model) for each in origins)),
        "sections": sections,
        "appendix": appendix,
    }


def distinct_origins(report: Report) -> list[Origin]:
    """Return how the sections were measured, each way once: by one command with one model on one machine."""
    found: list[Origin] = []
    for origin in [section.origin for _, section in report.sections] or [report.own_origin]:
        if origin not in [replace(each, created=origin.created, request=origin.request) for each in found]:
            found.append(origin)
    return found


def section_pages(report: Report) -> list[Page]:
    """Return the pages of all sections. If several commands measured them, each page says how."""
    pages = [PAGES[name](section) for name, section in report.sections]
    if len(distinct_origins(report)) > 1:
        for page, (_, section) in zip(pages, report.sections, strict=True):
            origin = section.origin
            command = code_span(origin.command)
            page.notes.append(f"Measured {origin.created[:10]} by {command}: {measured(origin.model)}.")
            page.notes.append(f"Machine: {machine(origin.environment)}; {versions(origin.environment)}.")
    return pages


def machine(environment: Environment) -> str:
    return ", ".join([environment.cpu, f"{environment.threads} threads", *environment.gpus])


def measured(model: ModelInfo) -> str:
    """Say which weights were measured, with their dtype and quantization."""
    revision = model.commit or model.revision
    weights = code_span(model.name) + (f" at {code_span(revision)}" if revision else "") + f", weights in {model.dtype}"
    if model.quantization is not None:
        weights += f", quantized to {model.quantization} in the file or checkpoint"
    positions = "" if model.yarn is None else f"; YaRN extends its positions {model.yarn:g} times"
    spread = "" if model.device_map is None else f", with device_map {model.device_map}"
    return f"{weights}{positions}; on {model.device}{spread}"


def versions(environment: Environment) -> str:
    """Return the version of every package, and the commit of the source tree if it is known."""
    packages = [f"{name} {version}" for name, version in environment.packages.items()]
    return ", ".join([*packages, *([f"commit {environment.commit}"] if environment.commit else [])])


def _facts(origin: Origin, which: str) -> Table:
    model, environment = origin.model, origin.environment
    layers, query_heads, kv_heads, head_dim = map(
        _plain, (model.layers, model.query_heads, model.kv_heads, model.head_dim)
    )
    heads = f"{query_heads} query heads, {kv_heads} kv heads, head_dim {head_dim}"
    cuda = f", CUDA {environment.cuda}" if environment.cuda else ""
    rows = {
        "architecture": f"{model.architecture}, {model.parameters:,} parameters, {layers} layers, {heads}",
        "measured": measured(model),
        "machine": machine(environment),
        "versions": versions(environment),
        "Python, system": f"{environment.python}, {environment.system}{cuda}",
        "command": code_span(origin.command),
        "seed, date": f"{origin.seed}, {origin.created}",
    }
    return Table(("", ""), [[name, text] for name, text in rows.items() if text], f"Model and machine{which}")


def _plain(value: object) -> str:
    return MISSING if value is None else str(value).lower() if isinstance(value, bool) else str(value)
