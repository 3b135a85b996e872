"""The folder of a run: its results, pages, plots and configurations; and several runs put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from . import plots
from .errors import UserError, one_line
from .files import make_folder, slug, write_json
from .pages import can_retrieve
from .render import Plot, to_html, to_markdown
from .results import RESULTS, Report, backend_configs

PAGE, HTML, CONFIGS = "report.md", "report.html", "configs"


def write_run(report: Report, folder: Path) -> list[str]:
    """Write everything there is to show of ``report`` to ``folder``, over what is there.

    Returns:
        The names of the files, relative to ``folder``.

    Raises:
        UserError: A file cannot be written.
    """
    make_folder(folder)
    try:
        write_json(report, folder / RESULTS)
        drawn = _plots(report, folder)
        (folder / PAGE).write_text(to_markdown(report, drawn), encoding="utf-8")
        (folder / HTML).write_text(to_html(report, drawn, folder), encoding="utf-8")
        configs = _configs(report, folder)
    except OSError as error:
        raise UserError(f"--out: cannot write to {folder}: {one_line(error)}") from error
    return [RESULTS, PAGE, HTML, *(plot.path for plot in drawn), *configs]


def _plots(report: Report, folder: Path) -> list[Plot]:
    name = Path(report.model.name).name
    drawn: list[Plot] = []
    taken = Counter[str]()

    def draw(
        plot: Callable[[Any, str, Path], None], stem: str, caption: str, of: Any, title: str = name, within: Any = None
    ) -> None:
        taken[stem] += 1
        file = f"{stem}.png" if taken[stem] == 1 else f"{stem}-{taken[stem]}.png"
        plot(of, title, folder / file)
        drawn.append(Plot(caption, file, of if within is None else within))

    for section in report.perplexity:
        context, title = f"context {section.context:,}", f"{name}, context {section.context:,}"
        if len(section.backends) > 1:
            caption = f"Quality of each backend at {context}"
            draw(plots.plot_quality, f"quality-{section.context}", caption, section, title)
        caption = f"Loss and divergence by position, {context}"
        draw(plots.plot_positions, f"positions-{section.context}", caption, section, title)
    timed = [section for section in report.perplexity if section.backends[0].tokens_per_second is not None]
    if any(len(section.backends) > 1 for section in timed):
        plots.plot_tradeoff(timed, name, folder / "tradeoff.png")
        drawn.append(Plot("Quality against speed", "tradeoff.png"))
    for tasks in report.tasks:
        if len(tasks.backends) > 1 and any(task.metrics for task in tasks.tasks):
            draw(plots.plot_tasks, "tasks", "Difference of accuracy, with 95 % intervals", tasks)
    for fidelity in report.fidelity:
        caption, title = "Loss and divergence by position, against SDPA in fp32", f"{name}, against SDPA in fp32"
        draw(plots.plot_positions, "fidelity", caption, fidelity.tokens, title, within=fidelity)
        if fidelity.heads:
            caption = "Error of every head's output, each layer given the inputs that SDPA gives it"
            draw(plots.plot_heads, "heads", caption, fidelity)
        if any(heads.skipped is not None for heads in fidelity.heads):
            draw(plots.plot_skipped, "skipped", "Share of low tiles that every head skips", fidelity)
    for retrieval in filter(can_retrieve, report.retrieval):
        caption = f"Retrieval ({retrieval.kind}) by length and depth"
        draw(plots.plot_retrieval, f"retrieval-{retrieval.kind}", caption, retrieval)
    for stress in report.stress:
        draw(plots.plot_stress, "stress", "Divergence on twins of the model", stress)
        if stress.thresholds:
            draw(plots.plot_thresholds, "thresholds", "Divergence against the share of low tiles skipped", stress)
    return drawn


def _configs(report: Report, folder: Path) -> list[str]:
    """Write the configuration of every backend as TOML, those of an earlier version too; what is null is left out."""
    names = []
    for label, config in backend_configs(report).items():
        path = folder / CONFIGS / f"{slug(label.removeprefix('dma_mxfp:'))}.toml"
        path.parent.mkdir(exist_ok=True)
        given = {name: value for name, value in config.items() if value is not None}
        path.write_text(tomli_w.dumps(given), encoding="utf-8")
        names.append(f"{CONFIGS}/{path.name}")
    return names
