"""Two reports side by side: what both measured, and what differs between the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from .pages import MISSING, Page, Table, format_bytes, format_kl
from .results import PerplexitySection, Report, backend_configs

Format = Callable[[float], str]
Shown = tuple[Format, Format]
"""How a number is written, and how its change to another."""


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
