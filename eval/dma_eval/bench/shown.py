"""Tables and plots of speed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from dma_eval.pages import MISSING, Columns, Table, make_table, number, of
from dma_eval.plots import WIDTH, legend_below, line_styles, make_figure, save, tidy

from .results import DecodeResult, GenerateResult, LongestContext, PrefillResult, ServeResult, SpeedResult

PANEL_HEIGHT = 3.6  # inches
GIB = 1 << 30
Result = TypeVar("Result", bound=SpeedResult)
Key = TypeVar("Key", bound=Hashable)


def prefill_tables(results: Sequence[PrefillResult]) -> list[Table]:
    """Return a table for each family of shapes."""
    columns: Columns = {
        "implementation": lambda r: r.label,
        "tokens": lambda r: f"{r.shape.length:,}",
        "ms": of("milliseconds", ".3f"),
        "as graph": of("graph_milliseconds", ".3f"),
        "isolated": of("sustained_milliseconds", ".3f"),
        "quantizing": of("quantize_milliseconds", ".3f"),
        "TFLOP/s": lambda r: number(r.tflops, ",.0f" if (r.tflops or 0) >= 10 else ".3f"),
        "speed": of("speedup", ".2f", "x"),
        "error": of("error", ".4f"),
        "key outliers": of("error_with_outliers", ".4f"),
        "skipped": of("skipped_share", ".1f", " %", factor=100.0),
        "extra memory": lambda r: MISSING if r.extra_bytes is None else f"{r.extra_bytes / r.input_bytes:.2f} of QKV",
    }
    tables = []
    for family, members in grouped(results, lambda r: r.shape.family).items():
        is_random = members[0].shape.inputs is None
        left_out = set() if is_random else {"key outliers"}
        left_out |= {"skipped"} if all(r.skipped_share is None for r in members) else set()
        shown = {name: cell for name, cell in columns.items() if name not in left_out}
        tables.append(make_table(shown, members, f"{family}, dense random inputs" if is_random else family))
    return tables


def decode_tables(results: Sequence[DecodeResult]) -> list[Table]:
    """Return a table for each family of shapes."""
    columns: Columns = {
        "cache": lambda r: r.label,
        "batch": lambda r: str(r.shape.batch),
        "keys": lambda r: f"{r.shape.length:,}",
        "us": of("milliseconds", ".1f", factor=1e3),
        "as graph": of("graph_milliseconds", ".1f", factor=1e3),
        "TB/s": of("bytes_per_second", ".2f", factor=1e-12),
        "of 16 bit": of("bytes_ratio", ".3f"),
        "speed": of("speedup", ".2f", "x"),
    }
    families = grouped(results, lambda r: r.shape.family)
    return [make_table(columns, members, family) for family, members in families.items()]


def generate_tables(results: Sequence[GenerateResult], longest: Sequence[LongestContext], title: str) -> list[Table]:
    """Return the table of all runs, and that of the longest contexts if they were looked for."""
    columns: Columns = {
        "run": lambda r: r.label,
        "context": lambda r: f"{r.context:,}",
        "first token": of("first_token_seconds", ".3f", " s"),
        "step": of("step_milliseconds", ".2f", " ms"),
        "tokens/s": of("tokens_per_second", ",.1f"),
        "speed": of("speedup", ".2f", "x"),
        "cache": of("cache_bytes", ",.2f", " GiB", factor=1 / GIB),
        "peak": of("peak_bytes", ",.2f", " GiB", factor=1 / GIB),
    }
    reached = Table(("run", "tokens"), [[each.label, f"{each.tokens:,}"] for each in longest], "Longest context")
    return [make_table(columns, results, title), *([reached] if longest else [])]


def serve_tables(results: Sequence[ServeResult], title: str) -> list[Table]:
    """Return the table of all runs."""
    columns: Columns = {
        "requests": lambda r: r.requests,
        "backend": lambda r: r.label,
        "tokens/s": of("tokens_per_second", ",.1f"),
        "speed": of("speedup", ".2f", "x"),
        "first": of("first_token_seconds", ".2f", " s"),
        "first 99 %": of("first_token_seconds_p99", ".2f", " s"),
        "between": of("between_tokens_milliseconds", ".1f", " ms"),
        "between 99 %": of("between_tokens_milliseconds_p99", ".1f", " ms"),
        "at once": of("most_at_once", ",.0f"),
        "evicted": of("evicted", ",.0f"),
        "per token": of("cache_bytes_per_token", ",.1f", " KiB", factor=1 / 1024),
        "per request": of("cache_bytes_per_request", ",.1f", " MiB", factor=1 / (1 << 20)),
    }
    return [make_table(columns, results, title)]


def failures(results: Sequence[Result], place: Callable[[Result], object]) -> list[str]:
    """Return what did not run, or cannot be a CUDA graph, and why, once for all shapes that share the reason."""
    reasons: dict[tuple[str, str, str], list[object]] = {}
    for result in results:
        graph = getattr(result, "graph_failure", None)
        for what, reason in (("did not run", result.failure), ("cannot be a CUDA graph", graph)):
            if reason is not None:
                reasons.setdefault((result.label, what, reason), []).append(place(result))
    return [
        f"{label} {what}: {reason} ({places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''})"
        for (label, what, reason), places in reasons.items()
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
    figure = make_figure(PANEL_HEIGHT * rows + 0.6)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    styles = line_styles(r.label for r in results)
    for ax, (family, members) in zip(axes, families.items(), strict=False):
        _lines(ax, members, styles, lambda r: r.shape.length, _tflops)
        _dress(ax, family.replace(", inputs of", "\ninputs of"), {r.shape.length for r in members}, "Tokens")
        ax.set_ylabel("TFLOP/s, quantization counted", fontsize=9)
    for ax in axes[len(families) :]:
        ax.set_visible(False)
    legend_below(figure, axes[0])
    save(figure, title, path)


def plot_generate(results: Sequence[GenerateResult], title: str, path: Path) -> None:
    """Draw tokens per second, time to the first token and cache size over the context."""
    panels: dict[str, Callable[[GenerateResult], float | None]] = {
        "Tokens per second": lambda r: r.tokens_per_second,
        "Seconds to the first token": lambda r: r.first_token_seconds,
        "Cache in GiB": lambda r: None if r.cache_bytes is None else r.cache_bytes / GIB,
    }
    figure = make_figure(4.2, 1.5 * WIDTH)
    axes = figure.subplots(1, len(panels))
    for ax, (heading, read) in zip(axes, panels.items(), strict=True):
        _lines(ax, results, line_styles(r.label for r in results), lambda r: r.context, read)
        _dress(ax, heading, {r.context for r in results}, "Tokens of context")
    legend_below(figure, axes[0])
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
    figure = make_figure(4.2, 2 * WIDTH)
    axes = figure.subplots(1, len(panels))
    for ax, (heading, read) in zip(axes, panels.items(), strict=True):
        for index, (label, (color, _)) in enumerate(styles.items()):
            bars = {sets.index(r.requests): read(r) for r in results if r.label == label}
            places = [place + (index - (len(styles) - 1) / 2) * 0.8 / len(styles) for place in bars]
            ax.bar(places, [value or 0 for value in bars.values()], 0.8 / len(styles), color=color, label=label)
        ax.set_title(heading, fontsize=10)
        ax.set_xticks(range(len(sets)), sets, fontsize=8)
        tidy(ax)
    legend_below(figure, axes[0])
    save(figure, title, path)


def grouped(items: Iterable[Any], key: Callable[[Any], Key]) -> dict[Key, list[Any]]:
    """Return the items by their key, in the order in which keys come first."""
    groups: dict[Key, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _tflops(result: PrefillResult) -> float | None:
    """Return the TFLOP/s of a call: as a CUDA graph, where that was measured."""
    if result.tflops is None or result.milliseconds is None:
        return None
    return result.tflops * result.milliseconds / (result.graph_milliseconds or result.milliseconds)


def _lines(
    ax: Axes,
    results: Sequence[Result],
    styles: Mapping[str, tuple[str, str]],
    x_of: Callable[[Result], float],
    y_of: Callable[[Result], float | None],
) -> None:
    for label, (color, line) in styles.items():
        points = sorted((x_of(r), y) for r in results if r.label == label and (y := y_of(r)) is not None)
        if points:
            ax.plot(*zip(*points, strict=True), line, color=color, marker="o", markersize=4, label=label)


def _dress(ax: Axes, title: str, lengths: set[int], xlabel: str) -> None:
    ax.set_title(title, fontsize=10)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sorted(lengths))
    tokens = FuncFormatter(lambda value, _: f"{value:.0f}" if round(value) % 1024 else f"{value / 1024:.0f}K")
    ax.xaxis.set_major_formatter(tokens)
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel(xlabel)
    tidy(ax)
