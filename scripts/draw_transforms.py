"""Draw what smoothing and rotation do to the keys of a head of the demo model (docs/figures/transforms.png)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl

mpl.use("Agg")

import torch
import typer
from dma_kernels import hadamard_rotate, key_mean, quantize
from matplotlib import pyplot as plt
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ASSETS = Path(__file__).resolve().parents[1] / "eval" / "dma_eval" / "assets"
TOKENS = 512
SHOWN = 128


def record_layers() -> list[tuple[Tensor, Tensor]]:
    """Return queries ``[1, Hq, T, D]`` and keys ``[1, Hkv, T, D]`` of every layer on the held-out text."""
    layers: list[tuple[Tensor, Tensor]] = []

    def record(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        layers.append((query, key))
        return sdpa_attention_forward(module, query, key, *args, **kwargs)

    AttentionInterface.register("record", record)
    folder = ASSETS / "demo_model"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="record", dtype=torch.float32)
    text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder)(text, verbose=False)["input_ids"][:TOKENS]
    with torch.no_grad():
        model(torch.tensor([ids]))
    return layers


def score_error(query: Tensor, keys: Tensor, true: Tensor) -> float:
    """Return the relative error of the scores with both sides in NVFP4; a constant per query does not count."""
    difference = quantize(query, "nvfp4").dequantize() @ quantize(keys, "nvfp4").dequantize().mT - true
    difference -= difference.mean(-1, keepdim=True)
    return float(difference.norm() / (true - true.mean(-1, keepdim=True)).norm())


def main(
    out: Annotated[Path, typer.Argument(help="The PNG to write.")] = Path("docs/figures/transforms.png"),
    layer: Annotated[int, typer.Option(help="Layer of the demo model.")] = 1,
    head: Annotated[int, typer.Option(help="Key head of the layer.")] = 0,
) -> None:
    """Draw the magnitudes of the keys, channel by channel, unchanged, smoothed, and smoothed and rotated."""
    queries, keys = record_layers()[layer]
    group = queries.shape[1] // keys.shape[1]
    query, raw = queries[:, head * group : head * group + 1], keys[:, head : head + 1]
    true = query @ raw.mT
    smooth = raw - key_mean(raw)
    panels = (
        ("unchanged", raw, score_error(query, raw, true)),
        ("smooth_k", smooth, score_error(query, smooth, true)),
        (
            "smooth_k and rotate",
            hadamard_rotate(smooth),
            score_error(hadamard_rotate(query), hadamard_rotate(smooth), true),
        ),
    )
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.9), dpi=150, layout="constrained", sharey=True)
    for axis, (title, panel, error) in zip(axes, panels, strict=True):
        image = axis.imshow(panel[0, 0, :SHOWN].abs(), vmin=0, vmax=float(raw.abs().max()), aspect="auto")
        axis.set(title=f"{title}\nNVFP4 scores: error {error:.1%}", xlabel="channel")
    axes[0].set_ylabel("token")
    figure.colorbar(image, ax=axes, label="magnitude of the key", shrink=0.85)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


if __name__ == "__main__":
    typer.run(main)
