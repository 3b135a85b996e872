"""Draw where a cache holds which keys of a row, by position (docs/figures/cache.png)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import matplotlib as mpl

mpl.use("Agg")

import typer
from dma_kernels import TILE
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

RAW, LOW, EMPTY = "#d55e00", "#56b4e9", "#f4f4f4"
SINKS, BAND, SLACK = 1, 1, 2
ROWS = ("quantized KV: complete tiles, each encoded once", "sink: 16 bits", "residual KV: 16 bits, a ring of tiles")


def tiles_of(store: int, length: int) -> dict[int, float]:
    """Return which tiles a store holds when ``length`` keys have come, and how full each is."""
    newest = (length - 1) // TILE
    full = {tile: min(1.0, length / TILE - tile) for tile in range(newest + 1)}
    if store == 0:
        return {tile: part for tile, part in full.items() if part == 1.0}
    if store == 1:
        return {tile: part for tile, part in full.items() if tile < SINKS}
    return {tile: part for tile, part in full.items() if tile > newest - BAND - SLACK}


def draw(axes: Axes, length: int, tiles: int) -> None:
    """Draw the three stores over the positions of a row."""
    for row in range(len(ROWS)):
        held = tiles_of(row, length)
        for tile in range(tiles):
            axes.add_patch(Rectangle((tile, row), 1, 0.8, facecolor=EMPTY, edgecolor="white", linewidth=1.5))
            if tile in held:
                color = LOW if row == 0 else RAW
                axes.add_patch(Rectangle((tile, row), held[tile], 0.8, facecolor=color, edgecolor="white", lw=1.5))
    axes.axvline(length / TILE, color="0.2", linewidth=1, linestyle="--")
    axes.text(length / TILE + 0.08, -0.12, "next key", fontsize=8, va="bottom")
    axes.set(xlim=(0, tiles), ylim=(len(ROWS), -0.35), xlabel=f"tile ({TILE} positions)")
    axes.set_xticks([t + 0.5 for t in range(tiles)], [str(t) for t in range(tiles)])
    axes.set_yticks([r + 0.4 for r in range(len(ROWS))], ROWS)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def main(
    out: Annotated[Path, typer.Argument(help="The PNG to write.")] = Path("docs/figures/cache.png"),
    length: Annotated[int, typer.Option(help="Keys that have come.")] = 1088,
    tiles: Annotated[int, typer.Option(help="Tiles on the axis.")] = 12,
) -> None:
    """Draw a row in the middle of decoding."""
    figure, axes = plt.subplots(figsize=(10, 2.5), dpi=150, layout="constrained")
    draw(axes, length, tiles)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


if __name__ == "__main__":
    typer.run(main)
