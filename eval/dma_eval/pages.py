"""Sections of results as tables and notes, the same for the screen and for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from .names import SIMULATED, TILE, reads_cache
from .results import (
    SECTIONS,
    BackendResult,
    FidelitySection,
    MetricResult,
    MetricValue,
    PerplexitySection,
    Report,
    RetrievalSection,
    StressSection,
    TaskBackend,
    TaskSection,
)

MEMORY_KINDS = {
    "cuda_allocated": "GPU memory allocated by PyTorch, summed over GPUs",
    "process_rss": "resident memory of the process, sampled every 5 ms",
}
HEADERS = ("backend", "perplexity", "change", "KL / token", "top-1", "tokens/s", "peak memory")
MISSING = "–"
WORST_HEADS = 5
WORST_LAYERS = 5
IMPLAUSIBLE = 2.0
"""A perplexity below which a text is not prose that a model reads for the first time: a table of contents gave 1.83."""
TELLING = 0.05
"""A share of keys in low tiles below which a task is warned of: its prompts are within the band."""
TASKS_TITLE = "Tasks"
FIDELITY_TITLE = "Fidelity to SDPA in fp32"
STRESS_TITLE = "Stress: twins of the model"
HELD = 43.0
"""Ratio of the largest channel's range to the median's, of keys and of queries, at which ``balanced`` was measured to
lose next to nothing: those of ``keys x 8`` and ``queries x 8`` in the results under ``benchmarks/quality``."""
RETRIEVAL_TITLES = {"needle": "Retrieval: a sentence in prose", "kv": "Retrieval: one pair of many"}


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is flush left, the others flush right."""

    headers: tuple[str, ...]
    rows: list[list[str]]
    caption: str = ""


@dataclass(frozen=True)
class Page:
    """One section as it is shown."""

    title: str
    tables: list[Table]
    notes: list[str] = field(default_factory=list)  # how it was measured
    warnings: list[str] = field(default_factory=list)  # what a reader must not miss


def perplexity_title(section: PerplexitySection) -> str:
    """The title of a section on perplexity."""
    return f"Perplexity at context {section.context:,}"


def perplexity_page(section: PerplexitySection) -> Page:
    """A section on perplexity: one row per backend."""
    data, stride = section.data, section.stride
    origin = ", ".join(
        [f"`{data.name}`", *(f"{key} `{value}`" for key in ("config", "split") if (value := getattr(data, key)))]
    )
    manner = ["non-overlapping" if stride == section.context else f"stride {stride:,}"]
    manner += [f"{section.skip_windows:,} at the begin left out"] if section.skip_windows else []
    manner += ["spread over the text"] if section.spread else []
    notes = [
        f"Text: {origin}, {data.tokens:,} tokens.",
        f"{section.windows} window{'' if section.windows == 1 else 's'} of {section.context:,} tokens "
        f"({', '.join(manner)}), {section.tokens_scored:,} tokens "
        f"predicted by every backend; batch size {section.batch_size}.",
        f"Change, KL and top-1 are against `{section.backends[0].label}`, token by token; "
        "± is one standard error of the change over tokens.",
        f"Peak memory: {MEMORY_KINDS[section.memory_kind]}.",
        *cache_lines(result.label for result in section.backends),
    ]
    rows = [table_row(result) for result in section.backends]
    return Page(perplexity_title(section), [Table(HEADERS, rows)], notes, warnings(section))


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
            f"low tiles held less than {share(TELLING, '.0f')} of the keys of {', '.join(short)}: prompts so short say "
            "next to nothing about them"
        )
    tables = [_task_summary(section), _task_metrics(section)]
    if section.groups:
        labels = [backend.label for backend in section.backends]
        rows = [
            [
                f"{group.group}, {group.metric.partition(',')[0]}",
                *(number(group.values[label], ".4f") for label in labels),
            ]
            for group in section.groups
        ]
        tables.append(Table(("group", *labels), rows, "Groups, as lm-eval aggregates them"))
    limit = "all samples" if section.limit is None else f"the first {section.limit:,} samples"
    notes = [
        f"Scored by lm-eval on {limit} of each task, the same for every backend; batch size {section.batch_size}"
        + (f"; {section.processes} processes" if section.processes > 1 else "")
        + ("; with the model's chat template." if section.chat_template else "."),
        f"Differences are paired, sample by sample, against `{section.backends[0].label}`; in brackets the "
        f"{share(section.confidence, '.0f')} interval of a bootstrap of {section.resamples:,} resamples. "
        "A star marks an interval without 0. No correction is made for the number of comparisons.",
        "Flips: samples right under one backend and wrong under the other (lost + gained). "
        "p: McNemar's exact test, two-sided.",
        *([f"Keys that low tiles held: {', '.join(shares)}."] if shares else []),
        *cache_lines(backend.label for backend in section.backends),
    ]
    return Page(TASKS_TITLE, tables, notes, warnings)


