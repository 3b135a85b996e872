"""The folder of a run: ``results.json``, a page, plots, and the configuration of every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dma_hf import DMAConfig

from . import section_plots
from .errors import UserError, one_line
from .markdown import Plot, perplexity_title, to_markdown
from .plots import plot_positions, plot_quality
from .report import backend_configs
from .results import Report, read_report, write_report
from .section_pages import FIDELITY_TITLE, RETRIEVAL_TITLES, TASKS_TITLE
from .task_records import slug

RESULTS, PAGE, CONFIGS = "results.json", "report.md", "configs"


def make_folder(folder: Path) -> None:
    """Make the folder of a run, before the run.

    Raises:
        UserError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot make the folder {folder}: {error.strerror}") from error


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
        plots = _plots(report, folder)
        (folder / PAGE).write_text(to_markdown(report, plots), encoding="utf-8")
        configs = _configs(report, folder)
    except OSError as error:
        raise UserError(f"--out: cannot write to {folder}: {one_line(error)}") from error
    return [RESULTS, PAGE, *(plot.path for plot in plots), *configs]


def read_run(path: Path) -> Report:
    """Read the report of a run, given its folder or the file itself.

    Raises:
        UserError: There is none, or it is not as the schema says.
    """
    return read_report(path / RESULTS if path.is_dir() else path)


def merge(reports: Sequence[Report]) -> Report:
    """Put the sections of several runs of one model together; the rest is the first run's.

    Raises:
        UserError: The runs are of different models, or of one model in different dtypes.
    """
    first = reports[0]
    for other in reports[1:]:
        if (other.model.name, other.model.dtype) != (first.model.name, first.model.dtype):
            raise UserError(
                f"the runs are of different models: {first.model.name} in {first.model.dtype} and "
                f"{other.model.name} in {other.model.dtype}; 'dma-hf report diff' compares such"
            )
    seconds: dict[str, float] = {}
    for report in reports:
        for name, value in report.part_seconds.items():
            seconds[name] = seconds.get(name, 0.0) + value
    return replace(
        first,
        command=" && ".join(dict.fromkeys(report.command for report in reports)),
        perplexity=[section for report in reports for section in report.perplexity],
        generations=[generation for report in reports for generation in report.generations],
        tasks=[section for report in reports for section in report.tasks],
        fidelity=[section for report in reports for section in report.fidelity],
        retrieval=[section for report in reports for section in report.retrieval],
        part_seconds=seconds,
    )


def _plots(report: Report, folder: Path) -> list[Plot]:
    """Draw every plot that the report has results for."""
    name = Path(report.model.name).name
    drawn: list[Plot] = []

    def draw(caption: str, file: str, plot: Callable[[Path], None], title: str = "") -> None:
        plot(folder / file)
        drawn.append(Plot(caption, file, title))

    for section in report.perplexity:
        title, end = f"{name}, context {section.context:,}", f"{section.context}.png"
        if len(section.backends) > 1:
            draw(
                f"Quality of each backend at context {section.context:,}",
                f"quality-{end}",
                lambda path, s=section, t=title: plot_quality(s, t, path),  # type: ignore[misc]
                perplexity_title(section),
            )
        draw(
            f"Loss and divergence by position, context {section.context:,}",
            f"positions-{end}",
            lambda path, s=section, t=title: plot_positions(s, t, path),  # type: ignore[misc]
            perplexity_title(section),
        )
    if any(len(section.backends) > 1 for section in report.perplexity):
        draw(
            "Quality against speed and memory",
            "tradeoff.png",
            lambda path: section_plots.plot_tradeoff(report.perplexity, name, path),
        )
    for tasks in report.tasks:
        if len(tasks.backends) > 1 and any(value for task in tasks.tasks for value in task.metrics):
            draw(
                "Difference of accuracy, with 95 % intervals",
                "tasks.png",
                lambda path, s=tasks: section_plots.plot_tasks(s, name, path),  # type: ignore[misc]
                TASKS_TITLE,
            )
    for fidelity in report.fidelity:
        draw(
            "Loss and divergence by position, against SDPA in fp32",
            "fidelity.png",
            lambda path, s=fidelity: plot_positions(s.tokens, f"{name}, against SDPA in fp32", path),  # type: ignore[misc]
            FIDELITY_TITLE,
        )
        if fidelity.heads:
            draw(
                "Error of every head's output, each layer given the inputs that SDPA gives it",
                "heads.png",
                lambda path, s=fidelity: section_plots.plot_heads(s, name, path),  # type: ignore[misc]
                FIDELITY_TITLE,
            )
    for retrieval in report.retrieval:
        draw(
            f"Retrieval ({retrieval.kind}) by length and depth",
            f"retrieval-{retrieval.kind}.png",
            lambda path, s=retrieval: section_plots.plot_retrieval(s, name, path),  # type: ignore[misc]
            RETRIEVAL_TITLES[retrieval.kind],
        )
    return drawn


def _configs(report: Report, folder: Path) -> list[str]:
    configs = backend_configs(report)
    if configs:
        (folder / CONFIGS).mkdir(exist_ok=True)
    names = []
    for label, config in configs.items():
        names.append(f"{CONFIGS}/{slug(label.removeprefix('dma_mxfp:'))}.toml")
        DMAConfig.from_dict(config).to_toml(folder / names[-1])
    return names
