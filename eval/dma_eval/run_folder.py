"""The folder of a run: its results, pages, plots and configurations; and several runs put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from . import plots
from .errors import UserError, one_line
from .files import make_folder, slug, write_json
from .pages import can_retrieve
from .render import Plot, to_html, to_markdown
from .results import RESULTS, SECTIONS, PerplexitySection, Report, StressSection, backend_configs

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


def merge(reports: Sequence[Report]) -> Report:
    """Put the sections of several runs of one model together; the rest is the first run's.

    Sections on perplexity of the same windows with the same reference become one, with the backends of all; so do those
    of stress, twin by twin. A run can then be measured in pieces, or a backend come later.

    Raises:
        UserError: The runs are of different models, or of one model in different dtypes.
    """
    first = reports[0]
    for other in reports[1:]:
        one, two = (f"{each.name} in {each.form}" for each in (first.model, other.model))
        if one != two:
            raise UserError(f"the runs are of different models: {one} and {two}; give each a folder of its own")
    seconds = sum((Counter(report.part_seconds) for report in reports), Counter[str]())
    sections: dict[str, Any] = {
        name: [each for report in reports for each in getattr(report, name)] for name in (*SECTIONS, "generations")
    }
    sections["perplexity"] = _united(sections["perplexity"])
    sections["stress"] = _united_twins(sections["stress"])
    return replace(
        first,
        command=" && ".join(dict.fromkeys(report.command for report in reports)),
        part_seconds=dict(seconds),
        **sections,
    )


def _united(sections: Sequence[PerplexitySection]) -> list[PerplexitySection]:
    """One section for each set of windows and reference that gives the very same losses."""
    united: dict[str, PerplexitySection] = {}
    for section in sections:
        reference = section.backends[0]
        same = repr((replace(section, backends=[]), reference.label, reference.nll, reference.config))
        known = united.setdefault(same, section)
        labels = {backend.label for backend in known.backends}
        added = [backend for backend in section.backends if backend.label not in labels]
        united[same] = replace(known, backends=[*known.backends, *added])
    return list(united.values())


def _united_twins(sections: Sequence[StressSection]) -> list[StressSection]:
    """One section for each set of ranges, its twins those of all, in order."""
    united: dict[str, StressSection] = {}
    for section in sections:
        same = repr((section.range_tokens, section.key_ranges))
        twins = {twin.name: twin for twin in united.get(same, section).twins}
        for twin in section.twins:
            known = twins.setdefault(twin.name, twin)
            tokens = _united([each.tokens for each in (known, twin) if each.tokens is not None])
            if len(tokens) > 1 or known.key_ratio != twin.key_ratio:  # of other windows, or drawn with another seed
                return list(sections)
            twins[twin.name] = replace(twins[twin.name], tokens=tokens[0] if tokens else None)
        thresholds = {study.label: study for each in (united.get(same, section), section) for study in each.thresholds}
        united[same] = replace(section, twins=list(twins.values()), thresholds=list(thresholds.values()))
    return list(united.values())


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
