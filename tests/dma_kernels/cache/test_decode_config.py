"""The decode kernel's configuration fits into an SM and divides heads among CTAs."""

from __future__ import annotations

import pytest
from dma_kernels.cache.decode_config import CTA_RESERVED, SHARED_MEMORY, select_decode_tiling
from hypothesis import given
from hypothesis import strategies as st

powers = st.sampled_from([16, 32, 64, 128, 256])


@given(
    st.sampled_from([80, 86, 89, 90, 100, 103, 120]), powers, powers.filter(lambda x: x >= 64),
    st.sampled_from([4, 8]), st.integers(1, 600), st.integers(3, 2000), st.integers(1, 200),
)  # fmt: skip
def test_ctas_fit_into_an_sm_and_none_is_idle(arch, block_d, block_dv, bits, heads, tiles, sms) -> None:
    tiling = select_decode_tiling(arch, block_d, block_dv, bits, heads=heads, tiles=tiles, sms=sms)
    assert tiling.warps in (1, 2, 4)
    assert (tiling.steps, tiling.stages) in {(2, 4), (2, 2), (4, 2)}
    assert 1 <= tiling.ctas <= heads * tiles
    stages = (block_d + block_dv) * 8 * tiling.stages * bits * tiling.warps // tiling.steps
    capacity = SHARED_MEMORY.get(arch, 102_400)
    assert tiling.warps == 1 or stages + CTA_RESERVED <= capacity
    assert tiling.ctas <= sms * 8 // tiling.warps


@pytest.mark.parametrize(("heads", "bits", "ctas"), [(8, 4, 256), (64, 4, 256), (512, 4, 512), (8, 8, 512)])
def test_splits_end_at_head_boundaries(heads, bits, ctas) -> None:
    """For rows of equal length on 132 SMs."""
    tiling = select_decode_tiling(90, 128, 128, bits, heads=heads, tiles=300, sms=132)
    assert tiling.ctas == ctas
    assert tiling.ctas % heads == 0