def fidelity_page(section: FidelitySection) -> Page:
    """A section on fidelity: tokens, positions, worst heads, and where greedy continuations part."""
    tokens = section.tokens
    reference, *others = tokens.backends
    rows = [
        [*table_row(result)[:5], format_kl(result.kl_p99), format_kl(result.kl_max)] for result in (reference, *others)
    ]
    tables = [Table((*HEADERS[:5], "KL p99", "KL max"), rows)]
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
            where = [np.unravel_index(int(index), errors.shape) for index in worst]
            cosine = np.array(heads.cosine)
            listed = ", ".join(f"{layer}.{head} ({share(errors[layer, head])})" for layer, head in where)
            middle, largest = share(float(np.median(errors)), ".3f"), share(errors.max())
            rows.append([heads.label, middle, largest, f"{cosine.min():.5f}", listed])
        tables.append(
            Table(
                ("backend", "median error", "largest", "least cosine", "worst heads: layer.head (error)"),
                rows,
                "Attention output by head: relative L1 error, each layer given SDPA's own inputs",
            )
        )
    if section.divergence:
        rows = [
            [
                each.label,
                f"{np.median(each.same_tokens):.0f}",
                str(min(each.same_tokens)),
                f"{sum(same == section.new_tokens for same in each.same_tokens)} of {len(each.same_tokens)}",
            ]
            for each in section.divergence
        ]
        tables.append(
            Table(
                ("backend", "median", "least", "identical"),
                rows,
                f"Greedy tokens before the first that differs, of {section.new_tokens}",
            )
        )
    notes = [
        f"Text: `{tokens.data.name}`; {tokens.windows} window{'' if tokens.windows == 1 else 's'} of "
        f"{tokens.context:,} tokens, {tokens.tokens_scored:,} tokens scored.",
        f"The reference is SDPA with weights and arithmetic in fp32; the backends run in {section.dtype}.",
    ]
    if section.heads:
        notes.append(
            f"Heads: over {section.head_windows} window{'' if section.head_windows == 1 else 's'}; every layer's "
            "query, key and value are those of the fp32 pass, so that an error is its own and not an echo."
        )
    return Page(FIDELITY_TITLE, tables, notes, warnings(tokens))


def can_retrieve(section: RetrievalSection) -> bool:
    """Whether the reference finds anything: where it does not, the others' answers say nothing."""
    return any(cell.correct for cell in section.backends[0].cells)


def retrieval_page(section: RetrievalSection) -> Page:
    """A section on retrieval: one row per backend and length, one column per depth."""
    rows = []
    for backend in section.backends:
        for length in section.lengths:
            cells = {cell.depth: cell for cell in backend.cells if cell.length == length}
            nll = [cell.nll for cell in cells.values()]
            rows.append(
                [
                    backend.label,
                    f"{length:,}",
                    *(f"{cells[d].correct}/{cells[d].samples}" if d in cells else MISSING for d in section.depths),
                    f"{np.mean(nll):.4f}" if nll else MISSING,
                ]
            )
    headers = ("backend", "tokens", *(f"depth {100 * depth:.0f} %" for depth in section.depths), "loss")
    warnings = [f"{b.label} failed: {b.failure}" for b in section.backends if b.failure is not None]
    if not can_retrieve(section):
        warnings.append(f"{section.backends[0].label} finds nothing: the model cannot do this, whatever its attention")
    notes = [
        "Found: the whole answer is the greedy continuation of the prompt. Loss: nats per token of the answer, "
        "mean over depths.",
    ]
    return Page(RETRIEVAL_TITLES[section.kind], [Table(headers, rows)], notes, warnings)


def stress_page(section: StressSection) -> Page:
    """A section on twins: what the model's own channels are like, then divergence and change for twin and backend."""
    ranges = {"key": section.key_ranges, "query": section.query_ranges}
    worst = {of: sorted(layers, key=lambda each: -each.ratio)[:WORST_LAYERS] for of, layers in ranges.items()}
    rows = [
        [each.layer, of, f"{each.ratio:,.1f}", str(each.head), str(each.channel)]
        for of, layers in worst.items()
        for each in layers
    ]
    count = min(WORST_LAYERS, len(section.key_ranges))
    caption = f"Largest channel by the median one of its head, the worst {count} of {len(section.key_ranges)} layers"
    tables = [Table(("layer", "of", "ratio", "head", "channel"), rows, caption)]
    measured = [(twin, twin.tokens) for twin in section.twins if twin.tokens is not None]
    reference, *labels = dict.fromkeys(result.label for _, tokens in measured for result in tokens.backends)
    kl, change = [], []
    for twin, tokens in measured:
        results = {result.label: result for result in tokens.backends}
        ratios = (number(ratio, ",.1f") for ratio in (twin.key_ratio, twin.query_ratio))
        kl.append(
            [
                twin.name,
                *ratios,
                *(format_kl(results[label].kl_mean) if label in results else MISSING for label in labels),
            ]
        )
        change.append([twin.name, *(table_row(results[label])[2] if label in results else MISSING for label in labels)])
    tables += [
        Table(("twin", "key ratio", "query ratio", *labels), kl, f"KL per token from the twin's own {reference}"),
        Table(("twin", *labels), change, f"Change of perplexity against the twin's own {reference}"),
    ]
    notes = [
        f"Ranges: over {section.range_tokens:,} tokens, after the rotary embedding.",
        "Keys, queries, values: some channels of every head times the factor, and what meets them by it, so that the "
        "twin computes what the model computes. Key biases: added before the rotary embedding, another function.",
    ]
    lines = [f"{twin.name}: the model has no such twin: {twin.refused}" for twin in section.twins if twin.refused]
    for twin, tokens in measured:
        lines += [f"{twin.name}: {line}" for line in warnings(tokens)]
    outlying = [
        f"this model's largest {of} channel is {layers[0].ratio:,.0f}x the median one, in {layers[0].layer}; presets "
        f"were tested up to {HELD:,.0f}x: equalize first (dma-hf equalize)"
        for of, layers in worst.items()
        if layers and layers[0].ratio > HELD
    ]
    return Page(STRESS_TITLE, tables, notes, outlying + lines)


