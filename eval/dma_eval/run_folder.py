"""The folder of a run: ``results.json``, a page, plots, and the configuration of every backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dma_hf.config import write_toml

from . import plots
from .errors import UserError, one_line
from .files import make_folder, slug
from .markdown import Plot, to_markdown
from .models import LoadedModel
from .pages import FIDELITY_TITLE, RETRIEVAL_TITLES, STRESS_TITLE, TASKS_TITLE, can_retrieve, perplexity_title
from .results import (
    SECTIONS,
    PerplexitySection,
    Report,
    StressSection,
    backend_configs,
    here_and_now,
    read_report,
    write_report,
)

RESULTS, PAGE, CONFIGS = "results.json", "report.md", "configs"


def make_report(loaded: LoadedModel, *, command: str, seed: int, **sections: Any) -> Report:
    """Put a run's sections together with what they depend on: model, versions, device, command line, seed, date."""
    return Report(**here_and_now(), command=command, seed=seed, model=loaded.info, **sections)


def write_run(report: Report, folder: Path) -> list[str]:
    """Write everything there is to show of ``report`` to ``folder``, over what is there.

    Returns:
        The names of the files, relative to ``folder``.

    Raises:
        UserError: A file cannot be written.
    """
    make_folder(folder)
    try:
        write_report(report, folder / RESULTS)
        drawn = _plots(report, folder)
        (folder / PAGE).write_text(to_markdown(report, drawn), encoding="utf-8")
        configs = _configs(report, folder)
    except OSError as error:
        raise UserError(f"--out: cannot write to {folder}: {one_line(error)}") from error
    return [RESULTS, PAGE, *(plot.path for plot in drawn), *configs]


def read_run(path: Path) -> Report:
    """Read the report of a run, given its folder or the file itself.

    Raises:
        UserError: There is none, or it is not as the schema says.
    """
    return read_report(path / RESULTS if path.is_dir() else path)


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
            raise UserError(f"the runs are of different models: {one} and {two}; 'dma-hf report diff' compares such")
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
            pieces = [each.tokens for each in (twins.setdefault(twin.name, twin), twin) if each.tokens is not None]
            tokens = _united(pieces)
            if len(tokens) > 1:  # of other windows
                return list(sections)
            twins[twin.name] = replace(twins[twin.name], tokens=tokens[0] if tokens else None)
        united[same] = replace(section, twins=list(twins.values()))
    return list(united.values())


def _plots(report: Report, folder: Path) -> list[Plot]:
    """Draw every plot that the report has results for."""
    name = Path(report.model.name).name
    drawn: list[Plot] = []

    def draw(
        plot: Callable[[Any, str, Path], None], section: Any, file: str, caption: str, page: str = "", title: str = name
    ) -> None:
        plot(section, title, folder / file)
        drawn.append(Plot(caption, file, page))

    for section in report.perplexity:
        context, end, page = f"context {section.context:,}", f"{section.context}.png", perplexity_title(section)
        title = f"{name}, {context}"
        if len(section.backends) > 1:
            draw(plots.plot_quality, section, f"quality-{end}", f"Quality of each backend at {context}", page, title)
        caption = f"Loss and divergence by position, {context}"
        draw(plots.plot_positions, section, f"positions-{end}", caption, page, title)
    timed = [section for section in report.perplexity if section.backends[0].tokens_per_second is not None]
    if any(len(section.backends) > 1 for section in timed):
        draw(plots.plot_tradeoff, timed, "tradeoff.png", "Quality against speed and memory")
    for tasks in report.tasks:
        if len(tasks.backends) > 1 and any(task.metrics for task in tasks.tasks):
            draw(plots.plot_tasks, tasks, "tasks.png", "Difference of accuracy, with 95 % intervals", TASKS_TITLE)
    for fidelity in report.fidelity:
        caption, title = "Loss and divergence by position, against SDPA in fp32", f"{name}, against SDPA in fp32"
        draw(plots.plot_positions, fidelity.tokens, "fidelity.png", caption, FIDELITY_TITLE, title)
        if fidelity.heads:
            caption = "Error of every head's output, each layer given the inputs that SDPA gives it"
            draw(plots.plot_heads, fidelity, "heads.png", caption, FIDELITY_TITLE)
    for retrieval in filter(can_retrieve, report.retrieval):
        caption, file = f"Retrieval ({retrieval.kind}) by length and depth", f"retrieval-{retrieval.kind}.png"
        draw(plots.plot_retrieval, retrieval, file, caption, RETRIEVAL_TITLES[retrieval.kind])
    for stress in report.stress:
        draw(plots.plot_stress, stress, "stress.png", "Divergence on twins of the model", STRESS_TITLE)
    return drawn


def _configs(report: Report, folder: Path) -> list[str]:
    configs = backend_configs(report)
    if configs:
        (folder / CONFIGS).mkdir(exist_ok=True)
    names = []
    for label, config in configs.items():
        names.append(f"{CONFIGS}/{slug(label.removeprefix('dma_mxfp:'))}.toml")
        write_toml(config, folder / names[-1])
    return names
