"""Tables and plots of speed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dma_eval.pages import MISSING, Table, number
from dma_eval.plots import DPI, WIDTH, line_styles, save, tidy

from .results import DecodeResult, GenerateResult, LongestContext, PrefillResult, ServeResult, SpeedResult

PANEL_HEIGHT = 3.6  # inches
GIB = 1 << 30
Result = TypeVar("Result", bound=SpeedResult)
Key = TypeVar("Key", bound=Hashable)


def prefill_tables(results: Sequence[PrefillResult]) -> list[Table]:
    """Return a table for each family of shapes."""
    times = ("ms", "as graph", "quantising", "TFLOP/s", "speed")
    headers = ("implementation", "tokens", *times, "error", "key outliers", "extra memory")
    return [
        Table(headers, [[r.label, f"{r.shape.length:,}", *_prefill_cells(r)] for r in members], family)
        for family, members in grouped(results, lambda r: r.shape.family).items()
    ]


def _prefill_cells(result: PrefillResult) -> list[str]:
    if result.failure is not None:
        return ["failed", *[MISSING] * 7]
    extra = MISSING
    if result.extra_bytes is not None and result.input_bytes:
        extra = f"{result.extra_bytes / result.input_bytes:.2f} of QKV"
    quantizing = number(result.quantize_milliseconds, ".3f")
    if result.quantize_milliseconds is not None and result.quantize_copy_milliseconds:
        quantizing += f" ({result.quantize_milliseconds / result.quantize_copy_milliseconds:.2f} copies)"
    return [
        number(result.milliseconds, ".3f"),
        number(result.graph_milliseconds, ".3f"),
        quantizing,
        number(result.tflops, ",.0f" if (result.tflops or 0) >= 10 else ".3f"),
        number(result.speedup, ".2f", "x"),
        number(result.error, ".4f"),
        number(result.error_with_outliers, ".4f"),
        extra,
    ]


def decode_tables(results: Sequence[DecodeResult]) -> list[Table]:
    """Return a table for each family of shapes."""
    headers = ("cache", "batch", "keys", "us", "as graph", "TB/s", "of 16 bit", "speed")
    return [
        Table(
            headers,
            [
                [
                    result.label,
                    str(result.shape.batch),
                    f"{result.shape.length:,}",
                    "failed" if result.failure is not None else number(result.milliseconds, ".1f", factor=1e3),
                    number(result.graph_milliseconds, ".1f", factor=1e3),
                    number(result.bytes_per_second, ".2f", factor=1e-12),
                    number(result.bytes_ratio, ".3f"),
                    number(result.speedup, ".2f", "x"),
                ]
                for result in members
            ],
            family,
        )
        for family, members in grouped(results, lambda r: r.shape.family).items()
    ]


def generate_tables(results: Sequence[GenerateResult], longest: Sequence[LongestContext], title: str) -> list[Table]:
    """Return the table of all runs, and that of the longest contexts if they were looked for."""
    headers = ("run", "context", "first token", "step", "tokens/s", "speed", "cache", "peak")
    rows = [
        [
            result.label,
            f"{result.context:,}",
            "failed" if result.failure is not None else number(result.first_token_seconds, ".3f", " s"),
            number(result.step_milliseconds, ".2f", " ms"),
            number(result.tokens_per_second, ",.1f"),
            number(result.speedup, ".2f", "x"),
            number(result.cache_bytes, ",.2f", " GiB", factor=1 / GIB),
            number(result.peak_bytes, ",.2f", " GiB", factor=1 / GIB),
        ]
        for result in results
    ]
    tables = [Table(headers, rows, title)]
    if longest:
        tables.append(
            Table(("run", "tokens"), [[each.label, f"{each.tokens:,}"] for each in longest], "Longest context")
        )
    return tables


def serve_tables(results: Sequence[ServeResult], title: str) -> list[Table]:
    """Return the table of all runs."""
    headers = ["requests", "backend", "tokens/s", "speed", "first", "99 %", "between", "99 %"]
    headers += ["at once", "evicted", "per token", "per request"]
    rows = [
        [
            result.requests,
            result.label,
            "failed" if result.failure is not None else number(result.tokens_per_second, ",.1f"),
            number(result.speedup, ".2f", "x"),
            number(result.first_token_seconds, ".2f", " s"),
            number(result.first_token_seconds_p99, ".2f", " s"),
            number(result.between_tokens_milliseconds, ".1f", " ms"),
            number(result.between_tokens_milliseconds_p99, ".1f", " ms"),
            number(result.most_at_once, ",.0f"),
            number(result.evicted, ",.0f"),
            number(result.cache_bytes_per_token, ",.1f", " KiB", factor=1 / 1024),
            number(result.cache_bytes_per_request, ",.1f", " MiB", factor=1 / (1 << 20)),
        ]
        for result in results
    ]
    return [Table(tuple(headers), rows, title)]


def failures(results: Sequence[Result], place: Callable[[Result], object]) -> list[str]:
    """Return what did not run, or cannot be a CUDA graph, and why, once for all shapes that share the reason."""
    reasons = [
        (result, what, reason)
        for result in results
        for what, reason in (
            ("did not run", result.failure),
            ("cannot be a CUDA graph", getattr(result, "graph_failure", None)),
        )
        if reason is not None
    ]
    return [
        f"{label} {what}: {reason} ({place(found[0][0])}{f' and {len(found) - 1} more' if len(found) > 1 else ''})"
        for (label, what, reason), found in grouped(reasons, lambda each: (each[0].label, *each[1:])).items()
    ]


def plot_prefill(results: Sequence[PrefillResult], title: str, path: Path) -> None:
    """Draw the speed of every implementation over the length, a panel for each family of shapes of several lengths.

    If there is none, each family has a panel. Short calls are drawn as CUDA graphs: called from Python, some of them
    take as long as their launches.
    """
    every = grouped(results, lambda r: r.shape.family)
    families = {name: of for name, of in every.items() if len({r.shape.length for r in of}) > 1} or every
    columns = 1 if len(families) == 1 else 2
    rows = -(-len(families) // columns)
    figure = Figure(figsize=(WIDTH, PANEL_HEIGHT * rows + 0.6), dpi=DPI, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    styles = line_styles(r.label for r in results)
    for ax, (family, members) in zip(axes, families.items(), strict=False):
        _lines(ax, members, styles, lambda r: r.shape.length, _tflops)
        _dress(ax, family, {r.shape.length for r in members}, "Tokens")
        ax.set_ylabel("TFLOP/s, quantisation counted", fontsize=9)
    for ax in axes[len(families) :]:
        ax.set_visible(False)
    _legend(figure, axes[0])
    save(figure, title, path)


def plot_generate(results: Sequence[GenerateResult], title: str, path: Path) -> None:
    """Draw tokens per second, time to the first token and cache size over the context."""
    panels: dict[str, Callable[[GenerateResult], float | None]] = {
        "Tokens per second": lambda r: r.tokens_per_second,
        "Seconds to the first token": lambda r: r.first_token_seconds,
        "Cache in GiB": lambda r: None if r.cache_bytes is None else r.cache_bytes / GIB,
    }
    figure = Figure(figsize=(1.5 * WIDTH, 4.2), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, len(panels))
    for ax, (heading, read) in zip(axes, panels.items(), strict=True):
        _lines(ax, results, line_styles(r.label for r in results), lambda r: r.context, read)
        _dress(ax, heading, {r.context for r in results}, "Tokens of context")
    _legend(figure, axes[0])
    save(figure, title, path)


def plot_serve(results: Sequence[ServeResult], title: str, path: Path) -> None:
    """Draw what was measured of each set of requests as bars, one for each backend."""
    panels: dict[str, Callable[[ServeResult], float | None]] = {
        "New tokens per second": lambda r: r.tokens_per_second,
        "Seconds to the first token": lambda r: r.first_token_seconds,
        "Milliseconds between tokens": lambda r: r.between_tokens_milliseconds,
        "Most requests at once": lambda r: r.most_at_once,
    }
    sets, styles = list(dict.fromkeys(r.requests for r in results)), line_styles(r.label for r in results)
    figure = Figure(figsize=(2 * WIDTH, 4.2), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, len(panels))
    for ax, (heading, read) in zip(axes, panels.items(), strict=True):
        for index, (label, (color, _)) in enumerate(styles.items()):
            bars = {sets.index(r.requests): read(r) for r in results if r.label == label}
            places = [place + (index - (len(styles) - 1) / 2) * 0.8 / len(styles) for place in bars]
            ax.bar(places, [value or 0 for value in bars.values()], 0.8 / len(styles), color=color, label=label)
        ax.set_title(heading, fontsize=10)
        ax.set_xticks(range(len(sets)), sets, fontsize=8)
        tidy(ax)
    _legend(figure, axes[0])
    save(figure, title, path)


def grouped(items: Iterable[Any], key: Callable[[Any], Key]) -> dict[Key, list[Any]]:
    """Return the items by their key, in the order in which keys come first."""
    groups: dict[Key, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _tflops(result: PrefillResult) -> float | None:
    """Return the TFLOP/s of a call: as a CUDA graph, where that was measured."""
    milliseconds = result.graph_milliseconds or result.milliseconds
    return None if milliseconds is None else result.shape.flops / milliseconds / 1e9


def _lines(
    ax: Axes,
    results: Sequence[Result],
    styles: Mapping[str, tuple[str, str]],
    x_of: Callable[[Result], float],
    y_of: Callable[[Result], float | None],
) -> None:
    """Draw a line for each label that has a point, from left to right."""
    for label, (color, line) in styles.items():
        points = sorted((x_of(r), y) for r in results if r.label == label and (y := y_of(r)) is not None)
        if points:
            ax.plot(*zip(*points, strict=True), line, color=color, marker="o", markersize=4, label=label)


def _dress(ax: Axes, title: str, lengths: set[int], xlabel: str) -> None:
    ax.set_title(title, fontsize=10)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sorted(lengths))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(round(value))))
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel(xlabel)
    tidy(ax)


def _legend(figure: Figure, ax: Axes) -> None:
    handles, names = ax.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 4), frameon=False, fontsize=9)


def _tokens(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)
