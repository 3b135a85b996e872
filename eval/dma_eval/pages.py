"""Sections of results as tables and notes, the same for the screen and for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import numpy as np

from .names import SIMULATED, TILE, reads_cache
from .results import (
    BackendResult,
    FidelitySection,
    MetricResult,
    MetricValue,
    PerplexitySection,
    Report,
    RetrievalBackend,
    RetrievalSection,
    StressSection,
    TaskBackend,
    TaskSection,
    ThresholdStudy,
)

MEMORY_KINDS = {
    "cuda_allocated": "GPU memory allocated by PyTorch, summed over GPUs",
    "process_rss": "resident memory of the process, sampled every 5 ms",
}
MISSING = "–"
WORST_HEADS = 5
WORST_LAYERS = 5
IMPLAUSIBLE = 2.0
"""A perplexity below this triggers a warning: the text is not unseen prose. A table of contents gave 1.83."""
TELLING = 0.05
"""A share of keys in low tiles below this triggers a warning: the prompts of the task are within the band."""
HELD = 43.0
"""Ratio of the largest channel's range to the median's, of keys and of queries, at which ``balanced`` was measured to
lose almost nothing: those of ``keys x 8`` and ``queries x 8`` in the results under ``benchmarks/quality``."""
TOLERATED_GROWTH = 1.25
"""How many times its KL without skipping a backend may have with it, to keep its quality."""
RETRIEVAL_TITLES = {"needle": "Retrieval: a sentence in prose", "kv": "Retrieval: one pair of many"}


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is flush left, the others flush right."""

    headers: tuple[str, ...]
    rows: list[list[str]]
    caption: str = ""


Columns = dict[str, Callable[[Any], str]]
"""Functions that make the cells of each column from a result."""


@dataclass(frozen=True)
class Page:
    """One section as it is shown."""

    title: str
    tables: list[Table]
    notes: list[str] = field(default_factory=list)  # how it was measured
    warnings: list[str] = field(default_factory=list)


def of(field: str, form: str, unit: str = "", *, factor: float = 1.0) -> Callable[[Any], str]:
    """Return a function that formats a field of a result by :func:`number`."""
    return lambda result: number(getattr(result, field), form, unit, factor=factor)


def make_table(columns: Columns, results: Sequence[Any], caption: str = "") -> Table:
    """Return a row for each result. A failed one has ``failed`` in place of its first number."""
    rows = [[cell(result) for cell in columns.values()] for result in results]
    for row, result in zip(rows, results, strict=True):
        if result.failure is not None:
            row[row.index(MISSING)] = "failed"
    return Table(tuple(columns), rows, caption)


def perplexity_page(section: PerplexitySection) -> Page:
    """A section on perplexity: one row per backend."""
    data, stride = section.data, section.stride
    origin = ", ".join(
        [f"`{data.name}`", *(f"{key} `{value}`" for key in ("config", "split") if (value := getattr(data, key)))]
    )
    manner = ["non-overlapping" if stride == section.context else f"stride {stride:,}"]
    manner += [f"the first {section.skip_windows:,} skipped"] if section.skip_windows else []
    manner += ["spread over the text"] if section.spread else []
    notes = [
        f"Text: {origin}, {data.tokens:,} tokens.",
        f"{_windows(section.windows)} of {section.context:,} tokens "
        f"({', '.join(manner)}), {section.tokens_scored:,} tokens "
        f"predicted by every backend; batch size {section.batch_size}.",
        f"Change, KL and top-1 are against `{section.backends[0].label}`, token by token; "
        "± is one standard error of the change over tokens.",
        f"Peak memory: {MEMORY_KINDS[section.memory_kind]}.",
        *cache_lines(result.label for result in section.backends),
    ]
    title = f"Perplexity at context {section.context:,}"
    return Page(title, [make_table(COLUMNS, section.backends)], notes, warnings(section))


