"""Sections of results as tables and notes, the same for the screen, for Markdown and for HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jinja2
import numpy as np

from dma_eval.names import FORMAT_SUFFIXES, SIMULATED, TILE, cache_suffix
from dma_eval.results import (
    FidelitySection,
    HeadErrors,
    MetricResult,
    MetricValue,
    PerplexitySection,
    StressSection,
    TaskSection,
    ThresholdStudy,
    low_share,
)

MISSING = "–"
BUCKETS = 8  # ranges of positions for which fidelity is listed
WORST = 5  # heads, and layers, that are listed
# Warnings: a lower perplexity is hardly that of unseen prose (a table of contents had 1.83); no rounding lowers it by
# so many percent; with a smaller share of keys in low tiles, prompts or windows lie within the band.
IMPLAUSIBLE, IMPLAUSIBLE_GAIN, TELLING = 2.0, 20.0, 0.05
HELD = 43.0
"""Ratio of the largest channel's range to the median's up to which ``balanced`` loses almost nothing, for keys and
queries. They are the ratios of ``keys x 8`` and ``queries x 8`` in ``benchmarks/quality``."""
TOLERATED_GROWTH = 1.25  # of the KL by skipping, with which a backend keeps its quality


@dataclass(frozen=True)
class Table:
    """A table of text. The first column is aligned left, the others right."""

    headers: tuple[str, ...]
    rows: list[list[str]]
    caption: str = ""


@dataclass(frozen=True)
class Page:
    """One section of a report: tables, notes and warnings."""

    title: str
    tables: list[Table]
    notes: list[str] = field(default_factory=list)  # how it was measured
    warnings: list[str] = field(default_factory=list)


Columns = dict[str, Callable[[Any], str]]  # functions that make the cells of each column from a result


def number(value: float | None, form: str, unit: str = "", *, factor: float = 1.0) -> str:
    """Format a number times ``factor`` with its unit, or the mark of a missing one. Zero has no minus."""
    form = f"+z{form[1:]}" if form.startswith("+") else f"z{form}"
    return MISSING if value is None else format(value * factor, form) + unit


def share(value: float | None, form: str = ".2f") -> str:
    return number(value, form, " %", factor=100)


def format_kl(value: float | None) -> str:
    """Format a divergence with five decimals, or with two digits if it is too small for that."""
    return number(value, ".5f" if not value or abs(value) >= 1e-4 else ".1e")


def of(field: str, form: str, unit: str = "", *, factor: float = 1.0) -> Callable[[Any], str]:
    """Return a function that formats a field of a result by :func:`number`."""
    return lambda result: number(getattr(result, field), form, unit, factor=factor)


def code_span(text: str) -> str:
    """Return a code span of CommonMark that shows ``text``, which may contain backticks."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if {text[:1], text[-1:]} & {"`", " "} else ""  # one at each end is not shown
    return f"{fence}{space}{text}{space}{fence}"


def make_table(columns: Columns, results: Sequence[Any], caption: str = "") -> Table:
    """Return a row for each result, without the columns that no result has. A failed one says so."""
    ran = [result for result in results if result.failure is None]
    shown = {name: cell for name, cell in columns.items() if not ran or any(cell(each) != MISSING for each in ran)}
    rows = [[cell(result) for cell in shown.values()] for result in results]
    for row, result in zip(rows, results, strict=True):
        if result.failure is not None and MISSING in row:
            row[row.index(MISSING)] = "failed"
    return Table(tuple(shown), rows, caption)


@cache
def templates() -> jinja2.Environment:
    """Return the package's templates. All text but that of a page in HTML is Markdown."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dma_eval.show"),
        autoescape=jinja2.select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals |= {
        "tile": TILE,
        "formats": FORMAT_SUFFIXES,
        "implausible": IMPLAUSIBLE,
        "implausible_gain": IMPLAUSIBLE_GAIN,
        "telling": TELLING,
        "held": HELD,
    }
    environment.tests |= {"simulated": lambda label: label.startswith(SIMULATED)}
    environment.filters |= {
        "n": lambda value: f"{value:,}",
        "cache_suffix": cache_suffix,
        "share": share,
        "low_share": lambda backend, context: low_share([context], backend.config),
        "cell": lambda text: str(text).replace("|", "\\|"),
        "code": code_span,
    }
    return environment


def _lines(macro: str, *arguments: Any) -> list[str]:
    """Return the lines that a macro of ``notes.md`` writes."""
    said = str(getattr(templates().get_template("notes.md").module, macro)(*arguments))
    return [line for line in said.splitlines() if line.strip()]


COLUMNS: Columns = {
    "backend": lambda r: r.label,
    "perplexity": of("perplexity", ",.3f"),
    "change": lambda r: (
        number(r.change_percent, "+.2f", " %") + ("" if r.change_stderr is None else f" ± {r.change_stderr:.2f}")
    ),
    "KL / token": lambda r: format_kl(r.kl_mean),
    "top-1": lambda r: share(r.top1_agreement),
    "tokens/s": of("tokens_per_second", ",.0f"),
    "peak memory": of("peak_memory_bytes", ",.2f", " GiB", factor=2**-30),
}
"""Columns of the comparison of backends."""
FIDELITY_COLUMNS: Columns = dict(list(COLUMNS.items())[:5]) | {
    "KL p99": lambda r: format_kl(r.kl_p99),
    "KL max": lambda r: format_kl(r.kl_max),
}


def perplexity_page(section: PerplexitySection) -> Page:
    title = f"Perplexity at context {section.context:,}"
    table = make_table(COLUMNS, section.backends)
    return Page(title, [table], _lines("perplexity", section), _lines("perplexity_warnings", section))


def task_page(section: TaskSection) -> Page:
    """Show tasks: a summary by backend, and every metric of every task."""
    labels = [backend.label for backend in section.backends]
    tables = [_task_summary(section), _task_metrics(section)]
    if section.groups:
        rows = []
        for group in section.groups:
            values = (number(group.values[label], ".4f") for label in labels)
            rows.append([f"{group.group}, {group.metric.partition(',')[0]}", *values])
        tables.append(Table(("group", *labels), rows, "Groups, aggregated by lm-eval"))
    shares: dict[str, float] = {}
    for backend in (each for each in section.backends if each.config is not None):
        shares |= {name: max(held, shares.get(name, 0)) for name, held in backend.low_share.items()}
    return Page("Tasks", tables, _lines("tasks", section, shares), _lines("tasks_warnings", section, shares))


def _task_summary(section: TaskSection) -> Table:
    means = {backend.label: backend.mean_accuracy for backend in section.backends}
    rows = []
    for index, backend in enumerate(section.backends):
        label, mean = backend.label, backend.mean_accuracy
        base = means[backend.reference or section.backends[0].label]
        pairs = [(task, metric, metric.of(label)) for task in section.tasks if (metric := task.accuracy) is not None]
        compared = [(task, value) for task, _, value in pairs if value.flips is not None]
        flips = sum(value.flips or 0 for _, value in compared)
        asked = sum(task.samples for task, _ in compared)
        drops = [task.name for task, metric, value in pairs if _direction(metric, value) < 0]
        points = MISSING if not index or mean is None or base is None else number(mean - base, "+.2f", factor=100)
        listed = (", ".join(drops) or "none") if index and pairs else MISSING
        rows.append([label, share(mean), points, share(flips / asked if asked else None), listed])
    return Table(("backend", "mean accuracy", "points", "flips", "significant drops"), rows)


def _task_metrics(section: TaskSection) -> Table:
    rows = [
        [
            f"{task.name}, {metric.title}" + (f", {task.num_fewshot}-shot" if task.num_fewshot else ""),
            value.label,
            f"{task.samples:,}",
            share(value.value) if metric.right_or_wrong else number(value.value, ",.4g"),
            _difference(value, metric),
            MISSING if value.flips is None else f"{value.lost} + {value.gained}",
            number(value.mcnemar_p, ".3f"),
        ]
        for task in section.tasks
        for metric in task.metrics
        for value in metric.values
    ]
    return Table(("task, metric", "backend", "samples", "value", "difference [95 %]", "flips", "p"), rows)


def _direction(metric: MetricResult, value: MetricValue) -> int:
    """Return -1 for a significant loss, +1 for a significant gain, else 0."""
    if value.low is None or value.high is None or value.low <= 0 <= value.high:
        return 0
    return 1 if (value.low > 0) == (metric.higher_is_better is not False) else -1


def _difference(value: MetricValue, metric: MetricResult) -> str:
    factor, form = (100.0, "+.2f") if metric.right_or_wrong else (1.0, "+.3g")
    difference, low, high = (number(each, form, factor=factor) for each in (value.difference, value.low, value.high))
    interval = "" if value.low is None or value.high is None else f" [{low}, {high}]"
    return difference + interval + ("*" if _direction(metric, value) else "")


def fidelity_page(section: FidelitySection) -> Page:
    """Show fidelity: tokens, positions, worst heads, and where greedy continuations diverge."""
    tokens = section.tokens
    tables = [make_table(FIDELITY_COLUMNS, tokens.backends), _position_table(tokens)]
    if section.heads:
        tables.append(_head_table(section.heads))
    skipping = [heads for heads in section.heads if heads.skipped is not None]
    if skipping:
        tables.append(_skipped_table(skipping, tokens.context))
    if section.divergence:
        tables.append(divergence_table(section))
    return Page("Fidelity to SDPA in fp32", tables, _lines("fidelity", section), _lines("perplexity_warnings", tokens))


def _position_table(section: PerplexitySection) -> Table:
    reference, *others = section.backends
    results = {each.label: each for each in section.backends}
    edges = section.position_edges
    parts = [part for part in np.array_split(np.arange(len(edges) - 1), BUCKETS) if len(part)]
    rows = []
    for result in others:
        cells = [MISSING] * len(parts)
        base = results[result.reference or reference.label].position_nll
        if result.position_nll and base:
            change = np.array(result.position_nll, float) - np.array(base, float)
            means = (change[part][np.isfinite(change[part])] for part in parts)  # nothing predicts the first token
            cells = [share(np.expm1(each.mean()) if len(each) else None, "+.2f") for each in means]
        rows.append([result.label, *cells])
    positions = (f"{edges[part[0]]:,}–{edges[part[-1] + 1] - 1:,}" for part in parts)
    return Table(("position", *positions), rows, "Change of perplexity by position in the window")


def _head_table(found: Sequence[HeadErrors]) -> Table:
    rows = []
    for heads in found:
        layers = zip(heads.numbers, heads.relative_l1, strict=True)
        errors = {f"{layer}.{head}": error for layer, own in layers for head, error in enumerate(own)}
        worst = sorted(errors, key=errors.__getitem__, reverse=True)[:WORST]
        listed = ", ".join(f"{head} ({share(errors[head])})" for head in worst)
        middle, largest = share(float(np.median([*errors.values()])), ".3f"), share(errors[worst[0]])
        rows.append([heads.label, middle, largest, f"{min(map(min, heads.cosine)):.5f}", listed])
    headers = ("backend", "median error", "largest", "least cosine", "worst heads: layer.head (error)")
    return Table(headers, rows, "Attention output by head: relative L1 error, each layer on SDPA's own inputs")


def _skipped_table(found: Sequence[HeadErrors], context: int) -> Table:
    rows = []
    for heads in found:
        skipped = heads.skipped or []
        layers = {layer: float(np.mean(own)) for layer, own in zip(heads.numbers, skipped, strict=True)}
        ranked = sorted(layers, key=layers.__getitem__)
        ends = (f"{layer} ({share(layers[layer])})" for layer in (ranked[0], ranked[-1]))
        rows.append([heads.label, f"{context:,}", share(float(np.mean(np.concatenate(skipped)))), *ends])
    columns = ("backend", "tokens", "all layers", "least: layer", "most: layer")
    return Table(columns, rows, "Share of low tiles skipped")


def divergence_table(section: FidelitySection) -> Table:
    """Show where greedy continuations diverge from the reference's, and the share of equal tokens."""
    horizons = list(section.divergence[0].equal_share)
    rows = []
    for each in section.divergence:
        same, prompts = each.same_tokens, len(each.same_tokens)
        whole = f"{same.count(section.new_tokens)} of {prompts}"
        equal = (share(each.equal_share[n], ".1f") for n in horizons)
        rows.append([each.label, f"{np.median(same):.0f}", str(min(same)), whole, *equal])
    caption = (
        f"Greedy continuations of {section.new_tokens:,} tokens after prompts of {section.prompt_tokens:,}: first "
        "difference, and share of equal tokens"
    )
    lengths = [f"equal of {int(n):,}" for n in horizons]
    return Table(("backend", "median first", "least", "identical", *lengths), rows, caption)


def stress_page(section: StressSection) -> Page:
    """Show twins: outlier channels of the model, then divergence and change by twin and backend."""
    ranges = {"key": section.key_ranges, "query": section.query_ranges}
    worst = {of: sorted(layers, key=lambda each: -each.ratio)[:WORST] for of, layers in ranges.items()}
    rows = [
        [each.layer, of, f"{each.ratio:,.1f}", str(each.head), str(each.channel)]
        for of, layers in worst.items()
        for each in layers
    ]
    layers = len(section.key_ranges)
    caption = f"Largest channel over the median channel of its head: worst {min(WORST, layers)} of {layers} layers"
    tables = [Table(("layer", "of", "ratio", "head", "channel"), rows, caption)]
    measured = [(twin, twin.tokens) for twin in section.twins if twin.tokens is not None]
    reference, *labels = dict.fromkeys(result.label for _, tokens in measured for result in tokens.backends)
    kl: list[list[str]] = []
    change: list[list[str]] = []
    for twin, tokens in measured:
        results = {each.label: each for each in tokens.backends}
        ratios = (number(ratio, ",.1f") for ratio in (twin.key_ratio, twin.query_ratio))
        for table, column, facts in ((kl, "KL / token", ratios), (change, "change", ())):
            cells = (COLUMNS[column](results[label]) if label in results else MISSING for label in labels)
            table.append([twin.name, *facts, *cells])
    tables += [
        Table(("twin", "key ratio", "query ratio", *labels), kl, f"KL per token from the twin's own {reference}"),
        Table(("twin", *labels), change, f"Change of perplexity against the twin's own {reference}"),
        *map(_threshold_table, section.thresholds),
    ]
    notes = _lines("stress", section, measured[0][1]) + [verdict(study) for study in section.thresholds]
    return Page("Stress: twins of the model", tables, notes, _lines("stress_warnings", section, worst, measured[0][1]))


def _threshold_table(study: ThresholdStudy) -> Table:
    """Return the share of tiles that each threshold skips, and its loss, on the unchanged model."""
    rows = []
    columns = ("KL / token", "change", "top-1")
    for threshold, skipped, result in zip(study.thresholds, study.skipped, study.tokens.backends[1:], strict=True):
        rows.append([number(threshold, "g"), share(skipped), *(COLUMNS[column](result) for column in columns)])
    headers = ("threshold", "low tiles skipped", *columns)
    return Table(headers, rows, f"Tile skipping: {study.label} on the unchanged model")


def verdict(study: ThresholdStudy) -> str:
    """Say whether a model keeps its quality at a backend's threshold, and which is the smallest that keeps it."""
    losses = {t: each.kl_mean for t, each in zip(study.thresholds, study.tokens.backends[1:], strict=True)}
    skipped = dict(zip(study.thresholds, study.skipped, strict=True))
    plain, own = losses[None], losses[study.own]
    if plain is None or own is None:
        return f"{study.label}: the loss of tile skipping is unknown, because a pass failed."
    kept = [t for t, kl in losses.items() if t is not None and kl is not None and kl <= TOLERATED_GROWTH * plain]
    says = "keeps its quality" if study.own in kept else "loses quality"
    line = (
        f"{study.label}: the model {says} at skip_threshold = {study.own:g}: {share(skipped[study.own])} of low tiles "
        f"skipped, KL {format_kl(plain)} without skipping and {format_kl(own)} with it. "
    )
    if not kept:
        return f"{line}No tested threshold keeps the KL within {TOLERATED_GROWTH:g} times: leave skipping off."
    best = min(kept)
    return f"{line}Smallest that keeps it within {TOLERATED_GROWTH:g} times: {best:g}, {share(skipped[best])} skipped."


PAGES: dict[str, Callable[[Any], Page]] = {
    "perplexity": perplexity_page,
    "tasks": task_page,
    "fidelity": fidelity_page,
    "stress": stress_page,
}
"""Functions that make a page, by the field of a report that holds such sections."""
