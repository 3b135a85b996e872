"""Plots of results. Drawn with Matplotlib's figures alone: no window system, and no global state is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .report import format_kl
from .results import BackendResult, PerplexitySection

DPI = 150
WIDTH = 11.0  # inches
# Okabe and Ito's colours, which the colour-blind can tell apart; the reference is grey. Line styles differ as well.
REFERENCE_COLOR = "#555555"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES = ("-", "--", "-.", ":")
NOTE: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "color": "#333333"}
GRID: dict[str, Any] = {"color": "#dddddd", "linewidth": 0.8}


def plot_comparison(section: PerplexitySection, title: str, path: Path) -> None:
    """Quality of every backend, and loss and divergence by position, in one picture."""
    rows = len(section.backends) - 1
    if not rows:
        plot_positions(section, title, path)
        return
    heights = [_quality_height(rows), 4.2]
    figure = Figure(figsize=(WIDTH, sum(heights)), dpi=DPI, layout="constrained")
    (top,), (bottom,) = figure.subfigures(2, 1, squeeze=False, height_ratios=heights, hspace=0.04)
    _draw_quality(top, section)
    _draw_positions(bottom, section)
    save(figure, title, path)


def plot_quality(section: PerplexitySection, title: str, path: Path) -> None:
    """Change of perplexity, KL and disagreement of every backend against the reference."""
    figure = Figure(figsize=(WIDTH, _quality_height(len(section.backends) - 1)), dpi=DPI, layout="constrained")
    _draw_quality(figure, section)
    save(figure, title, path)


def plot_positions(section: PerplexitySection, title: str, path: Path) -> None:
    """Loss, and KL from the reference, by position in the window."""
    figure = Figure(figsize=(WIDTH, 4.6), dpi=DPI, layout="constrained")
    _draw_positions(figure, section)
    save(figure, title, path)


def _quality_height(rows: int) -> float:
    return 1.7 + 0.42 * rows


def save(figure: Figure, title: str, path: Path) -> None:
    """Give the figure its title and write it."""
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.savefig(path)


def _draw_quality(figure: FigureBase, section: PerplexitySection) -> None:
    """Three dot plots with one row per backend. Dots, since the length of a bar means nothing on a log scale."""
    reference, *others = section.backends
    axes = figure.subplots(1, 3, sharey=True)
    absolute = "" if reference.perplexity is None else f"\n({reference.label}: {reference.perplexity:,.3f})"
    colors = [color for color, _ in backend_styles(len(section.backends))][1:]
    _dots(axes[0], others, colors, lambda r: r.change_percent, lambda v: f"{v:+.2f} %", errors=True)
    axes[0].set_xlabel(f"Change of perplexity, %{absolute}")
    axes[0].axvline(0, color=REFERENCE_COLOR, linewidth=1)
    _dots(axes[1], others, colors, lambda r: r.kl_mean, format_kl)
    axes[1].set_xlabel(f"KL from {reference.label} per token, nats\n(mean)")
    if all(result.kl_mean is None or result.kl_mean > 0 for result in others):
        axes[1].set_xscale("log")
    _dots(
        axes[2],
        others,
        colors,
        lambda r: None if r.top1_agreement is None else 100 * (1 - r.top1_agreement),
        lambda v: f"{v:.2f} %",
    )
    axes[2].set_xlabel(f"Most likely token differs\nfrom {reference.label}, % of tokens")
    axes[0].set_yticks(range(len(others)), [r.label + (" (failed)" if r.failure else "") for r in others])
    axes[0].set_ylim(len(others) - 0.4, -0.6)
    for ax in axes:
        ax.margins(x=0.3)
    axes[2].set_xlim(left=max(axes[2].get_xlim()[0], -0.08 * axes[2].get_xlim()[1]))  # no share is below 0
    for ax in axes:
        ax.tick_params(axis="y", length=0)


def _dots(
    ax: Axes,
    results: Sequence[BackendResult],
    colors: Sequence[str],
    value_of: Callable[[BackendResult], float | None],
    text_of: Callable[[float], str],
    *,
    errors: bool = False,
) -> None:
    tidy(ax)
    for row, (result, color) in enumerate(zip(results, colors, strict=True)):
        value = value_of(result)
        if value is None:
            continue
        error = result.change_stderr if errors else None
        ax.errorbar(value, row, xerr=error, fmt="o", color=color, markersize=8, capsize=3, elinewidth=1.5)
        ax.annotate(text_of(value), (value, row), xytext=(0, 8), ha="center", **NOTE)


def _draw_positions(figure: FigureBase, section: PerplexitySection) -> None:
    reference, *others = section.backends
    has_kl = any(result.position_kl for result in others)
    axes = figure.subplots(1, 2 if has_kl else 1, squeeze=False)[0]
    edges = section.position_edges
    centers = [(low + high - 1) / 2 for low, high in pairwise(edges)]
    for result, (color, line) in zip(section.backends, backend_styles(len(section.backends)), strict=True):
        width = 2.4 if result is reference else 1.5
        if result.position_nll:
            axes[0].plot(centers, _gaps(result.position_nll), line, color=color, linewidth=width, label=result.label)
        if has_kl and result.position_kl and result is not reference:
            axes[1].plot(centers, _gaps(result.position_kl), line, color=color, linewidth=1.5, label=result.label)
    axes[0].set_ylabel("Loss, nats per token")
    if has_kl:
        axes[1].set_ylabel(f"KL from {reference.label}, nats per token")
        if all(value is None or value > 0 for result in others for value in result.position_kl):
            axes[1].set_yscale("log")
    for ax in axes:
        tidy(ax)
        ax.set_xlabel("Position in the window, tokens")
        ax.set_xlim(0, section.context)
        ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=True))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))

    if axes[0].get_legend_handles_labels()[0]:
        legend_below(figure, axes[0])


def legend_below(figure: FigureBase, ax: Axes) -> None:
    """Put the legend of one plot below all, where it hides nothing."""
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def backend_styles(count: int) -> list[tuple[str, str]]:
    """Colour and line style of each of ``count`` backends; the reference is the first."""
    styles = zip(cycle(COLORS), cycle(LINES), strict=False)
    return [(REFERENCE_COLOR, "-"), *(next(styles) for _ in range(count - 1))]


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def tidy(ax: Axes) -> None:
    """A grid behind the data, and no more frame than two axes."""
    ax.grid(True, **GRID)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
