"""What a chunk's high tiles are read from: the raw keys and values of the sequence, wherever the cache has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import RECIPES, Case
from dma_kernels.cache.high_tiles import gather_high_tiles
from dma_kernels.numerics.formats import TILE
from dma_kernels.testing import assert_bits_equal
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs chunks on the device")

CASES = {
    "across-tiles": Case(kv_len=700, padding=(0, 300, 640)),
    "first-tiles": Case(kv_len=200, padding=(0, 90)),
    "padding-goes-on": Case(kv_len=400, padding=(0, 390, 420)),
    "window": Case(kv_len=900, window=200),
    "head-dim-80-96": Case(head_dim=80, value_dim=96),
    "head-dim-96-40": Case(head_dim=96, value_dim=40, padding=(5,)),
}


@pytest.mark.parametrize("band", [(1, 1), (0, 0), (2, 2), (3, 0)], ids="diagonal{0[0]}-sinks{0[1]}".format)
@pytest.mark.parametrize("recipe", ["kv4", "kv8"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("new_len", [17, 150])
def test_equals_the_sequence(case: str, recipe: str, band: tuple[int, int], new_len: int) -> None:
    made, dtype = CASES[case], torch.bfloat16
    bands = replace(RECIPES[recipe], diagonal_tiles=band[0], sink_tiles=band[1])
    _, key, value = made.inputs(dtype, "cpu")
    storage = made.storage(bands, dtype, "cpu", is_filled=False)
    first = made.kv_len - new_len
    storage.append(key[:, :, :first], value[:, :, :first])
    high = gather_high_tiles(storage, key[:, :, first:], value[:, :, first:])
    sink_end = band[1] * TILE
    for row, length in enumerate(storage.lengths.tolist()):
        assert high.rows[row].tolist() == [length, 0, 0, max(length + new_len, 0)]
        start = max((max(length, 0) // TILE - band[0]) * TILE, sink_end)
        assert high.gap[row] == start - sink_end
        position = torch.cat((torch.arange(sink_end), torch.arange(start, start + high.key.shape[2] - sink_end)))
        for actual, raw in ((high.key, key), (high.value, value)):
            sequence = F.pad(raw[row, :, made.padding[row] :], (0, 0, 0, int(position.max()) + TILE))[:, position]
            assert_bits_equal(actual[row], sequence)
