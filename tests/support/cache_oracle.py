"""The expected result of a model with a ``DMACache``, by one forward pass without a cache.

The attention ``cache_oracle`` knows the calls in which tokens arrive. Queries of the first call follow the recipe.
Queries of a later call attend to KV that was quantized in the cache's format, in whole tiles counted from the row's
first token. KV in the sinks and from ``diagonal_tiles`` before the query's own tile on is unquantized. So a later call
is split where a row of the batch enters a new tile.
"""

from __future__ import annotations

from typing import Any

import torch
from dma_kernels import Recipe, attention
from dma_kernels.cache.formats import cache_format
from dma_kernels.cache.page_layout import PageLayout
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

import dma_hf

TILE = 128
EXACT = Recipe(low="bf16", high="bf16")


class Plan:
    """The calls of a test."""

    config: dma_hf.DMAConfig
    is_equalized: bool  # whether the model was equalized
    steps: list[tuple[int, int]]  # start and end of each call
    padding: list[int]  # of each row, on the left


def expected_logits(
    model: PreTrainedModel, ids: Tensor, steps: list[tuple[int, int]], mask: Tensor | None = None
) -> Tensor:
    """Return the logits of all steps; rows are padded where ``mask`` is 0 at their start."""
    config = model.config.get_text_config()
    Plan.config = dma_hf.DMAConfig.from_dict(config.dma_mxfp)
    Plan.is_equalized = getattr(config, "dma_equalized", False)
    Plan.steps = steps
    Plan.padding = [0] * len(ids) if mask is None else [int(row.argmax()) for row in mask]
    arguments = {}
    if mask is not None:
        arguments = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    implementation = model.config._attn_implementation
    model.set_attn_implementation("cache_oracle")
    try:
        return model(ids, use_cache=False, **arguments).logits
    finally:
        model.set_attn_implementation(implementation)


def _through_cache(x: Tensor, first: int, are_keys: bool) -> Tensor:
    """Return ``[H, T, D]`` of one row with its complete tiles quantized and dequantized."""
    format = cache_format(Plan.config.cache or "int8", is_equalized=Plan.is_equalized)
    layout = PageLayout(format, x.shape[2], x.shape[2])
    end = first + (x.shape[1] - first) // TILE * TILE
    tiles = x[:, first:end].unflatten(1, (-1, TILE))
    coded = layout.decode(layout.encode(tiles, tiles))[0 if are_keys else 1].flatten(1, 2)
    return torch.cat((x[:, :first], coded.to(x.dtype), x[:, end:]), 1)


def _cut_at_tiles() -> list[tuple[int, int, int]]:
    """Return number, start and end of all calls; later ones are split where a row enters a new tile."""
    parts = []
    for number, (start, end) in enumerate(Plan.steps):
        cuts = [i for i in range(start + 1, end) if number and any((i - first) % TILE == 0 for first in Plan.padding)]
        parts += [(number, *each) for each in zip([start, *cuts], [*cuts, end], strict=True)]
    return parts


def _oracle(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    outputs = []
    padding = torch.tensor(Plan.padding)
    for number, start, end in _cut_at_tiles():
        keys, values = key[:, :, :end], value[:, :, :end]
        if number:
            keys, values = keys.clone(), values.clone()
            for row, first in enumerate(Plan.padding):
                band = (max(start - first, 0) // TILE - Plan.config.diagonal_tiles) * TILE + first
                coded = slice(first + Plan.config.sink_tiles * TILE, max(band, 0))
                if coded.start < coded.stop:
                    keys[row, :, coded] = _through_cache(key[row], first, are_keys=True)[:, coded]
                    values[row, :, coded] = _through_cache(value[row], first, are_keys=False)[:, coded]
        visible = torch.stack((padding, torch.full_like(padding, end)), 1)
        hidden = {} if mask is None else {"mask": mask[:, :, start:end, :end]}
        recipe = EXACT if number else Plan.config.recipe
        out = attention(
            query[:, :, start:end], keys, values, recipe, scale=scaling, softcap=softcap, sinks=s_aux,
            q_offset=start - padding, kv_offset=-padding, kv_range=visible, **hidden,
        )  # fmt: skip
        outputs.append(out)
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register("cache_oracle", _oracle)
AttentionMaskInterface.register("cache_oracle", sdpa_mask)
