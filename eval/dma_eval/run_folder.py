"""The folder of a run: its results, a page, plots and configurations; several runs put together, or two compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from . import plots
from .errors import UserError, one_line
from .files import make_folder, slug, write_json
from .markdown import Plot, to_markdown
from .pages import MISSING, Page, Table, can_retrieve, format_bytes, format_kl
from .results import RESULTS, SECTIONS, PerplexitySection, Report, StressSection, backend_configs

PAGE, CONFIGS = "report.md", "configs"
Shown = tuple[Callable[[float], str], Callable[[float], str]]
"""How a number is written, and how its change to another."""
SHARE: Shown = ("{:.2%}".format, lambda change: f"{100 * change:+.2f} points")


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
        configs = _configs(report, folder)
    except OSError as error:
        raise UserError(f"--out: cannot write to {folder}: {one_line(error)}") from error
    return [RESULTS, PAGE, *(plot.path for plot in drawn), *configs]


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
        drawn.append(Plot("Quality against speed and memory", "tradeoff.png"))
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
            if heads.skipped is not None:
                yield Quantity(topic, heads.label, "low tiles skipped", fmean(chain(*heads.skipped)), SHARE)
    for task in (task for tasks in report.tasks for task in tasks.tasks):
        for metric in task.metrics:
            shown = SHARE if metric.right_or_wrong else ("{:,.4g}".format, "{:+.3g}".format)
            yield from (Quantity(task.name, value.label, metric.title, value.value, shown) for value in metric.values)
    for retrieval in report.retrieval:
        for backend in retrieval.backends:
            asked = sum(cell.samples for cell in backend.cells)
            found = sum(cell.correct for cell in backend.cells) / asked if asked else None
            yield Quantity(f"retrieval, {retrieval.kind}", backend.label, "found", found, ("{:.1%}".format, SHARE[1]))
    for twin in (twin for stress in report.stress for twin in stress.twins):
        if twin.tokens is not None:
            yield from _perplexity(f"stress, {twin.name}", twin.tokens)


def _perplexity(topic: str, section: PerplexitySection) -> Iterator[Quantity]:
    for result in section.backends:
        numbers: dict[str, tuple[float | None, Shown]] = {
            "perplexity": (result.perplexity, ("{:,.3f}".format, "{:+.3f}".format)),
            "KL / token": (result.kl_mean, (format_kl, "{:+.1e}".format)),
            "top-1": (result.top1_agreement, SHARE),
            "tokens/s": (result.tokens_per_second, ("{:,.0f}".format, "{:+,.0f}".format)),
            "peak memory": (result.peak_memory_bytes, (format_bytes, lambda value: f"{value / 2**20:+,.0f} MiB")),
        }
        yield from (Quantity(topic, result.label, name, *number) for name, number in numbers.items())


def _differences(first: Report, second: Report) -> Iterator[tuple[str, Any, Any]]:
    """Settings, versions and configurations that are not the same in both runs."""
    both: list[dict[str, dict[str, Any]]] = []
    for report in (first, second):
        machine = asdict(report.environment)
        packages = machine.pop("packages")
        groups = {"model": asdict(report.model), "environment": machine, "version": packages}
        both.append({**groups, "": {"seed": report.seed}, **backend_configs(report)})
    for group in (group for group in both[0] if group in both[1]):
        one, two = (groups[group] for groups in both)
        for name in dict.fromkeys([*one, *two]):
            a, b = one.get(name, MISSING), two.get(name, MISSING)
            if a != b:
                yield f"{group}: {name}" if group else name, a, b


def _warnings(first: Report, second: Report) -> Iterator[str]:
    """Why numbers under the same name may not be comparable."""

    def differing(one: Any, two: Any, *names: str) -> bool:
        return any(getattr(one, name) != getattr(two, name) for name in names)

    texts = {section.context: section for section in second.perplexity}
    for section in (section for section in first.perplexity if section.context in texts):
        other = texts[section.context]
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