def task_page(section: TaskSection) -> Page:
    """A section on tasks: a summary by backend, and every metric of every task."""
    warnings = [
        f"{backend.label} failed in {name}: {failure}"
        for backend in section.backends
        for name, failure in backend.failures.items()
    ] + _fallback_lines(section.backends)
    largest: dict[str, float] = {}
    for backend in section.backends:
        largest |= {name: max(held, largest.get(name, 0)) for name, held in backend.low_share.items()}
    shares = [f"{name} {share(held)}" for name, held in largest.items()]
    short = [f"{name} ({share(held)})" for name, held in largest.items() if held < TELLING]
    if any(backend.config for backend in section.backends) and short:
        warnings.append(
            f"low tiles held less than {share(TELLING, '.0f')} of the keys of {', '.join(short)}: prompts this short "
            "say little about them"
        )
    tables = [_task_summary(section), _task_metrics(section)]
    if section.groups:
        labels = [backend.label for backend in section.backends]
        rows = []
        for group in section.groups:
            name = f"{group.group}, {group.metric.partition(',')[0]}"
            rows.append([name, *(number(group.values[label], ".4f") for label in labels)])
        tables.append(Table(("group", *labels), rows, "Groups, as lm-eval aggregates them"))
    limit = "all samples" if section.limit is None else f"the first {section.limit:,} samples"
    notes = [
        f"Scored by lm-eval on {limit} of each task, the same for every backend; batch size {section.batch_size}"
        + (f"; {section.processes} processes" if section.processes > 1 else "")
        + ("; with the model's chat template." if section.chat_template else "."),
        f"Differences are paired, sample by sample, against `{section.backends[0].label}`; in brackets the "
        f"{share(section.confidence, '.0f')} interval of a bootstrap of {section.resamples:,} resamples. "
        "A star marks an interval that excludes 0. Intervals are not corrected for the number of comparisons.",
        "Flips: samples right under one backend and wrong under the other (lost + gained). "
        "p: McNemar's exact test, two-sided.",
        *([f"Share of keys in low tiles: {', '.join(shares)}."] if shares else []),
        *cache_lines(backend.label for backend in section.backends),
    ]
    return Page("Tasks", tables, notes, warnings)


def fidelity_page(section: FidelitySection) -> Page:
    """A section on fidelity: tokens, positions, worst heads, and where greedy continuations part."""
    tokens = section.tokens
    columns = dict(list(COLUMNS.items())[:5])
    columns |= {"KL p99": lambda r: format_kl(r.kl_p99), "KL max": lambda r: format_kl(r.kl_max)}
    tables = [make_table(columns, tokens.backends)]
    edges = section.bucket_edges
    headers = ("position", *(f"{low:,}–{high - 1:,}" for low, high in pairwise(edges)))
    nothing = [None] * (len(edges) - 1)  # of a failed backend
    rows = [
        [label, *(number(change, "+.2f", " %") for change in changes or nothing)]
        for label, changes in section.bucket_change.items()
    ]
    tables.append(Table(headers, rows, "Change of perplexity by position in the window"))
    if section.heads:
        rows = []
        for heads in section.heads:
            errors = np.array(heads.relative_l1)
            worst = np.argsort(errors, axis=None)[::-1][:WORST_HEADS]
            where = zip(*np.unravel_index(worst, errors.shape), strict=True)
            listed = ", ".join(f"{layer}.{head} ({share(errors[layer, head])})" for layer, head in where)
            middle, largest = share(float(np.median(errors)), ".3f"), share(errors.max())
            rows.append([heads.label, middle, largest, f"{np.min(heads.cosine):.5f}", listed])
        headers = ("backend", "median error", "largest", "least cosine", "worst heads: layer.head (error)")
        caption = "Attention output by head: relative L1 error, each layer given SDPA's own inputs"
        tables.append(Table(headers, rows, caption))
    skipping = [heads for heads in section.heads if heads.skipped is not None]
    if skipping:
        rows = []
        for heads in skipping:
            shares = np.array(heads.skipped)
            layers = shares.mean(1)
            ends = (f"{layer} ({share(layers[layer])})" for layer in (layers.argmin(), layers.argmax()))
            rows.append([heads.label, f"{tokens.context:,}", share(shares.mean()), *ends])
        headers = ("backend", "tokens", "all layers", "least: layer", "most: layer")
        tables.append(Table(headers, rows, "Share of low tiles skipped"))
    if section.divergence:
        horizons = list(section.divergence[0].equal_share)
        rows = []
        for each in section.divergence:
            same, prompts = each.same_tokens, len(each.same_tokens)
            whole = f"{same.count(section.new_tokens)} of {prompts}"
            equal = (share(each.equal_share[n], ".1f") for n in horizons)
            rows.append([each.label, f"{np.median(same):.0f}", str(min(same)), whole, *equal])
        caption = f"Greedy continuations of {section.new_tokens} tokens: the first that differs, and how many are equal"
        headers = ("backend", "median first", "least", "identical", *(f"equal of {int(n):,}" for n in horizons))
        tables.append(Table(headers, rows, caption))
    notes = [
        f"Text: `{tokens.data.name}`; {_windows(tokens.windows)} of "
        f"{tokens.context:,} tokens, {tokens.tokens_scored:,} tokens scored.",
        f"The reference is SDPA with weights and arithmetic in fp32; the backends run in {section.dtype}.",
    ]
    if section.heads:
        notes.append(
            f"Heads: over {_windows(section.head_windows)}; every layer's "
            "query, key and value are those of the fp32 pass, so an error is not inherited from an earlier layer."
        )
    return Page("Fidelity to SDPA in fp32", tables, notes, warnings(tokens))


