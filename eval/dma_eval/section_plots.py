"""Plots of the sections on tasks, heads and retrieval, and of quality against speed and memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from .backends import CACHE_SUFFIX
from .plots import DPI, REFERENCE_COLOR, WIDTH, backend_styles, legend_below, save, tidy
from .results import BackendResult, FidelitySection, PerplexitySection
from .sections import RetrievalBackend, RetrievalSection, TaskSection
from .task_summary import accuracy

MARKERS = ("o", "s", "^", "D", "v", "P")
GIB = 2**30
LEAST_REACH = 1.0  # points of accuracy to each side, so that no difference looks like a large one


def plot_tasks(section: TaskSection, title: str, path: Path) -> None:
    """Difference of each task's accuracy from the reference, in points, with its interval; one row per task."""
    reference, *others = section.backends
    rows = [(task, metric) for task in section.tasks if (metric := accuracy(task)) is not None]
    figure = Figure(
        figsize=(WIDTH, 1.9 + (0.16 * len(others) + 0.24) * max(1, len(rows))), dpi=DPI, layout="constrained"
    )
    ax = figure.subplots()
    _tidy_rows(ax)
    spread = 0.6
    for index, (backend, (color, _)) in enumerate(zip(others, backend_styles(len(section.backends))[1:], strict=True)):
        offset = spread * ((index + 0.5) / len(others) - 0.5)
        for row, (_, metric) in enumerate(rows):
            value = next(value for value in metric.values if value.label == backend.label)
            if value.difference is None or value.low is None or value.high is None:
                continue
            center = 100 * value.difference
            ax.errorbar(
                center,
                row + offset,
                xerr=[[max(0.0, center - 100 * value.low)], [max(0.0, 100 * value.high - center)]],
                fmt=MARKERS[index % len(MARKERS)],
                color=color,
                markersize=5,
                capsize=2,
                elinewidth=1.3,
                label=backend.label if row == 0 else None,
            )
    ax.axvline(0, color=REFERENCE_COLOR, linewidth=1)
    labels = []
    for task, metric in rows:
        base = metric.values[0].value
        labels.append(
            f"{task.name}, {metric.name}" + ("" if base is None else f"\n{reference.label}: {100 * base:.1f} %")
        )
    ax.set_yticks(range(len(rows)), labels)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    reach = max(LEAST_REACH, *(abs(edge) for edge in ax.get_xlim()))
    ax.set_xlim(-reach, reach)
    ax.set_xlabel(
        f"Difference from {reference.label}, percentage points, with {100 * section.confidence:.0f} % intervals"
    )
    if ax.get_legend_handles_labels()[0]:
        legend_below(figure, ax)
    save(figure, f"{title}: accuracy", path)


