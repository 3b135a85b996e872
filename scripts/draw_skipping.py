"""Draw which tiles three heads of a model skip (docs/figures/skipping.png).

python scripts/draw_skipping.py SmolLM2-135M-Instruct.Q4_1.gguf wiki.test.raw
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl

mpl.use("Agg")

import torch
import typer
from dma_eval.data import load_text, tokenize
from dma_eval.models import load_model
from dma_kernels.numerics.formats import TILE
from dma_kernels.numerics.geometry import SKIP_BLOCK
from dma_kernels.reference.operands import prepare_operands
from dma_kernels.reference.skipping import is_high_tile, skip_tiles
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dma_hf import DMAConfig

KINDS = {"not visible": "#ffffff", "high": "#1f4e79", "low, computed": "#7fb0dd", "low, skipped": "#f2b8a2"}
QUANTILES = (0.5, 0.75, 0.95)
"""Which heads are drawn, of all heads by the share that they skip."""


def record_layers(model: str, data: str, tokens: int) -> list[tuple[Tensor, Tensor, float]]:
    """Return queries ``[1, Hq, T, D]``, keys ``[1, Hkv, T, D]`` and the scale of every layer."""
    layers: list[tuple[Tensor, Tensor, float]] = []

    def record(module: Any, query: Tensor, key: Tensor, *args: Any, scaling: float, **kwargs: Any) -> Any:
        layers.append((query, key, scaling))
        return sdpa_attention_forward(module, query, key, *args, scaling=scaling, **kwargs)

    AttentionInterface.register("record", record)
    AttentionMaskInterface.register("record", lambda *_args, **_options: None)
    loaded = load_model(model, dtype="float32", device="cpu")
    loaded.model.set_attn_implementation("record")
    ids = tokenize(loaded.tokenizer, load_text(data).content[: 8 * tokens])[:tokens]
    with torch.inference_mode():
        loaded.model.model(ids[None], use_cache=False)
    return layers


def kinds_of(query: Tensor, key: Tensor, scale: float, threshold: float) -> Tensor:
    """Return indices into ``KINDS`` for each block of queries and tile of keys of one head, ``[T / 64, T / 128]``."""
    recipe = DMAConfig(skip_threshold=threshold).recipe
    position = torch.arange(query.shape[2])[None]
    operands = prepare_operands(query, key, key, recipe, kv_position=torch.zeros(1).long(), visible=None)
    tile = position[0] // TILE
    is_high = is_high_tile(tile[:, None], tile[None], recipe, is_causal=True)
    low, high = (q @ k.mT for q, k in ((operands.q_low, operands.k_low), (operands.q_high, operands.k_high)))
    scores = (torch.where(is_high, high, low) * scale).masked_fill(position[0] > position[0][:, None], -math.inf)
    skip_tiles(scores[None], position, position, recipe, is_causal=True, tile_counts=None)
    is_kept = (scores[0, 0] > -math.inf).view(-1, SKIP_BLOCK, len(tile) // TILE, TILE).any(-1).any(1)
    blocks = position[0, ::SKIP_BLOCK, None] // TILE
    tiles = torch.arange(len(tile) // TILE)
    kinds = torch.where(is_kept, 2, 3)
    kinds[is_high_tile(blocks, tiles, recipe, is_causal=True)] = 1
    kinds[tiles > blocks] = 0
    return kinds


def main(
    model: Annotated[str, typer.Argument(help="Folder, GGUF file or Hub name.")],
    data: Annotated[str, typer.Argument(help="The text, as for dma-hf ppl.")],
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("docs/figures/skipping.png"),
    tokens: Annotated[int, typer.Option(help="Length, a multiple of 128.")] = 4096,
    threshold: Annotated[float, typer.Option(help="The skip_threshold.")] = 6.0,
) -> None:
    """Draw the tiles of the median head, and of two that skip more."""
    found = []
    for index, (query, key, scale) in enumerate(record_layers(model, data, tokens)):
        group = query.shape[1] // key.shape[1]
        for head in range(query.shape[1]):
            kinds = kinds_of(query[:, head : head + 1], key[:, head // group : head // group + 1], scale, threshold)
            found.append((float((kinds == 3).sum() / (kinds >= 2).sum()), f"layer {index}, head {head}", kinds))
    found.sort(key=lambda each: each[0])
    figure, axes = plt.subplots(1, len(QUANTILES), figsize=(11, 4.4), dpi=150, layout="constrained", sharey=True)
    colors = ListedColormap(list(KINDS.values()))
    for axis, quantile in zip(axes, QUANTILES, strict=True):
        share, name, kinds = found[round(quantile * (len(found) - 1))]
        axis.imshow(kinds, cmap=colors, vmin=0, vmax=len(KINDS) - 1, aspect="auto", interpolation="nearest")
        axis.set(title=f"{name}\n{share:.0%} of low tiles skipped", xlabel="tile of 128 keys")
    axes[0].set_ylabel("block of 64 queries")
    handles = [Patch(facecolor=color, edgecolor="#cccccc", label=kind) for kind, color in KINDS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(KINDS), frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


if __name__ == "__main__":
    typer.run(main)