def can_retrieve(section: RetrievalSection) -> bool:
    """Return whether the reference finds anything. If not, the other backends' answers say nothing."""
    return any(cell.correct for cell in section.backends[0].cells)


def retrieval_page(section: RetrievalSection) -> Page:
    """A section on retrieval: one row per backend and length, one column per depth."""
    rows = []
    for backend, length in product(section.backends, section.lengths):
        cells = {cell.depth: cell for cell in backend.cells if cell.length == length}
        found = (f"{cells[d].correct}/{cells[d].samples}" if d in cells else MISSING for d in section.depths)
        loss = f"{np.mean([cell.nll for cell in cells.values()]):.4f}" if cells else MISSING
        rows.append([backend.label, f"{length:,}", *found, loss])
    headers = ("backend", "tokens", *(f"depth {100 * depth:.0f} %" for depth in section.depths), "loss")
    warnings = _failure_lines(section.backends)
    if not can_retrieve(section):
        warnings.append(f"{section.backends[0].label} finds nothing: the model itself cannot do this")
    notes = [
        "An answer is found if all of it is the greedy continuation of the prompt. Loss: nats per token of "
        "the answer, mean over depths."
    ]
    return Page(RETRIEVAL_TITLES[section.kind], [Table(headers, rows)], notes, warnings)


def stress_page(section: StressSection) -> Page:
    """A section on twins: outlier channels of the model, then divergence and change by twin and backend."""
    ranges = {"key": section.key_ranges, "query": section.query_ranges}
    worst = {of: sorted(layers, key=lambda each: -each.ratio)[:WORST_LAYERS] for of, layers in ranges.items()}
    rows = [
        [each.layer, of, f"{each.ratio:,.1f}", str(each.head), str(each.channel)]
        for of, layers in worst.items()
        for each in layers
    ]
    count = min(WORST_LAYERS, len(section.key_ranges))
    caption = f"Largest channel over the median channel of its head: worst {count} of {len(section.key_ranges)} layers"
    tables = [Table(("layer", "of", "ratio", "head", "channel"), rows, caption)]
    measured = [(twin, twin.tokens) for twin in section.twins if twin.tokens is not None]
    reference, *labels = dict.fromkeys(result.label for _, tokens in measured for result in tokens.backends)
    kl, change = [], []
    for twin, tokens in measured:
        results = [next((each for each in tokens.backends if each.label == label), None) for label in labels]
        ratios = (number(ratio, ",.1f") for ratio in (twin.key_ratio, twin.query_ratio))
        kl.append([twin.name, *ratios, *(format_kl(None if each is None else each.kl_mean) for each in results)])
        change.append([twin.name, *(MISSING if each is None else table_row(each)[2] for each in results)])
    tables += [
        Table(("twin", "key ratio", "query ratio", *labels), kl, f"KL per token from the twin's own {reference}"),
        Table(("twin", *labels), change, f"Change of perplexity against the twin's own {reference}"),
    ]
    notes = [
        f"Ranges: over {section.range_tokens:,} tokens, after the rotary embedding.",
        "Keys, queries, values: some channels of every head are multiplied by the factor, and the other operand is "
        "divided by it, so the twin computes the same function. Key biases are added before the rotary embedding: "
        "another function.",
    ]
    tables += [_threshold_table(study) for study in section.thresholds]
    notes += [verdict(study) for study in section.thresholds]
    lines = [f"{twin.name}: the model has no such twin: {twin.refused}" for twin in section.twins if twin.refused]
    lines += [line for study in section.thresholds for line in warnings(study.tokens)]
    for twin, tokens in measured:
        lines += [f"{twin.name}: {line}" for line in warnings(tokens)]
    outlying = [
        f"this model's largest {of} channel is {layers[0].ratio:,.0f}x the median one, in {layers[0].layer}; presets "
        f"were tested up to {HELD:,.0f}x: equalize first (dma-hf equalize)"
        for of, layers in worst.items()
        if layers and layers[0].ratio > HELD
    ]
    return Page("Stress: twins of the model", tables, notes, outlying + lines)


