"""Draw how a call runs on a GPU: what is read, launched and written (docs/figures/pipeline.png)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import matplotlib as mpl

mpl.use("Agg")

import typer
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

TENSOR, KERNEL, WRITTEN = "#ececec", "#f6c9a5", "#cfe8f6"
WIDTH, HEIGHT = 2.9, 0.8

BOXES = {
    "output": (7.0, 3.9, "output\n16 bits", TENSOR),
    "query": (0.0, 2.6, "query\n16 bits, unpadded", TENSOR),
    "attention": (7.0, 2.6, "2. attend\nquantize queries in registers,\nread high tiles unquantized", KERNEL),
    "key, value": (0.0, 1.5, "key and value\n16 bits, unpadded", TENSOR),
    "quantize": (3.5, 0.9, "1. quantize\nread the first tile,\nsmooth, rotate, round", KERNEL),
    "low": (7.0, 0.9, "low-precision keys and values\nwith scales,\npadded to tiles", WRITTEN),
}
ARROWS = (
    ("key, value", "quantize"),
    ("quantize", "low"),
    ("low", "attention"),
    ("query", "attention"),
    ("key, value", "attention"),
    ("attention", "output"),
)


def draw_box(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    """Draw one box with its lower left corner at ``x, y``."""
    axes.add_patch(FancyBboxPatch((x, y), WIDTH, HEIGHT, boxstyle="round,pad=0.08", facecolor=color, edgecolor="0.5"))
    axes.text(x + WIDTH / 2, y + HEIGHT / 2, text, ha="center", va="center", fontsize=9)


def draw_arrow(axes: Axes, source: str, target: str) -> None:
    """Draw an arrow from the right side of a box to the left of another, or up if they stand above each other."""
    (x0, y0, *_), (x1, y1, *_) = BOXES[source], BOXES[target]
    upward = x0 == x1
    start = (x0 + WIDTH / 2, y0 + HEIGHT + 0.1) if upward else (x0 + WIDTH + 0.1, y0 + HEIGHT / 2)
    end = (x1 + WIDTH / 2, y1 - 0.1) if upward else (x1 - 0.1, y1 + HEIGHT / 2)
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color="0.35", linewidth=1))


def main(
    out: Annotated[Path, typer.Argument(help="The PNG to write.")] = Path("docs/figures/pipeline.png"),
) -> None:
    """Draw the boxes and what flows between them."""
    figure, axes = plt.subplots(figsize=(8, 3.3), dpi=150, layout="constrained")
    for x, y, text, color in BOXES.values():
        draw_box(axes, x, y, text, color)
    for source, target in ARROWS:
        draw_arrow(axes, source, target)
    axes.set(xlim=(-0.2, 10.0), ylim=(0.6, 4.9))
    axes.axis("off")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


if __name__ == "__main__":
    typer.run(main)