def plot_tradeoff(sections: Sequence[PerplexitySection], title: str, path: Path) -> None:
    """Quality against speed and against memory, one point for each backend and context.

    Those that read through a cache, a tile at a time, are left out: nobody runs a model at that speed.
    """
    figure = Figure(figsize=(WIDTH, 4.6), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    labels = list(dict.fromkeys(backend.label for section in sections for backend in section.backends))
    colors = {label: color for label, (color, _) in zip(labels, backend_styles(len(labels)), strict=True)}
    for index, section in enumerate(sections):
        for backend in section.backends:
            change = 0.0 if backend is section.backends[0] else backend.change_percent
            if change is None or backend.label.endswith(CACHE_SUFFIX):
                continue
            style = {"marker": MARKERS[index % len(MARKERS)], "color": colors[backend.label], "s": 55}
            if backend.tokens_per_second is not None:
                left.scatter(backend.tokens_per_second, change, label=_point_label(backend, section, sections), **style)
            if backend.peak_memory_bytes is not None:
                right.scatter(backend.peak_memory_bytes / GIB, change, **style)
    for ax in (left, right):
        tidy(ax)
        ax.axhline(0, color=REFERENCE_COLOR, linewidth=1)
        ax.margins(0.15)
    left.set_xlabel("Tokens per second")
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    left.set_ylabel("Change of perplexity, %")
    right.set_xlabel("Peak memory, GiB")
    legend_below(figure, left)
    save(figure, f"{title}: quality against speed and memory", path)


def plot_heads(section: FidelitySection, title: str, path: Path) -> None:
    """Relative L1 error of every head of every layer, one heat map per backend."""
    shown = section.heads
    values = [np.array(heads.relative_l1) for heads in shown]
    positive = np.concatenate([value[value > 0] for value in values])
    # Errors span decades; a backend that is exact everywhere is left to show the lower end of the scale.
    low, high = (float(positive.min()), float(positive.max())) if positive.size else (1e-8, 1e-7)
    lowest = max(low, high * 1e-5)
    norm = LogNorm(lowest, max(high, lowest * 1.01))
    columns = min(len(shown), 4)
    rows = -(-len(shown) // columns)
    layers = len(values[0])
    height = 1.3 + rows * min(6.0, 1.2 + 0.13 * layers)
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    image = None
    for ax, heads, value in zip(axes, shown, values, strict=False):
        image = ax.imshow(np.maximum(value, lowest), norm=norm, aspect="auto", interpolation="nearest")
        worst = np.unravel_index(int(value.argmax()), value.shape)
        ax.set_title(f"{heads.label}\nworst: layer {worst[0]}, head {worst[1]}, {100 * value.max():.2f} %", fontsize=9)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.yaxis.get_major_locator().set_params(integer=True)
    _finish_grid(axes, len(shown), columns, "Query head")
    figure.axes[0].set_ylabel("Layer")
    if image is not None:
        bar = figure.colorbar(image, ax=figure.axes, label="Relative L1 error")
        for axis_format in (bar.ax.yaxis.set_major_formatter, bar.ax.yaxis.set_minor_formatter):
            axis_format(FuncFormatter(lambda value, _: f"{100 * value:.2g} %"))
        if high > 10 * lowest:
            bar.ax.yaxis.set_minor_formatter(NullFormatter())
    save(figure, f"{title}: error of each head's attention output", path)


def plot_retrieval(section: RetrievalSection, title: str, path: Path) -> None:
    """Share of answers that are found, by depth and length, one heat map per backend."""
    columns = min(len(section.backends), 4)
    rows = -(-len(section.backends) // columns)
    height = 1.2 + rows * (1.1 + 0.45 * len(section.depths))
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for index, (ax, backend) in enumerate(zip(axes.flat, section.backends, strict=False)):
        grid = _grid(section, backend)
        image = ax.imshow(grid, vmin=0, vmax=1, aspect="auto")
        for (row, column), value in np.ndenumerate(grid):
            if not np.isnan(value):
                color = "white" if value < 0.5 else "black"
                ax.text(column, row, f"{100 * value:.0f} %", ha="center", va="center", fontsize=9, color=color)
        ax.set_title(backend.label + (" (failed)" if backend.failure else ""), fontsize=10)
        ax.set_xticks(range(len(section.lengths)), [f"{length:,}" for length in section.lengths])
        ax.set_yticks(range(len(section.depths)), [f"{100 * depth:.0f} %" for depth in section.depths])
        if index % columns == 0:
            ax.set_ylabel("Depth of the answer")
    _finish_grid(list(axes.flat), len(section.backends), columns, "Prompt, tokens")
    figure.colorbar(image, ax=axes, label="Found, share of samples")
    save(figure, f"{title}: retrieval, {section.kind}", path)


def _finish_grid(axes: Sequence[Axes], shown: int, columns: int, xlabel: str) -> None:
    """Label the lowest of the ``shown`` heat maps in each column, which need not be in the last row; hide the rest."""
    for ax in axes[max(shown - columns, 0) : shown]:
        ax.set_xlabel(xlabel)
        ax.tick_params(labelbottom=True)
    for ax in axes[shown:]:
        ax.set_visible(False)


def _grid(section: RetrievalSection, backend: RetrievalBackend) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Share found, ``[depth, length]``; NaN where nothing was measured."""
    grid = np.full((len(section.depths), len(section.lengths)), np.nan)
    for cell in backend.cells:
        grid[section.depths.index(cell.depth), section.lengths.index(cell.length)] = cell.correct / cell.samples
    return grid


def _point_label(backend: BackendResult, section: PerplexitySection, sections: Sequence[PerplexitySection]) -> str:
    return backend.label if len(sections) == 1 else f"{backend.label}, {section.context:,}"


def _tidy_rows(ax: Axes) -> None:
    tidy(ax)
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)