def _threshold_table(study: ThresholdStudy) -> Table:
    """The share of tiles that each threshold skips, and its loss, on the unchanged model."""
    rows = []
    for threshold, skipped, result in zip(study.thresholds, study.skipped, study.tokens.backends[1:], strict=True):
        _, _, change, kl, top1, *_ = table_row(result)
        rows.append([number(threshold, "g"), share(skipped), kl, change, top1])
    headers = ("threshold", "low tiles skipped", "KL / token", "change", "top-1")
    return Table(headers, rows, f"Tile skipping: {study.label} on the model as it is")


def verdict(study: ThresholdStudy) -> str:
    """Say whether a model keeps its quality at a backend's threshold, and the smallest threshold at which it does."""
    losses = {t: each.kl_mean for t, each in zip(study.thresholds, study.tokens.backends[1:], strict=True)}
    skipped = dict(zip(study.thresholds, study.skipped, strict=True))
    plain, own = losses[None], losses[study.own]
    if plain is None or own is None:
        return f"{study.label}: whether tile skipping costs quality is not known: a pass failed."
    kept = [t for t, kl in losses.items() if t is not None and kl is not None and kl <= TOLERATED_GROWTH * plain]
    says = "keeps its quality" if study.own in kept else "loses quality"
    line = (
        f"{study.label}: the model {says} at skip_threshold = {study.own:g}: {share(skipped[study.own])} of low tiles "
        f"skipped, KL {format_kl(plain)} without skipping and {format_kl(own)} with it. "
    )
    if not kept:
        return f"{line}No threshold that was tried keeps the KL within {TOLERATED_GROWTH:g} times: skip nothing."
    best = min(kept)
    return f"{line}Smallest that keeps it within {TOLERATED_GROWTH:g} times: {best:g}, {share(skipped[best])} skipped."


def warnings(section: PerplexitySection) -> list[str]:
    """Warnings: failed backends, fallbacks to other attention, missing windows, an implausible text."""
    lines = _failure_lines(section.backends) + _fallback_lines(section.backends)
    if section.windows_left:
        total = section.windows + section.windows_left
        lines.append(f"interrupted: the figures are those of {section.windows:,} of {total:,} windows")
    perplexity = section.backends[0].perplexity
    if perplexity is not None and perplexity < IMPLAUSIBLE:
        lines.append(
            f"a perplexity of {perplexity:.2f} is implausibly low for prose: the text repeats itself, as a table of "
            "contents does, or the model was trained on it; --skip-windows and --spread take other windows"
        )
    return lines


def _fallback_lines(backends: Sequence[BackendResult | TaskBackend]) -> list[str]:
    return [
        f"{backend.label} fell back to other attention {count} times: {reason}"
        for backend in backends
        for reason, count in backend.fallbacks.items()
    ]


def table_row(result: BackendResult) -> list[str]:
    """One row of the comparison, under the names of ``COLUMNS``."""
    return make_table(COLUMNS, [result]).rows[0]


def _failure_lines(backends: Sequence[BackendResult | RetrievalBackend]) -> list[str]:
    return [f"{backend.label} failed: {backend.failure}" for backend in backends if backend.failure is not None]


def _windows(count: int) -> str:
    return f"{count} window{'' if count == 1 else 's'}"


