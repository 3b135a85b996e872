"""Draw the figures of the documentation.

    python scripts/draw_figures.py rule formats

Without names it draws all figures. The formats and the transforms are computed by the library itself, and the charts
of speed come from the files in benchmarks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import update_docs
from dma_eval.load.data import load_text
from dma_eval.load.models import load_model
from dma_eval.show.plots import legend_below, line_styles, tidy
from dma_kernels import BLOCK_FORMATS, Recipe, hadamard_rotate, key_mean, quantize
from dma_kernels.reference.skipping import is_high_tile
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from kernel_bench.capture import capture_layers  # noqa: E402 (needs the path)

ASSETS, FIGURES_FOLDER = ROOT / "eval/dma_eval/assets", ROOT / "docs/figures"
HIGH, LOW, HIDDEN = "#d55e00", "#56b4e9", "#ececec"


def _panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, Any]:
    return plt.subplots(rows, columns, figsize=(width, height), dpi=150, layout="constrained", **options)


def draw_rule() -> Figure:
    """docs/figures/rule.png: which key tiles are high, low and not visible for each query tile."""
    colors = {
        "high precision: the band and the sink tile": HIGH,
        "low-bit: everything else that is visible": LOW,
        "not visible": HIDDEN,
    }
    tile = torch.arange(10)
    figure, panels = _panels(1, 2, 9, 5.3)
    for axes, title in zip(panels, ("causal", "bidirectional"), strict=True):
        kinds = (~is_high_tile(tile[:, None], tile, Recipe(), is_causal=title == "causal")).int()
        if title == "causal":
            kinds[tile > tile[:, None]] = 2
        style = {"vmin": 0, "vmax": 2, "edgecolors": "white", "linewidth": 1.5}
        axes.pcolormesh(kinds, cmap=ListedColormap(list(colors.values())), **style)
        axes.set(ylim=(len(tile), 0), aspect="equal", title=title)
        axes.set(xlabel="key tile J (128 keys)", ylabel="query tile I")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(tile + 0.5, map(str, tile.tolist()))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    handles = [Patch(facecolor=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(colors), frameon=False)
    return figure


def _in_block(x: Tensor, name: str, rounding: str, largest: float) -> Tensor:
    """Return each number of ``x`` as a block stores it whose largest magnitude is ``largest``."""
    blocks = torch.zeros(len(x), BLOCK_FORMATS[name].block_size)
    blocks[:, 0], blocks[:, 1] = x, largest
    options: Any = {"global_scale": torch.ones(1, 1)} if name == "nvfp4" else {"scale_rounding": rounding}
    return quantize(blocks, name, **options).dequantize()[:, 0]


def draw_formats() -> Figure:
    """docs/figures/formats.png: what the block formats can represent, and what ceil and floor scales do to it."""
    figure, (top, bottom) = _panels(2, 1, 7.5, 5.6)
    x = torch.linspace(0, 1, 4001)
    for row, (name, form) in enumerate(BLOCK_FORMATS.items()):
        levels = _in_block(x, name, "ceil", 1.0).unique()
        top.eventplot(levels.tolist(), lineoffsets=row, linelengths=0.7, linewidths=0.8, colors="#0072b2")
        top.text(1.07, row, f"{len(levels)} numbers, {form.bits_per_element:g} bits each", va="center")
    top.set_yticks(range(len(BLOCK_FORMATS)), [name.upper() for name in BLOCK_FORMATS])
    top.set(xlim=(-0.02, 1.55), title="Magnitudes of a block, relative to its largest value")
    top.set_xticks([0, 0.25, 0.5, 0.75, 1])
    top.spines[["top", "right", "left"]].set_visible(False)
    top.spines["bottom"].set_bounds(0, 1)
    top.tick_params(axis="y", length=0)
    largest = 7.5  # E2M1 ends at 6: floor saturates, ceil doubles the scale
    x = largest * x
    for rounding, color in (("floor", HIGH), ("ceil", "#009e73")):
        bottom.plot(x, _in_block(x, "mxfp4", rounding, largest), color=color, label=rounding, linewidth=1.6)
    bottom.plot(x, x, color="0.7", linewidth=0.8, linestyle="--", zorder=0)
    bottom.set(xlabel="value", ylabel="stored value", title=f"MXFP4, largest value {largest:g}")
    bottom.legend(frameon=False, title="scale_rounding")
    return figure


def draw_transforms() -> Figure:
    """docs/figures/transforms.png: what smoothing and rotation do to the keys of a head of the demo model."""
    loaded = load_model(str(ASSETS / "demo_model"), dtype="float32", device="cpu")
    ids = loaded.tokenize(load_text(str(ASSETS / "heldout.txt")).content).ids[:512]
    layer = capture_layers(loaded, ids[None], [1])[1]
    query, key = layer.query[:, :1], layer.key[:, :1]
    true = query @ key.mT
    smooth = key - key_mean(key)
    rotated = hadamard_rotate(smooth)
    figure, panels = _panels(1, 3, 11, 3.9, sharey=True)
    shown = {"unchanged": (query, key), "smooth_k": (query, smooth)}
    shown["smooth_k and rotate"] = hadamard_rotate(query), rotated
    for axes, (title, (queries, keys)) in zip(panels, shown.items(), strict=True):
        difference = quantize(queries, "nvfp4").dequantize() @ quantize(keys, "nvfp4").dequantize().mT - true
        difference -= difference.mean(-1, keepdim=True)  # softmax ignores a constant per query
        error = float(difference.norm() / (true - true.mean(-1, keepdim=True)).norm())
        image = axes.imshow(keys[0, 0, :128].abs(), vmin=0, vmax=float(key.abs().max()), aspect="auto")
        axes.set(title=f"{title}\nNVFP4 scores: error {error:.1%}", xlabel="channel")
    panels[0].set_ylabel("token")
    figure.colorbar(image, ax=panels, label="magnitude of the key", shrink=0.85)
    return figure


OURS, THEIRS, BASE = "#0072B2", "#777777", "#222222"


def _dot(axes: Axes, x: float, y: float, name: str, color: str, shift: tuple[int, int], *, size: int = 55) -> None:
    axes.scatter([x], [y], color=color, s=size, zorder=2)
    axes.annotate(name, (x, y), xytext=shift, textcoords="offset points", fontsize=9, color=color)


def draw_speed_loss() -> Figure:
    """docs/figures/speed-loss.png: prefill attention on a model's own inputs, and decoding steps over caches."""
    figure, (left, right) = _panels(1, 2, 10, 3.9)
    files = "prefill-real-32k-h100", "decode-h200", "decode-peers-h200"
    prefill, own, peers = (update_docs.of_case(file, "32K") for file in files)
    times = prefill["milliseconds"]
    points = dict(zip(times.index, zip(prefill["error"], times["fa3"] / times, strict=True), strict=True))
    _dot(left, *points["fa3"], "FlashAttention-3\nbf16", BASE, (6, -22))
    _dot(left, *points["fa3:fp8"], "FlashAttention-3 FP8", THEIRS, (-52, 10))
    _dot(left, *points["cudnn:fp8"], "cuDNN FP8", THEIRS, (-24, -16))
    skipping = {f"skip_threshold {t}": points[f"dma_mxfp:t{t}"] for t in (8, 7, 6, 5)}
    balanced = points["dma_mxfp:balanced"]
    left.plot(*zip(balanced, *skipping.values(), strict=True), color=OURS, linewidth=1.2, zorder=1)
    for name, point in skipping.items():
        _dot(left, *point, name, OURS, (8, -4), size=28)
    _dot(left, *balanced, "dma-hf balanced (default)", OURS, (-62, -17))
    left.set(xscale="log", xlim=(0.001, 0.13), ylim=(0.9, 1.65), ylabel="speed, times FlashAttention-3 bf16")
    left.set_xlabel("error of the attention output, relative to fp64")
    left.set_title("Prefill, 32K tokens, H100", fontsize=11)

    losses = update_docs.losses(*update_docs.SHORT)
    loss = update_docs.pivot(losses, "kl_mean", "label", "twin")[update_docs.UNCHANGED]
    shown = {
        "dma-hf int8": (own, update_docs.INT8, update_docs.INT8, OURS, (8, -4)),
        "dma-hf int4": (own, update_docs.INT4, update_docs.INT4, OURS, (8, -4)),
        "FlashAttention-3, FP8 cache": (own, "fa3:fp8", "sim_fp8_cache", THEIRS, (-98, -17)),
        "HQQ 8 bits": (peers, "sdpa+hqq8", "sdpa+hqq8", THEIRS, (-10, 10)),
        "HQQ 4 bits": (peers, "sdpa+hqq4", "sdpa+hqq4", THEIRS, (-24, 24)),
        "quanto 4 bits": (peers, "sdpa+quanto4", "sdpa+quanto4", THEIRS, (-24, 10)),
    }
    for name, (steps, timed, label, color, shift) in shown.items():
        _dot(right, loss[label], steps["ms"]["sdpa"] / steps["ms"][timed], name, color, shift)
    right.axhline(1, color=BASE, linewidth=1, linestyle=":")
    right.annotate("SDPA, 16-bit cache", (5.5e-6, 1), xytext=(0, -13), textcoords="offset points", fontsize=9)
    right.set(xscale="log", xlim=(5e-6, 0.06), ylim=(0, 1.8), ylabel="speed of a step, times SDPA")
    right.set_xlabel("KL per token, SmolLM2-135M (nats)")
    right.set_title("Decoding, 32K keys, H200", fontsize=11)
    for axes in (left, right):
        axes.grid(True, color="#e5e5e5", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_prefill() -> Figure:
    """docs/figures/prefill.png: speed of prefill attention by the number of tokens, quantization counted."""
    frame = update_docs.load("prefill-h200").query("`shape.batch` == 1 and `shape.head_dim` == 128")
    frame = frame.query("`shape.kv_heads` == 8 and `shape.is_causal`").sort_values("shape.length", kind="stable")
    figure, axes = _panels(1, 1, 8, 4.2)
    for label, (color, line) in line_styles(frame["label"]).items():
        rows = frame[frame["label"] == label]
        speed = rows["tflops"] * rows["milliseconds"] / rows["ms"]
        axes.plot(rows["shape.length"] / 1024, speed, line, color=color, marker="o", markersize=4, label=label)
    lengths = frame["shape.length"].unique() // 1024
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length}K" for length in lengths])
    axes.set(ylim=(0, None), xlabel="tokens", ylabel="TFLOP/s, quantization counted")
    axes.set_title("Prefill attention, head_dim 128, 32/8 heads, causal, H200", fontsize=11)
    tidy(axes)
    legend_below(figure, axes)
    return figure


FIGURES = {
    "rule": draw_rule,
    "formats": draw_formats,
    "transforms": draw_transforms,
    "speed-loss": draw_speed_loss,
    "prefill": draw_prefill,
}


def main(
    names: Annotated[list[str], typer.Argument(help="Figures; all if none is named.")] = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="The folder to write.", show_default="docs/figures")] = FIGURES_FOLDER,
) -> None:
    """Draw figures of the documentation."""
    for name in names or FIGURES:
        if name not in FIGURES:
            raise typer.BadParameter(f"unknown figure {name!r}; valid: {', '.join(FIGURES)}")
        out.mkdir(parents=True, exist_ok=True)
        FIGURES[name]().savefig(out / f"{name}.png")


if __name__ == "__main__":
    typer.run(main)
