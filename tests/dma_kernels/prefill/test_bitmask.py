"""The bitmasks that the Hopper kernels read."""

from __future__ import annotations

import pytest
import torch
from dma_kernels.numerics.formats import TILE
from dma_kernels.numerics.geometry import AttentionGeometry
from dma_kernels.prefill.config import ROWS
from dma_kernels.prefill.hopper.bitmask import pack_mask

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs these")


@pytest.mark.parametrize(("q_offset", "kv_offset"), [(0, 0), (37, -45), (70, 141)])
def test_bitmasks_have_one_bit_per_key_and_tight_bounds(q_offset: int, kv_offset: int) -> None:
    q_len, kv_len = 150, 300
    mask = torch.rand(1, 2, q_len, kv_len, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, 0, 64 - q_offset % 64 :, : TILE + 20] = False
    mask[:, 1, :60] = False
    first = kv_offset % TILE
    tiles = -(-(first + kv_len) // TILE)
    blocks = -(-(q_offset % ROWS + q_len) // ROWS)
    given = AttentionGeometry(kv_len, q_offset, kv_offset, None, is_causal=True, window=None, mask=mask)
    made = pack_mask(given, 1, q_len, tiles)
    assert made.blocks == blocks
    assert made.words is not None
    assert made.bounds is not None
    assert (made.planes_per_row, made.planes_per_head) == (0, 1)
    by_tile = torch.nn.functional.pad(mask[0], (first, tiles * TILE - first - kv_len)).view(2, q_len, tiles, TILE)
    column = torch.arange(TILE)
    word, bit = column % 8 // 2, column // 8 * 2 + column % 2
    assert torch.equal((made.words[..., word] >> bit) & 1 == 1, by_tile)
    for head in range(2):
        for block in range(blocks):
            rows = slice(max(block * ROWS - q_offset % ROWS, 0), (block + 1) * ROWS - q_offset % ROWS)
            shown = by_tile[head, rows].any(-1).any(0).nonzero().flatten().tolist()
            expected = [tiles - shown[0], shown[-1] + 1] if shown else [0, 0]
            assert made.bounds[head, block].tolist() == expected