def number(value: float | None, form: str, unit: str = "", *, factor: float = 1.0) -> str:
    """A number times ``factor`` with its unit, or the mark of one that is missing."""
    return MISSING if value is None else format(value * factor, form) + unit


def share(value: float | None, form: str = ".2f") -> str:
    """A share in percent."""
    return number(value, form, " %", factor=100)


def format_kl(value: float | None) -> str:
    """A divergence with five decimals, or two digits where it is smaller than those show."""
    if value is None:
        return MISSING
    return f"{value:.5f}" if value == 0 or abs(value) >= 1e-4 else f"{value:.1e}"


def format_bytes(value: float | None) -> str:
    """Bytes in MiB or GiB."""
    if value is None:
        return MISSING
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def cache_lines(labels: Iterable[str]) -> list[str]:
    """Notes on backends that read through a cache or simulate another kernel."""
    labels = list(labels)
    lines = []
    if any(map(reads_cache, labels)):
        lines.append(
            f"`+int8`, `+int4`: every token is read through a `DMACache`, {TILE} tokens at a time, so the scores are "
            "those of the stored keys and values. Other `+`: likewise, through the `QuantizedCache` of Transformers. "
            "Times and memory are those of such small steps."
        )
    if any(label.startswith(SIMULATED) for label in labels):
        lines.append("`sim_...`: a simulation of the rounding of that kernel or cache. Its times mean nothing.")
    return lines


def _task_summary(section: TaskSection) -> Table:
    base = section.backends[0].mean_accuracy
    rows = []
    for index, backend in enumerate(section.backends):
        label, mean = backend.label, backend.mean_accuracy
        pairs = [(task, metric, metric.of(label)) for task in section.tasks if (metric := task.accuracy) is not None]
        compared = [(task, value) for task, _, value in pairs if value.flips is not None]
        flips = sum(value.flips or 0 for _, value in compared)
        asked = sum(task.samples for task, _ in compared)
        drops = [task.name for task, metric, value in pairs if _verdict(metric, value) < 0]
        points = MISSING if not index or mean is None or base is None else f"{100 * (mean - base):+.2f}"
        listed = (", ".join(drops) or "none") if index and pairs else MISSING
        seconds = f"{sum(backend.seconds.values()):,.1f}"
        rows.append([label, share(mean), points, share(flips / asked if asked else None), listed, seconds])
    return Table(("backend", "mean accuracy", "points", "flips", "significant drops", "seconds"), rows)


def _task_metrics(section: TaskSection) -> Table:
    rows = [
        [
            f"{task.name}, {metric.title}",
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


def _verdict(metric: MetricResult, value: MetricValue) -> int:
    """-1 for a significant loss, +1 for a significant gain, else 0."""
    if value.low is None or value.high is None or value.low <= 0 <= value.high:
        return 0
    rises = value.low > 0
    return 1 if rises == (metric.higher_is_better is not False) else -1


def _difference(value: MetricValue, metric: MetricResult) -> str:
    if value.difference is None:
        return MISSING
    scale, digits = (100.0, "+.2f") if metric.right_or_wrong else (1.0, "+.3g")
    text = format(scale * value.difference, digits)
    if value.low is None or value.high is None:
        return text
    star = "*" if _verdict(metric, value) else ""
    return f"{text} [{format(scale * value.low, digits)}, {format(scale * value.high, digits)}]{star}"


COLUMNS: Columns = {
    "backend": lambda r: r.label,
    "perplexity": of("perplexity", ",.3f"),
    "change": lambda r: MISSING if r.change_percent is None else f"{r.change_percent:+.2f} % ± {r.change_stderr:.2f}",
    "KL / token": lambda r: format_kl(r.kl_mean),
    "top-1": lambda r: share(r.top1_agreement),
    "tokens/s": of("tokens_per_second", ",.0f"),
    "peak memory": lambda r: format_bytes(r.peak_memory_bytes),
}
"""Of the comparison of backends."""
PAGES: dict[str, Callable[[Any], Page]] = {
    "perplexity": perplexity_page,
    "tasks": task_page,
    "fidelity": fidelity_page,
    "retrieval": retrieval_page,
    "stress": stress_page,
}
"""By the field of a report that holds such sections."""


def all_pages(report: Report) -> list[Page]:
    """The pages of all sections."""
    return [PAGES[name](section) for name, section in report.sections]
