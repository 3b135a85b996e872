"""Tables and plots of generation speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich import box
from rich.markup import escape
from rich.table import Table

from .generate_results import GenerateResult, LongestContext
from .plots import COLORS, DPI, GRID, LINES, REFERENCE_COLOR, WIDTH

HEADERS = ("context", "run", "first token", "step", "tokens/s", "speed", "cache", "peak")
GIB = 1 << 30


def table(results: Sequence[GenerateResult], title: str) -> Table:
    """Return the table of all runs, a section for each context."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for header in HEADERS:
        made.add_column(header, justify="left" if header == "run" else "right")
    previous = None
    for result in results:
        if previous not in (None, result.context):
            made.add_section()
        context = f"{result.context:,}" if result.context != previous else ""
        previous = result.context
        name = escape(result.label)
        if result.failure is not None:
            made.add_row(context, name, f"[red]{escape(result.failure)[:60]}[/]")
            continue
        made.add_row(
            context,
            name,
            _number(result.first_token_seconds, ".3f", " s"),
            _number(result.step_milliseconds, ".2f", " ms"),
            _number(result.tokens_per_second, ",.1f"),
            _number(result.speedup, ".2f", "x"),
            _gib(result.cache_bytes),
            _gib(result.peak_bytes),
        )
    return made


def longest_table(longest: Sequence[LongestContext]) -> Table:
    """Return the table of the longest contexts."""
    made = Table(title="Longest context", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    made.add_column("run")
    made.add_column("tokens", justify="right")
    for each in longest:
        made.add_row(escape(each.label), f"{each.tokens:,}")
    return made


def plot(results: Sequence[GenerateResult], title: str, path: Path) -> None:
    """Draw tokens per second, time to the first token and cache size over the context."""
    labels = list(dict.fromkeys(result.label for result in results))
    colors, lines = cycle(COLORS), cycle(LINES)
    styles = {label: (REFERENCE_COLOR, "-") if label == labels[0] else (next(colors), next(lines)) for label in labels}
    figure = Figure(figsize=(1.5 * WIDTH, 4.2), dpi=DPI, layout="constrained")
    panels: dict[str, Callable[[GenerateResult], float | None]] = {
        "Tokens per second": lambda r: r.tokens_per_second,
        "Seconds to the first token": lambda r: r.first_token_seconds,
        "Cache in GiB": lambda r: None if r.cache_bytes is None else r.cache_bytes / GIB,
    }
    contexts = sorted({result.context for result in results})
    axes = figure.subplots(1, len(panels))
    for ax, (heading, read) in zip(axes, panels.items(), strict=True):
        for label in labels:
            points = [(r.context, read(r)) for r in results if r.label == label and read(r) is not None]
            if points:
                color, line = styles[label]
                ax.plot(*zip(*points, strict=True), line, color=color, marker="o", markersize=4, label=label)
        ax.set_title(heading, fontsize=10)
        ax.set_xscale("log", base=2)
        ax.set_xticks(contexts)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(value):,}"))
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
        ax.set_xlabel("Tokens of context")
        ax.grid(True, **GRID)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    handles, names = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 3), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.savefig(path)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else format(value, form) + unit


def _gib(value: int | None) -> str:
    return "–" if value is None else f"{value / GIB:,.2f} GiB"
