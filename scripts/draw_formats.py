"""Draw what the block formats can represent, and what ceil and floor scales do to it (docs/figures/formats.png).

The levels are read off the quantiser itself: a block that holds a sweep of numbers up to its largest one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import matplotlib as mpl

mpl.use("Agg")

import torch
import typer
from dma_kernels import BLOCK_FORMATS, quantize
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from torch import Tensor

LEVEL, FLOOR, CEIL = "#0072b2", "#d55e00", "#009e73"
STEPS = 4001
LARGEST = 7.5  # E2M1 ends at 6: floor saturates, ceil doubles the scale


def quantized(x: Tensor, name: str, rounding: str, largest: float) -> Tensor:
    """Return each number of ``x`` as a block stores it whose largest magnitude is ``largest``."""
    blocks = torch.zeros(len(x), BLOCK_FORMATS[name].block_size)
    blocks[:, 0], blocks[:, 1] = x, largest
    scaling = {} if name == "nvfp4" else {"scale_rounding": rounding}
    head = {"global_scale": torch.ones(1, 1)} if name == "nvfp4" else {}
    return quantize(blocks, name, **scaling, **head).dequantize()[:, 0]


def draw_levels(axes: Axes) -> None:
    """Draw the non-negative numbers that a block has whose largest one is 1, a row for each format."""
    x = torch.linspace(0, 1, STEPS)
    for row, (name, fmt) in enumerate(BLOCK_FORMATS.items()):
        levels = quantized(x, name, "ceil", 1.0).unique()
        axes.eventplot(levels.tolist(), lineoffsets=row, linelengths=0.7, linewidths=0.8, colors=LEVEL)
        axes.text(1.07, row, f"{len(levels)} numbers, {fmt.bits_per_element:g} bits each", va="center")
    axes.set_yticks(range(len(BLOCK_FORMATS)), [name.upper() for name in BLOCK_FORMATS])
    axes.set(xlim=(-0.02, 1.55), title="Magnitudes that a block can hold, over its largest")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_bounds(0, 1)
    axes.tick_params(axis="y", length=0)


def draw_rounding(axes: Axes) -> None:
    """Draw what an MXFP4 block makes of each number, under both ways to choose its scale."""
    x = torch.linspace(0, LARGEST, STEPS)
    for rounding, color in (("floor", FLOOR), ("ceil", CEIL)):
        axes.plot(x, quantized(x, "mxfp4", rounding, LARGEST), color=color, label=rounding, linewidth=1.6)
    axes.plot(x, x, color="0.7", linewidth=0.8, linestyle="--", zorder=0)
    axes.set(xlabel="value", ylabel="as stored", title=f"MXFP4, largest value {LARGEST:g}")
    axes.legend(frameon=False, title="scale_rounding")


def main(
    out: Annotated[Path, typer.Argument(help="The PNG to write.")] = Path("docs/figures/formats.png"),
) -> None:
    """Draw both panels."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7.5, 5.6), dpi=150, layout="constrained")
    draw_levels(top)
    draw_rounding(bottom)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


if __name__ == "__main__":
    typer.run(main)
