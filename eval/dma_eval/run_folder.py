"""The folder of a run: ``results.json``, a page, plots, and the configuration of every backend."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from . import plots
from .errors import UserError, one_line
from .files import make_folder, slug
from .markdown import Plot, to_markdown
from .pages import (
    FIDELITY_TITLE,
    MISSING,
    RETRIEVAL_TITLES,
    STRESS_TITLE,
    TASKS_TITLE,
    Page,
    Table,
    can_retrieve,
    format_bytes,
    format_kl,
    perplexity_title,
)
from .results import (
    SECTIONS,
    PerplexitySection,
    Report,
    StressSection,
    backend_configs,
    read_report,
    write_report,
)

RESULTS, PAGE, CONFIGS = "results.json", "report.md", "configs"
Format = Callable[[float], str]
Shown = tuple[Format, Format]
"""How a number is written, and how its change to another."""


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
    """Write the configuration of every backend as TOML, those of an earlier version too; what is null is left out."""
    names = []
    for label, config in backend_configs(report).items():
        path = folder / CONFIGS / f"{slug(label.removeprefix('dma_mxfp:'))}.toml"
        path.parent.mkdir(exist_ok=True)
        # A string, a number and a truth value of JSON are those of TOML.
        lines = [
            f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in config.items() if value is not None
        ]
        path.write_text("".join(lines), encoding="utf-8")
        names.append(f"{CONFIGS}/{path.name}")
    return names


class Quantity(NamedTuple):
    """One number of a report: what was measured, under which backend, what the number is, and how it is written."""

    topic: str
    backend: str
    name: str
    value: float | None
    shown: Shown


def compare_reports(first: Report, second: Report) -> Page:
    """Tables of the numbers that both reports have, of those that one has, and of what differs between the runs."""
    one, two = ({quantity[:3]: quantity for quantity in quantities(report)} for report in (first, second))
    rows = []
    for key in (key for key in one if key in two):
        (write, write_change), values = one[key].shown, (one[key].value, two[key].value)
        before, after = values
        change = MISSING
        if before is not None and after is not None:
            change = "same" if before == after else write_change(after - before)
        rows.append([*key, *(MISSING if value is None else write(value) for value in values), change])
    tables = [Table(("measured", "backend", "number", "first", "second", "change"), rows)] if rows else []
    for title, here, there in (("Only in the first", one, two), ("Only in the second", two, one)):
        missing = dict.fromkeys(key[:2] for key in here if key not in there)
        if missing:
            tables.append(Table(("measured", "backend"), [list(pair) for pair in missing], title))
    settings = [[name, str(a), str(b)] for name, a, b in _differences(first, second)]
    if settings:
        tables.append(Table(("setting", "first", "second"), settings, "Settings that differ"))
    notes = [] if rows else ["The runs have no number in common."]
    notes += [f"First: {first.created}, `{first.command}`", f"Second: {second.created}, `{second.command}`"]
    return Page("Two runs compared", tables, notes, list(_warnings(first, second)))


def quantities(report: Report) -> Iterator[Quantity]:
    """Every number of a report that is worth comparing, section by section."""
    for section in report.perplexity:
        yield from _perplexity(f"perplexity, {section.context:,}", section)
    for fidelity in report.fidelity:
        topic = f"fidelity, {fidelity.tokens.context:,}"
        yield from _perplexity(topic, fidelity.tokens)
        for heads in fidelity.heads:
            worst = max(max(layer) for layer in heads.relative_l1)
            yield Quantity(topic, heads.label, "largest head error", worst, SHARE)
    for task in (task for tasks in report.tasks for task in tasks.tasks):
        for metric in task.metrics:
            shown = SHARE if metric.right_or_wrong else ("{:,.4g}".format, "{:+.3g}".format)
            yield from (Quantity(task.name, value.label, metric.title, value.value, shown) for value in metric.values)
    for retrieval in report.retrieval:
        for backend in retrieval.backends:
            asked = sum(cell.samples for cell in backend.cells)
            found = sum(cell.correct for cell in backend.cells) / asked if asked else None
            yield Quantity(f"retrieval, {retrieval.kind}", backend.label, "found", found, ("{:.1%}".format, _points))
    for twin in (twin for stress in report.stress for twin in stress.twins if twin.tokens is not None):
        assert twin.tokens is not None
        yield from _perplexity(f"stress, {twin.name}", twin.tokens)


def _perplexity(topic: str, section: PerplexitySection) -> Iterator[Quantity]:
    numbers: dict[str, tuple[str, Shown]] = {
        "perplexity": ("perplexity", ("{:,.3f}".format, "{:+.3f}".format)),
        "KL / token": ("kl_mean", (format_kl, "{:+.1e}".format)),
        "top-1": ("top1_agreement", SHARE),
        "tokens/s": ("tokens_per_second", ("{:,.0f}".format, "{:+,.0f}".format)),
        "peak memory": ("peak_memory_bytes", (format_bytes, lambda value: f"{value / 2**20:+,.0f} MiB")),
    }
    for result in section.backends:
        for name, (field, shown) in numbers.items():
            yield Quantity(topic, result.label, name, getattr(result, field), shown)


def _differences(first: Report, second: Report) -> Iterator[tuple[str, Any, Any]]:
    """Settings, versions and configurations that are not the same in both runs."""
    for group, one, two in (
        ("model", asdict(first.model), asdict(second.model)),
        ("environment", asdict(first.environment) | {"packages": {}}, asdict(second.environment) | {"packages": {}}),
        ("version", first.environment.packages, second.environment.packages),
    ):
        for name in dict.fromkeys([*one, *two]):
            if one.get(name) != two.get(name):
                yield f"{group}: {name}", one.get(name, MISSING), two.get(name, MISSING)
    if first.seed != second.seed:
        yield "seed", first.seed, second.seed
    configs, others = backend_configs(first), backend_configs(second)
    for label in configs.keys() & others.keys():
        for name in dict.fromkeys([*configs[label], *others[label]]):
            a, b = configs[label].get(name, MISSING), others[label].get(name, MISSING)
            if a != b:
                yield f"{label}: {name}", a, b


def _warnings(first: Report, second: Report) -> Iterator[str]:
    """Why numbers under the same name may not be comparable."""

    def differing(one: Any, two: Any, *names: str) -> bool:
        return any(getattr(one, name) != getattr(two, name) for name in names)

    texts = {section.context: section for section in second.perplexity}
    for section in first.perplexity:
        other = texts.get(section.context)
        if other is None:
            continue
        if section.data.sha256 != other.data.sha256:
            yield f"perplexity at {section.context:,}: the texts differ ({section.data.name}, {other.data.name})"
        elif differing(section, other, "stride", "windows", "skip_windows", "spread"):
            yield f"perplexity at {section.context:,}: the windows differ ({section.windows}, {other.windows})"
    samples = {task.name: task for tasks in second.tasks for task in tasks.tasks}
    for tasks in first.tasks:
        for task in tasks.tasks:
            twin = samples.get(task.name)
            if twin is not None and differing(task, twin, "samples", "num_fewshot", "version"):
                yield f"{task.name}: the samples, the examples in the prompt or the task's version differ"


def _points(change: float) -> str:
    return f"{100 * change:+.2f} points"


SHARE: Shown = ("{:.2%}".format, _points)