def warnings(section: PerplexitySection) -> list[str]:
    """What a reader must not miss: failed backends, other attention, windows that are missing, an odd text."""
    lines = [f"{result.label} failed: {result.failure}" for result in section.backends if result.failure is not None]
    lines += _fallback_lines(section.backends)
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
    """One row of the comparison, under ``HEADERS``."""
    if result.failure is not None:
        return [result.label, "failed", *[MISSING] * (len(HEADERS) - 2)]
    return [
        result.label,
        number(result.perplexity, ",.3f"),
        MISSING if result.change_percent is None else f"{result.change_percent:+.2f} % ± {result.change_stderr:.2f}",
        format_kl(result.kl_mean),
        share(result.top1_agreement),
        number(result.tokens_per_second, ",.0f"),
        format_bytes(result.peak_memory_bytes),
    ]


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
    """What a reader must know of backends that read through a cache, if there are some."""
    labels = list(labels)
    lines = []
    if any(map(reads_cache, labels)):
        lines.append(
            f"`+int8`, `+int4`, `+cache`: all is read through a `DMACache`, {TILE} tokens at a time, so that what is "
            "scored is what the cache stores; other `+`: likewise, through the `QuantizedCache` of Transformers. Times "
            "and memory are those of such small steps."
        )
    if any(label.startswith(SIMULATED) for label in labels):
        lines.append(
            "`sim_...`: a simulation that rounds numbers as that kernel or cache does; its times mean nothing."
        )
    return lines


def _task_summary(section: TaskSection) -> Table:
    reference = section.backends[0]
    rows = []
    for backend in section.backends:
        pairs = [
            (task, metric, value)
            for task in section.tasks
            if (metric := task.accuracy) is not None
            for value in metric.values
            if value.label == backend.label
        ]
        flips = [
            value.lost + value.gained for _, _, value in pairs if value.lost is not None and value.gained is not None
        ]
        asked = sum(task.samples for task, _, value in pairs if value.lost is not None)
        drops = [task.name for task, metric, value in pairs if _verdict(metric, value) < 0]
        mean, base = backend.mean_accuracy, reference.mean_accuracy
        is_other = backend is not reference
        rows.append(
            [
                backend.label,
                share(mean),
                f"{100 * (mean - base):+.2f}" if is_other and mean is not None and base is not None else MISSING,
                share(sum(flips) / asked if asked else None),
                (", ".join(drops) or "none") if is_other and pairs else MISSING,
                f"{sum(backend.seconds.values()):,.1f}",
            ]
        )
    return Table(("backend", "mean accuracy", "points", "flips", "significant drops", "seconds"), rows)


def _task_metrics(section: TaskSection) -> Table:
    rows = []
    for task in section.tasks:
        for metric in task.metrics:
            for value in metric.values:
                flips = MISSING
                if value.lost is not None and value.gained is not None:
                    flips = f"{value.lost} + {value.gained}"
                rows.append(
                    [
                        f"{task.name}, {metric.title}",
                        value.label,
                        f"{task.samples:,}",
                        share(value.value) if metric.right_or_wrong else number(value.value, ",.4g"),
                        _difference(value, metric),
                        flips,
                        number(value.mcnemar_p, ".3f"),
                    ]
                )
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


_PAGES: dict[type[Any], Callable[[Any], Page]] = {
    PerplexitySection: perplexity_page,
    TaskSection: task_page,
    FidelitySection: fidelity_page,
    RetrievalSection: retrieval_page,
    StressSection: stress_page,
}


def page_of(section: Any) -> Page:
    """The page of a section of any kind."""
    return _PAGES[type(section)](section)


def all_pages(report: Report) -> list[Page]:
    """The pages of all sections."""
    return [page_of(section) for name in SECTIONS for section in getattr(report, name)]
