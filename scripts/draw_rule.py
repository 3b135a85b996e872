"""Draw the rule: which key tiles are high, low and unseen for each query tile (docs/figures/rule.png)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import matplotlib as mpl

mpl.use("Agg")

import typer
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

HIGH, LOW, UNSEEN = "#d55e00", "#56b4e9", "#ececec"


def draw(axes: Axes, tiles: int, diagonal_tiles: int, sink_tiles: int, is_causal: bool) -> None:
    """Draw one square of ``tiles`` by ``tiles`` tiles, queries down and keys across."""
    for i in range(tiles):
        for j in range(tiles):
            near = i - diagonal_tiles <= j <= i if is_causal else abs(i - j) <= diagonal_tiles
            color = UNSEEN if is_causal and j > i else HIGH if near or j < sink_tiles else LOW
            axes.add_patch(Rectangle((j, i), 1, 1, facecolor=color, edgecolor="white", linewidth=1.5))
    axes.set(xlim=(0, tiles), ylim=(tiles, 0), aspect="equal", xlabel="key tile J (128 keys)", ylabel="query tile I")
    axes.set_xticks([t + 0.5 for t in range(tiles)], [str(t) for t in range(tiles)])
    axes.set_yticks([t + 0.5 for t in range(tiles)], [str(t) for t in range(tiles)])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def main(
    out: Annotated[Path, typer.Argument(help="The PNG to write.")] = Path("docs/figures/rule.png"),
    tiles: Annotated[int, typer.Option(help="Tiles on a side.")] = 10,
) -> None:
    """Draw the causal and the bidirectional rule side by side with the default band."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 5.3), dpi=150, layout="constrained")
    draw(left, tiles, diagonal_tiles=1, sink_tiles=1, is_causal=True)
    draw(right, tiles, diagonal_tiles=1, sink_tiles=1, is_causal=False)
    left.set_title("causal")
    right.set_title("bidirectional")
    figure.legend(
        handles=[
            Patch(facecolor=HIGH, label="high precision: the band and the sink tile"),
            Patch(facecolor=LOW, label="low-bit: everything else that is visible"),
            Patch(facecolor=UNSEEN, label="not visible"),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


if __name__ == "__main__":
    typer.run(main)
