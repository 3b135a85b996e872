"""Plots of results, drawn with Matplotlib figures. They need no display and change no global state."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import cycle, pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import MaxNLocator

from dma_eval.results import PerplexitySection

REFERENCE_COLOR = "#555555"
COLORS = {
    "balanced": "#0072B2",
    "fp4": "#D55E00",
    "paper": "#009E73",
    "balanced+int8": "#56B4E9",
    "balanced+int4": "#CC79A7",
    "sdpa": "#999999",  # where it is not the reference
    "sdpa:flash": "#E69F00",
    "sdpa:cudnn": "#666633",
    "sdpa:dynamic": "#CCBB44",
    "flex": "#332288",
    "fa3": "#882255",
    "fa3:fp8": "#AA4499",
    "sim_fa3_fp8": "#AA4499",
    "sage": "#88AA00",
    "sim_sage": "#88AA00",
    "quanto": "#7A4A1E",
    "hqq": "#DD9977",
    "fp8": "#000000",
    "sim_fp8_cache": "#000000",
}
"""The colour of each preset and implementation in all plots. The first five are Okabe and Ito's."""
OTHER_COLORS = ("#661100", "#999933", "#AA4466", "#6699CC", "#44AA99", "#88CCEE")
DASHES = ("-", "--", "-.", ":")
SQUEEZING = 8.0  # ratio of the largest value to the median above which an axis is symlog
LEAST_LINEAR = 0.05


def tidy(ax: Axes) -> None:
    """Draw a grid below the data and two axes only."""
    ax.grid(True, color="#dddddd", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def legend_below(figure: FigureBase, ax: Axes) -> None:
    """Put the legend of one plot below all plots."""
    handles, names = ax.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def line_styles(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return a distinct colour and line style for each label. The reference, which is the first, is grey."""
    first, *others = dict.fromkeys(labels)
    rest = cycle(OTHER_COLORS)
    styles = {first: (REFERENCE_COLOR, "-")}
    for label in others:
        color = _color(label) or next(rest)
        free = (line for line in DASHES if (color, line) not in styles.values())
        styles[label] = (color, next(free, "-"))
    return styles


def _color(label: str) -> str | None:
    """Return the colour of a backend. Bit widths of a Transformers cache share one, and so do cache classes of ours."""
    name = label.partition(" ")[0].removeprefix("dma_mxfp:").replace("dma_mxfp", "balanced")
    name = re.sub(r"[+-](static|dynamic)$", "", name)
    return COLORS.get(re.sub(r"^(?:sdpa[:+])?(quanto|hqq|fp8)\d*$", r"\1", name))


def _fit(ax: Axes, values: Iterable[float | None]) -> None:
    """Make the y axis symlog if one large value would squeeze all others."""
    sizes = sorted(abs(value) for value in values if value)
    if sizes and sizes[-1] > max(LEAST_LINEAR, SQUEEZING * sizes[len(sizes) // 2]):
        ax.set_yscale("symlog", linthresh=max(sizes[len(sizes) // 2], LEAST_LINEAR))
        ax.yaxis.set_major_formatter("{x:g}")


def plot_positions(section: PerplexitySection, title: str) -> Figure:
    figure = Figure(figsize=(11.0, 4.6), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    reference, *others = section.backends
    has_kl = any(result.position_kl for result in others)
    axes = figure.subplots(1, 2 if has_kl else 1, squeeze=False)[0]
    centers = [(low + high - 1) / 2 for low, high in pairwise(section.position_edges)]
    losses = {each.label: np.array(each.position_nll, float) for each in section.backends if each.position_nll}
    is_compared = bool(others) and reference.label in losses  # else the losses themselves are shown
    changes: list[float] = []
    styles = line_styles(result.label for result in section.backends).values()
    for result, (color, line) in zip(section.backends, styles, strict=True):
        width = 2.4 if result is reference else 1.5
        if result.label in losses:
            base = losses.get(result.reference or reference.label, np.nan) if is_compared else 0.0
            change = losses[result.label] - base
            changes += change[np.isfinite(change)].tolist()
            axes[0].plot(centers, change, line, color=color, linewidth=width, label=result.label)
        if has_kl and result.position_kl and result is not reference:
            values = np.array([value or None for value in result.position_kl], float)  # the scale is a logarithm
            axes[1].plot(centers, values, line, color=color, linewidth=1.5, label=result.label)
    loss = f"Loss minus that of {reference.label}" if is_compared else "Loss"
    axes[0].set_ylabel(f"{loss}, nats per token")
    if is_compared:
        _fit(axes[0], changes)
    if has_kl:
        axes[1].set_ylabel(f"KL from {reference.label}, nats per token")
        if any(value for result in others for value in result.position_kl):
            axes[1].set_yscale("log")
    for ax in axes:
        tidy(ax)
        ax.set_xlabel("Position in the window, tokens")
        ax.set_xlim(0, section.context)
        ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=True))
        ax.xaxis.set_major_formatter("{x:,.0f}")
    legend_below(figure, axes[0])
    return figure
