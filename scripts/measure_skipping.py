"""Measure what tile skipping costs in quality: divergence against the share of tiles skipped, in fp32.

    python scripts/measure_skipping.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data TEXT --out results.json

Windows of each length are read with the exact model, then with each recipe, threshold and rule, on the unchanged model
and on its stress twins. Attention is that of the reference: on a GPU a pass over 32K tokens of SmolLM2 takes seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import typer
from dma_eval.measures.stress import TWINS, Twin, stressed
from dma_kernels import Recipe
from dma_kernels.numerics.formats import TILE
from dma_kernels.numerics.geometry import SKIP_BLOCK, AttentionGeometry
from dma_kernels.reference import attention as torch_attention
from dma_kernels.reference.operands import prepare_operands
from dma_kernels.reference.skipping import is_high_tile
from study import Data, Device, Model, Out, Study, Writer
from torch import Tensor
from torch.nn import functional as F

from dma_hf import PRESETS

WINDOWS = {8192: 2, 2048: 4, 32768: 1}
"""Windows to read of each length."""
REFERENCE_LENGTH = 8192
"""Position at which a threshold that grows with the position is the named one."""


class Rule(NamedTuple):
    """Which tiles a block of 64 queries skips.

    Attributes:
        threshold: Nats; ``None`` skips nothing.
        kind: ``high`` compares with each row's maximum over high tiles (the rule of the kernels), ``running`` with the
            running maximum from the diagonal down, ``length`` with the high maximum by a threshold that grows with the
            logarithm of the position. ``rows`` is ``high``, but each row drops its own tiles. Others are
            estimates of :data:`ESTIMATES`, compared with the high maximum.
    """

    threshold: float | None = None
    kind: str = "high"


class SkippingAttention:
    """The reference's causal attention under a recipe, which skips tiles by a rule and counts them.

    Lengths are multiples of 128.
    """

    def __init__(self, recipe: Recipe, rule: Rule, layers: int, heads: int, elements: int) -> None:
        self.recipe = replace(recipe, skip_threshold=1.0)  # so that it asks what to skip
        self.rule, self.elements = rule, elements
        # Pairs of row and low tile.
        self.skipped, self.low = (np.zeros((layers, heads), dtype=np.int64) for _ in range(2))
        self.lost: list[Tensor] = []

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Any:
        """Compute one layer, with the interface of Transformers."""
        (batch, heads, length, _), kv_heads = query.shape, key.shape[1]
        assert length % TILE == 0, f"{length=} must be a multiple of {TILE}"
        zero = torch.zeros(batch, dtype=torch.int64, device=query.device)
        operands = prepare_operands(query, key, value, self.recipe, kv_position=zero, visible=None)
        operands = replace(operands, qk_bias=None)  # the same for all keys of a query
        geometry, scale = AttentionGeometry(length, 0, 0, None, is_causal=True), options["scaling"]
        low = operands.q_low.flatten(0, 1) * scale, operands.k_low.repeat_interleave(heads // kv_heads, 1).flatten(0, 1)
        skip = partial(self._skip, module.layer_idx, *low)
        with mock.patch.multiple(torch_attention, skip_tiles=skip, SCORE_BYTES=4 * self.elements):
            out, _ = torch_attention.attend_prepared(operands, geometry, self.recipe, dtype=query.dtype, scale=scale)
        return out.transpose(1, 2), None

    def _skip(
        self, layer: int, query: Tensor, key: Tensor, scores: Tensor, q_pos: Tensor, k_pos: Tensor, *_: Any, **__: Any
    ) -> None:
        """Hide the tiles that the rule skips, in place of the reference's ``skip_tiles``."""
        cells, rows = scores.flatten(0, 2), q_pos[0]  # [H, R, C] and [R]
        tiles = F.pad(cells, (0, -len(k_pos[0]) % TILE), value=-math.inf).unflatten(-1, (-1, TILE))
        q_tile, k_tile = rows[:, None] // TILE, torch.arange(tiles.shape[2], device=rows.device)
        is_high = is_high_tile(q_tile, k_tile, self.recipe, is_causal=True)
        is_low = ~is_high & (k_tile <= q_tile)
        self.low[layer] += len(scores) * int(is_low.sum())
        if self.rule.threshold is None:
            return
        skip = is_low & self._is_small(tiles, is_high, is_low, rows, query[:, rows], key[:, : len(k_tile) * TILE])
        self.skipped[layer] += skip.sum((1, 2)).view(len(scores), -1).sum(0).cpu().numpy()
        cells_of_tiles = skip.repeat_interleave(TILE, -1)[..., : cells.shape[-1]]
        self.lost.append((cells.softmax(-1) * cells_of_tiles).sum(-1).flatten())
        cells.masked_fill_(cells_of_tiles, -math.inf)

    def _is_small(
        self, tiles: Tensor, is_high: Tensor, is_low: Tensor, rows: Tensor, query: Tensor, key: Tensor
    ) -> Tensor:
        """Return which tiles are below the threshold for each row, ``[H, R, tiles]``."""
        kind, threshold, tile_max = self.rule.kind, self.rule.threshold, tiles.amax(-1)
        bound = tile_max.masked_fill(~is_high, -math.inf).amax(-1, keepdim=True)
        if kind == "running":
            after = tile_max.masked_fill(~is_low, -math.inf).flip(-1).cummax(-1).values.flip(-1)
            before = torch.cat((after[..., 1:], torch.full_like(after[..., :1], -math.inf)), -1)
            bound = torch.maximum(bound, before)
        elif kind == "length":
            position = rows // SKIP_BLOCK * SKIP_BLOCK + SKIP_BLOCK
            threshold = (threshold + torch.log(position / REFERENCE_LENGTH))[:, None]
        elif kind not in ("high", "rows"):
            tile_max = ESTIMATES[kind](tiles, query, key)
        gap = tile_max - bound
        if kind != "rows":
            gap = gap.unflatten(1, (-1, SKIP_BLOCK)).amax(2).repeat_interleave(SKIP_BLOCK, 1)
        return gap < -threshold


