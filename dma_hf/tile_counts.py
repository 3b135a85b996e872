"""Counts of the tiles that attention layers skip, taken within a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from dma_kernels import Recipe
from torch import Tensor, nn

from .stats import count_tiles

TileCounts = dict[nn.Module, Tensor]
"""For each attention layer int64 ``[Hq, 2]``: pairs of query block and low tile skipped, and pairs examined."""

_counting: list[TileCounts] = []


@contextmanager
def counted_tiles() -> Iterator[TileCounts]:
    """Count the tiles that attention layers skip within a ``with`` block.

    Layers whose configuration has no ``skip_threshold`` are left out, and so are decoding and later chunks over a
    ``DMACache``, which never skip. Of nested blocks the innermost counts.

    At the end they are added to :func:`dma_hf.stats`.

    Yields:
        The counts by layer; they grow with each call until the block ends. Reading one waits for its device.
    """
    counts: TileCounts = {}
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.pop()
        for module, tiles in counts.items():
            count_tiles(module, tiles)


def tile_counts_of(module: nn.Module, query: Tensor, recipe: Recipe) -> Tensor | None:
    """Return where a call of a layer with queries ``[B, Hq, T, D]`` adds its counts; ``None`` if nobody asks."""
    if not _counting or recipe.skip_threshold is None:
        return None
    counts = _counting[-1]
    if module not in counts:
        counts[module] = torch.zeros((query.shape[1], 2), dtype=torch.int64, device=query.device)
    return counts[module]
