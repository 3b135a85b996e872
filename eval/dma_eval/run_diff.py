"""Two reports side by side: what both measured, and what differs between the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .pages import MISSING, Page, Table, format_bytes, format_kl
from .results import PerplexitySection, Report, backend_configs

Format = Callable[[float], str]


@dataclass(frozen=True)
class Quantity:
    """One number of a report."""

    topic: str  # what was measured: a section, a task
    backend: str  # under which backend
    name: str  # the number's name
    value: float | None  # the number
    shown: Format  # how it is written
    shown_change: Format  # how the change to another such number is written


def compare_reports(first: Report, second: Report) -> Page:
    """Tables of the numbers that both reports have, of those that one has, and of what differs between the runs."""
    one, two = ({(q.topic, q.backend, q.name): q for q in quantities(report)} for report in (first, second))
    rows = []
    for key, quantity in one.items():
        other = two.get(key)
        if other is None:
            continue
        change = MISSING
        if quantity.value is not None and other.value is not None:
            change = quantity.shown_change(other.value - quantity.value)
            if quantity.value == other.value:
                change = "same"
        rows.append([*key, _shown(quantity), _shown(other), change])
    tables = [Table(("measured", "backend", "number", "first", "second", "change"), rows)] if rows else []
    for title, here, there in (("Only in the first", one, two), ("Only in the second", two, one)):
        missing = list(
            dict.fromkeys((topic, backend) for topic, backend, name in here if (topic, backend, name) not in there)
        )
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
            yield Quantity(topic, heads.label, "largest head error", worst, "{:.2%}".format, _points)
    for tasks in report.tasks:
        for task in tasks.tasks:
            for metric in task.metrics:
                shown: tuple[Format, Format] = (_number, "{:+.3g}".format)
                if metric.right_or_wrong:
                    shown = ("{:.2%}".format, _points)
                suffix = "" if metric.filter == "none" else f", {metric.filter}"
                for value in metric.values:
                    yield Quantity(task.name, value.label, f"{metric.name}{suffix}", value.value, *shown)
    for retrieval in report.retrieval:
        for backend in retrieval.backends:
            asked = sum(cell.samples for cell in backend.cells)
            found = sum(cell.correct for cell in backend.cells) / asked if asked else None
            yield Quantity(f"retrieval, {retrieval.kind}", backend.label, "found", found, "{:.1%}".format, _points)
    for stress in report.stress:
        for twin in stress.twins:
            if twin.tokens is not None:
                yield from _perplexity(f"stress, {twin.name}", twin.tokens)


def _perplexity(topic: str, section: PerplexitySection) -> Iterator[Quantity]:
    for result in section.backends:

        def quantity(
            name: str, value: float | None, shown: Format, change: Format, label: str = result.label
        ) -> Quantity:
            return Quantity(topic, label, name, value, shown, change)

        yield quantity("perplexity", result.perplexity, "{:,.3f}".format, "{:+.3f}".format)
        yield quantity("KL / token", result.kl_mean, format_kl, "{:+.1e}".format)
        yield quantity("top-1", result.top1_agreement, "{:.2%}".format, _points)
        yield quantity("tokens/s", result.tokens_per_second, "{:,.0f}".format, "{:+,.0f}".format)
        yield quantity("peak memory", result.peak_memory_bytes, _bytes, lambda value: f"{value / 2**20:+,.0f} MiB")


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


def _shown(quantity: Quantity) -> str:
    return MISSING if quantity.value is None else quantity.shown(quantity.value)


def _points(change: float) -> str:
    return f"{100 * change:+.2f} points"


def _number(value: float) -> str:
    return f"{value:,.4g}"


def _bytes(value: float) -> str:
    return format_bytes(int(value))
