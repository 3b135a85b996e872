"""Tables and plots of prefill timings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich import box
from rich.markup import escape
from rich.table import Table

from .plots import COLORS, DPI, GRID, LINES, REFERENCE_COLOR, WIDTH
from .speed_results import PrefillResult

PANEL_HEIGHT = 3.6  # inches
HEADERS = ("tokens", "implementation", "ms", "as graph", "quantising", "TFLOP/s", "speed", "error", "extra memory")


def tables(results: Sequence[PrefillResult]) -> list[Table]:
    """Return a table for each family of shapes."""
    made = []
    for family, members in _families(results).items():
        table = Table(title=family, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for header in HEADERS:
            table.add_column(header, justify="left" if header == "implementation" else "right")
        previous = None
        for result in members:
            length = result.shape.length
            if previous not in (None, length):
                table.add_section()
            name = escape(result.label)
            tokens = f"{length:,}" if length != previous else ""
            previous = length
            table.add_row(tokens, name, *_cells(result), style="red" if result.failure else "")
        made.append(table)
    return made


def failures(results: Sequence[PrefillResult]) -> list[str]:
    """Return a line for each implementation and reason that it did not run for, with the shapes."""
    shapes: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.failure is not None:
            shape = f"{result.shape.length:,} tokens, {result.shape.family}"
            shapes.setdefault((result.label, result.failure), []).append(shape)
    return [
        f"{label} did not run: {failure} ({found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''})"
        for (label, failure), found in shapes.items()
    ]


def _cells(result: PrefillResult) -> tuple[str, ...]:
    extra = "–"
    if result.extra_bytes is not None and result.input_bytes:
        extra = f"{result.extra_bytes / result.input_bytes:.2f} of QKV"
    quantizing = _number(result.quantize_milliseconds, ".3f")
    if result.quantize_milliseconds is not None and result.quantize_copy_milliseconds:
        quantizing += f" ({result.quantize_milliseconds / result.quantize_copy_milliseconds:.2f} copies)"
    return (
        _number(result.milliseconds, ".3f"),
        _number(result.graph_milliseconds, ".3f"),
        quantizing,
        _number(result.tflops, ",.0f" if (result.tflops or 0) >= 10 else ".3f"),
        _number(result.speedup, ".2f") + ("" if result.speedup is None else "x"),
        _number(result.error, ".4f"),
        extra,
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def plot_prefill(results: Sequence[PrefillResult], title: str, path: Path) -> None:
    """Draw the speed of every implementation over the length, a panel for each family of shapes.

    Short calls are drawn as CUDA graphs: called from Python, some of them take as long as their launches.
    """
    families = _families(results)
    columns = 1 if len(families) == 1 else 2
    rows = -(-len(families) // columns)
    figure = Figure(figsize=(WIDTH, PANEL_HEIGHT * rows + 0.6), dpi=DPI, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    labels = list(dict.fromkeys(result.label for result in results))
    colors, lines = cycle(COLORS), cycle(LINES)
    styles = {label: (REFERENCE_COLOR, "-") if label == labels[0] else (next(colors), next(lines)) for label in labels}
    for ax, (family, members) in zip(axes, families.items(), strict=False):
        for label in labels:
            found = [(r.shape.length, _speed(r)) for r in members if r.label == label]
            points = [(length, speed) for length, speed in found if speed is not None]
            if points:
                color, line = styles[label]
                ax.plot(*zip(*points, strict=True), line, color=color, marker="o", markersize=4, label=label)
        _dress(ax, family, sorted({r.shape.length for r in members}))
    for ax in axes[len(families) :]:
        ax.set_visible(False)
    handles, names = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 4), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.savefig(path)


def _speed(result: PrefillResult) -> float | None:
    """Return the TFLOP/s of a call: as a CUDA graph, where that was measured."""
    milliseconds = result.graph_milliseconds or result.milliseconds
    return None if milliseconds is None else result.shape.flops / milliseconds / 1e9


def _dress(ax: Axes, family: str, lengths: Sequence[int]) -> None:
    ax.set_title(family, fontsize=10)
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(round(value))))
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel("Tokens")
    ax.set_ylabel("TFLOP/s, quantisation counted", fontsize=9)
    ax.grid(True, **GRID)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _tokens(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _families(results: Sequence[PrefillResult]) -> dict[str, list[PrefillResult]]:
    families: dict[str, list[PrefillResult]] = {}
    for result in results:
        families.setdefault(result.shape.family, []).append(result)
    return families