# Estimates of a tile's maximum ``[H, R, tiles]``, from scores ``[H, R, tiles, 128]``, queries ``[H, R, D]`` and keys
# ``[H, C, D]``.


def mean_of(keys: int, tiles: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
    """Estimate by the largest score of means of so many keys."""
    return tiles.unflatten(-1, (-1, keys)).mean(-1).amax(-1)


def extremes_of(keys: int, _tiles: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Bound from the extremes of each channel over so many keys."""
    groups = key.unflatten(1, (-1, keys))
    scores = query.clamp(min=0) @ groups.amax(2).mT + query.clamp(max=0) @ groups.amin(2).mT
    return scores.unflatten(-1, (-1, TILE // keys)).amax(-1)


def every(rows: int, tiles: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
    """Take the exact maximum in one of so many rows, and let the other rows agree."""
    sampled = torch.full_like(tiles[..., 0], -math.inf)
    sampled[:, rows // 2 :: rows] = tiles[:, rows // 2 :: rows].amax(-1)
    return sampled


def antidiagonals_of(stride: int, tiles: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
    """Estimate by the mean scores along antidiagonals of ``stride`` rows and keys, as XAttention (arXiv 2503.16428)."""
    squares = tiles.unflatten(-1, (-1, stride)).unflatten(1, (-1, stride))  # [H, R / s, s, tiles, 128 / s, s]
    means = squares.flip(-1).diagonal(dim1=2, dim2=5).mean(-1)
    return means.amax(-1).repeat_interleave(stride, 1)


ESTIMATES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    **{f"mean of {n} keys": partial(mean_of, n) for n in (128, 32, 8)},
    **{f"extremes of {n} keys": partial(extremes_of, n) for n in (128, 32, 8)},
    **{f"every row of {n}": partial(every, n) for n in (16, 8, 4)},
    **{f"antidiagonals of {n}": partial(antidiagonals_of, n) for n in (16, 8)},
}
THRESHOLDS = {
    "mean": (8.0, 12.0, 16.0),
    "extremes": (0.0, -5.0, -10.0),
    "every": (6.0, 7.0, 8.0),
    "antidiagonals": (6.0, 9.0, 12.0),
}
"""Thresholds of estimates, by their first word."""


def plan(length: int, *, quick: bool) -> Iterator[tuple[Twin, str, Rule]]:
    """Yield what to measure at a length, the most telling first; ``quick`` is a selection for a CPU."""
    unchanged, *twins = TWINS
    for threshold in (None, 6.0, 7.0, 5.0) if quick else (None, 6.0, 7.0, 5.0, 8.0, 4.0):
        yield unchanged, "balanced", Rule(threshold)
    for twin in twins:
        if not quick or twin.name in ("keys x 32", "key biases"):
            yield from ((twin, "balanced", Rule(threshold)) for threshold in (None, 6.0))
    for twin in [unchanged] if quick else TWINS:
        yield from ((twin, "fp4", Rule(threshold)) for threshold in (None, 6.0))
    for kind in ("rows", "running", "length"):
        yield unchanged, "balanced", Rule(6.0, kind)
    for kind in ESTIMATES if quick or length == REFERENCE_LENGTH else ():
        low, middle, high = THRESHOLDS[kind.split()[0]]
        if not quick or " of 8" in kind:
            yield from ((unchanged, "balanced", Rule(t, kind)) for t in ((middle,) if quick else (low, middle, high)))


class Skipping(Study):
    """A study of rules; it keeps the exact logits of the unchanged model and of one twin."""

    exact: dict[str, list[Tensor]] = {}  # noqa: RUF012 (replaced, not changed)

    def run(self, twin: Twin, preset: str, rule: Rule, elements: int) -> dict[str, Any]:
        """Measure one rule on one twin."""
        config, reference = self.model.config, "" if twin.is_same_function else twin.name
        sizes = config.num_hidden_layers, config.num_attention_heads, elements
        with stressed(self.model, self.layers, twin):
            if reference not in self.exact:
                kept = {key: value for key, value in self.exact.items() if key == ""}  # memory for no more
                self.exact = kept | {reference: self.read(SkippingAttention(torch_attention.EXACT, Rule(), *sizes))}
            began, measured = time.perf_counter(), SkippingAttention(PRESETS[preset].recipe, rule, *sizes)
            logits = self.read(measured)
        windows, length = self.windows.shape
        result = {"length": length, "windows": windows, "twin": twin.name, "preset": preset, **rule._asdict()}
        result |= self.compare(logits, self.exact[reference])
        result["skipped"] = measured.skipped.sum() / measured.low.sum()
        result["skipped_by_layer"] = np.round(measured.skipped.sum(1) / measured.low.sum(1), 3).tolist()
        result["seconds"] = time.perf_counter() - began
        if measured.lost:
            lost = torch.cat(measured.lost)
            result["lost_mean"] = float(lost.double().mean())
            result["lost_p999"] = float(lost.kthvalue(int(0.999 * len(lost))).values)
        return result


def main(
    model: Model,
    data: Data,
    out: Out,
    device: Device = "auto",
    lengths: Annotated[list[int], typer.Option(help="Tokens of a window; repeat the option for more.")] = list(WINDOWS),  # noqa: B006
    windows: Annotated[int | None, typer.Option(help=f"Windows of each length; by default {WINDOWS}, else 1.")] = None,
    elements: Annotated[int, typer.Option(help="Scores computed at once.")] = 1 << 27,
    quick: Annotated[bool, typer.Option("--quick", help="Measure a selection, for a CPU.")] = False,
) -> None:
    """Measure what tile skipping costs in quality, and write a result for each twin, preset and rule."""
    writer = Writer(out, model=model, data=data)
    for length in lengths:
        study = Skipping(model, data, device, length, windows or WINDOWS.get(length, 1))
        for twin, preset, rule in plan(length, quick=quick):
            writer.add(study.run(twin, preset, rule, elements))
        del study


if __name__ == "__main__":
    typer.run(main)
