"""Measure what tile skipping costs in quality: divergence against the share of tiles skipped, in fp32.

    python scripts/measure_skipping.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data TEXT --out results.json

Windows of each length are read with the exact model, then with each recipe, threshold and rule, on the unchanged model
and on its stress twins. Attention is computed in torch for one head at a time: on a GPU a pass over 32K tokens of
SmolLM2 takes seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from dma_eval.stress import TWINS, Twin, stressed
from dma_kernels import Recipe
from dma_kernels.numerics.formats import P_SCALE, TILE
from dma_kernels.numerics.geometry import SKIP_BLOCK
from dma_kernels.numerics.quantize import to_e4m3
from dma_kernels.reference.attention import EXACT
from dma_kernels.reference.operands import prepare_operands
from dma_kernels.reference.skipping import is_high_tile
from study import Data, Device, Model, Out, Study, Writer
from torch import Tensor

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
    """Causal attention under a recipe and a rule, and counts of what it skips. Lengths are multiples of 128."""

    def __init__(self, recipe: Recipe, rule: Rule, layers: int, heads: int, elements: int) -> None:
        self.recipe, self.rule, self.elements = recipe, rule, elements
        # Pairs of row and low tile.
        self.skipped, self.low = (np.zeros((layers, heads), dtype=np.int64) for _ in range(2))
        self.lost: list[Tensor] = []

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Any:
        """Compute one layer, with the interface of Transformers."""
        out = torch.empty_like(query[..., : value.shape[3]])
        zero = torch.zeros(len(query), dtype=torch.int64, device=query.device)
        operands = prepare_operands(query, key, value, self.recipe, kv_position=zero, visible=None)
        group, length = query.shape[1] // key.shape[1], query.shape[2]
        assert length % TILE == 0, f"{length=} must be a multiple of {TILE}"
        rows = max(self.elements // (group * length) // TILE, 1) * TILE
        scale = options["scaling"]
        for batch, head in ((b, h) for b in range(len(query)) for h in range(key.shape[1])):
            heads = slice(head * group, (head + 1) * group)
            q_low, q_high = (q[batch, heads] * scale for q in (operands.q_low, operands.q_high))
            k_low, k_high, v_low, v_high = (
                x[batch, head] for x in (operands.k_low, operands.k_high, operands.v_low, operands.v_high)
            )
            descale = 1.0 if operands.value_scale is None else operands.value_scale[batch, head] / P_SCALE
            for start in range(0, length, rows):
                block = slice(start, min(start + rows, length))
                weights, total, keep, parts = self._weights(
                    module.layer_idx, heads, block, q_low[:, block], q_high[:, block], k_low, k_high
                )
                columns = weights.shape[-1]
                high_out: Any = 0.0
                for part, is_high in parts:  # before the weights are rounded
                    high_out = high_out + (weights[..., part] * is_high) @ v_high[part]
                if operands.value_scale is not None:
                    weights = to_e4m3(weights.mul_(P_SCALE)).to(weights.dtype)
                tiles = weights.view(*weights.shape[:-1], -1, TILE)
                tiles.mul_(keep[..., None])
                out[batch, heads, block] = (weights @ v_low[:columns] * descale + high_out) / total
        return out.transpose(1, 2), None

    def _weights(
        self, layer: int, heads: slice, block: slice, q_low: Tensor, q_high: Tensor, k_low: Tensor, k_high: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[tuple[slice, Tensor]]]:
        """Return weights ``[G, R, C]``, their sums, where low tiles are kept ``[G, R, tiles]``, and the high parts."""
        end, device = block.stop, q_low.device
        scores = q_low @ k_low[:end].T
        q_tile = torch.arange(block.start, end, device=device)[:, None] // TILE
        is_high = is_high_tile(q_tile, torch.arange(end // TILE, device=device), self.recipe, is_causal=True)
        sinks = min(self.recipe.sink_tiles * TILE, end)
        band = max(sinks, block.start - self.recipe.diagonal_tiles * TILE)
        parts = []
        for part in (slice(0, sinks), slice(band, end)):
            cells = is_high[:, part.start // TILE : part.stop // TILE].repeat_interleave(TILE, 1)
            scores[..., part] = torch.where(cells, q_high @ k_high[part].T, scores[..., part])
            parts.append((part, cells))
        future = torch.ones((end - block.start,) * 2, dtype=torch.bool, device=device).triu_(1)
        scores[..., block.start :].masked_fill_(future, -math.inf)
        tiles = scores.view(*scores.shape[:-1], -1, TILE)
        tile_max = tiles.amax(-1)
        is_low = ~is_high & (torch.arange(end // TILE, device=device) <= q_tile)
        skip = self._skipped(tile_max, is_high, is_low, block, q_low, k_low[:end])
        self.skipped[layer, heads] += skip.sum((1, 2)).cpu().numpy()
        self.low[layer, heads] += int(is_low.sum())
        weights = scores.sub_(tile_max.amax(-1, keepdim=True)).exp_()
        sums = tiles.sum(-1)
        kept = sums.masked_fill(skip, 0.0).sum(-1, keepdim=True)
        if self.rule.threshold is not None:
            lost = (sums * skip).sum(-1, keepdim=True)
            self.lost.append((lost / (kept + lost)).flatten())
        return weights, kept, is_low & ~skip, parts

    def _skipped(
        self, tile_max: Tensor, is_high: Tensor, is_low: Tensor, block: slice, query: Tensor, key: Tensor
    ) -> Tensor:
        """Return which low tiles each row skips, ``[G, R, tiles]``."""
        if self.rule.threshold is None:
            return torch.zeros_like(tile_max, dtype=torch.bool)
        bound = tile_max.masked_fill(~is_high, -math.inf).amax(-1, keepdim=True)
        threshold: Any = self.rule.threshold
        if self.rule.kind == "running":
            after = tile_max.masked_fill(~is_low, -math.inf).flip(-1).cummax(-1).values.flip(-1)
            before = torch.cat((after[..., 1:], torch.full_like(after[..., :1], -math.inf)), -1)
            bound = torch.maximum(bound, before)
        elif self.rule.kind == "length":
            position = torch.arange(block.start, block.stop, SKIP_BLOCK, device=bound.device) + SKIP_BLOCK
            threshold = (threshold + torch.log(position / REFERENCE_LENGTH)).repeat_interleave(SKIP_BLOCK)[:, None]
        elif self.rule.kind not in ("high", "rows"):
            tile_max = ESTIMATES[self.rule.kind](tile_max, query, key)
        gap = tile_max - bound
        if self.rule.kind != "rows":
            gap = gap.view(len(gap), -1, SKIP_BLOCK, gap.shape[-1]).amax(2).repeat_interleave(SKIP_BLOCK, 1)
        return (gap < -threshold) & is_low


def mean_of(keys: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Estimate a tile's maximum by the largest score of means of so many keys."""

    def estimate(_tile_max: Tensor, query: Tensor, key: Tensor) -> Tensor:
        means = key.view(-1, keys, key.shape[-1]).mean(1)
        scores = query @ means.T
        return scores.view(*scores.shape[:-1], -1, TILE // keys).amax(-1)

    return estimate


def extremes_of(keys: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Bound a tile's maximum from the extremes of each channel over so many keys."""

    def estimate(_tile_max: Tensor, query: Tensor, key: Tensor) -> Tensor:
        groups = key.view(-1, keys, key.shape[-1])
        scores = query.clamp(min=0) @ groups.amax(1).T + query.clamp(max=0) @ groups.amin(1).T
        return scores.view(*scores.shape[:-1], -1, TILE // keys).amax(-1)

    return estimate


def every(rows: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Take the exact maximum in one of so many rows, and let the other rows agree."""

    def estimate(tile_max: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        sampled = torch.full_like(tile_max, -math.inf)
        sampled[:, rows // 2 :: rows] = tile_max[:, rows // 2 :: rows]
        return sampled

    return estimate


def antidiagonals_of(stride: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Estimate by the mean scores along antidiagonals of ``stride`` rows and keys, as XAttention (arXiv 2503.16428)."""

    def estimate(_tile_max: Tensor, query: Tensor, key: Tensor) -> Tensor:
        group, rows, dim = query.shape
        q = query.reshape(group, rows // stride, stride * dim)
        k = key.view(-1, stride, dim).flip(1).reshape(-1, stride * dim)
        scores = q @ k.T / stride
        return scores.view(group, rows // stride, -1, TILE // stride).amax(-1).repeat_interleave(stride, 1)

    return estimate


ESTIMATES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    **{f"mean of {n} keys": mean_of(n) for n in (128, 32, 8)},
    **{f"extremes of {n} keys": extremes_of(n) for n in (128, 32, 8)},
    **{f"every row of {n}": every(n) for n in (16, 8, 4)},
    **{f"antidiagonals of {n}": antidiagonals_of(n) for n in (16, 8)},
}
"""Estimates of a tile's maximum ``[G, R, tiles]`` from it, queries ``[G, R, D]`` and keys ``[C, D]``."""
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

        def attention(recipe: Recipe, rule: Rule) -> SkippingAttention:
            return SkippingAttention(recipe, rule, config.num_hidden_layers, config.num_attention_heads, elements)

        with stressed(self.model, self.layers, twin):
            if reference not in self.exact:
                kept = {key: value for key, value in self.exact.items() if key == ""}  # memory for no more
                self.exact = kept | {reference: self.read(attention(EXACT, Rule()))}
            began, measured = time.perf_counter(), attention(PRESETS[preset].recipe, rule)
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
