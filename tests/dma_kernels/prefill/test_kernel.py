"""The prefill kernel over the layouts of a cache, in Triton's interpreter: the same numbers stored otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dma_kernels import Recipe
from dma_kernels.numerics.formats import TILE
from dma_kernels.numerics.geometry import PrefillGeometry
from dma_kernels.prefill import host
from dma_kernels.prefill.host import prefill_attention
from dma_kernels.prefill.operands import Operands
from dma_kernels.prefill.quantizer import quantize_keys_values
from dma_kernels.runtime.descriptors import is_describable
from dma_kernels.runtime.lowering import Form, select_lowering
from dma_kernels.runtime.tuning import select_section, select_tiles
from dma_kernels.testing import random_qkv, relative_error
from prefill_cases import Case, assert_matches_reference
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs these")

LENGTH, CHUNK = 650, 70
INT8 = Recipe(low="mxint8", shared_scale="tile", smooth_k=True, pv="fp8")
INT8_PV16 = Recipe(low="mxint8", shared_scale="tile", smooth_k=True)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return random_qkv(q_len=CHUNK, kv_len=LENGTH, dtype=torch.float16)


def run(query: Tensor, operands: Operands, recipe: Recipe, arch: int, window: int | None = None) -> Tensor:
    """Attend to a chunk of the last positions."""
    geometry = PrefillGeometry(LENGTH, LENGTH - CHUNK, 0, None, is_causal=True, window=window, mask=None)
    tiles = select_tiles(arch, select_lowering(recipe, arch), query.shape[3], query.shape[3])
    out, _ = prefill_attention(
        query, operands, geometry, recipe, tiles, scale=0.125, softcap=None, sinks=None, use_tma=arch >= 90,
        is_interpreted=True,
    )  # fmt: skip
    return out


def one_shot(key: Tensor, value: Tensor, recipe: Recipe, arch: int) -> Operands:
    lowering = select_lowering(recipe, arch)
    return quantize_keys_values(key, value, recipe, lowering, kv_offset=0, rows=None, is_interpreted=True)


def gapped(x: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return the sinks and the keys from the chunk's band on in one tensor, and the gap between them."""
    sinks = recipe.sink_tiles * TILE
    band = ((LENGTH - CHUNK) // TILE - recipe.diagonal_tiles) * TILE
    kept = torch.cat((x[:, :, :sinks], x[:, :, band:]), dim=2)
    return kept, torch.full((x.shape[0],), band - sinks, dtype=torch.int32)


@pytest.mark.parametrize("arch", [89, 90])
def test_sinks_and_band_in_one_tensor_with_a_gap(arch: int) -> None:
    query, key, value = inputs()
    expected_operands = one_shot(key, value, INT8_PV16, arch)
    high_key, gap = gapped(key, INT8_PV16)
    high_value, _ = gapped(value, INT8_PV16)
    high = replace(expected_operands.high, key=high_key, value=high_value, key_layout="gapped", value_layout="gapped")
    low = expected_operands.low
    assert low is not None
    stored = torch.nn.functional.pad(value, (0, 0, 0, low.key.shape[2] - LENGTH))
    low = replace(low, value=stored, value_form=Form.DEQUANTIZED, value_layout="aligned")
    actual = run(query, replace(expected_operands, high=high, low=low, gap=gap), INT8_PV16, arch)
    assert torch.equal(actual, run(query, expected_operands, INT8_PV16, arch))


@pytest.mark.parametrize("arch", [89, 90])
def test_values_with_a_factor_for_each_tile(arch: int) -> None:
    query, key, value = inputs()
    operands = one_shot(key, value, INT8, arch)
    assert operands.low is not None
    factor = operands.low.value_factor
    assert factor is not None
    tiles = operands.low.value.shape[2]
    # A power of two moves from the codes of every other tile to its factor: the same numbers.
    shift = torch.tensor([1.0, 0.5]).repeat(tiles)[:tiles]
    codes = (operands.low.value.float() * shift[:, None, None]).to(torch.float8_e4m3fn)
    by_tile = (factor[:, :, None] / shift[:, None]).contiguous()
    changed = replace(operands, low=replace(operands.low, value=codes, value_factor=by_tile))
    # Codes among E4M3's subnormals lose a bit when they are halved.
    assert relative_error(run(query, changed, INT8, arch), run(query, operands, INT8, arch)) < 2e-3


@pytest.mark.parametrize("arch", [80, 90])
def test_values_of_high_tiles_are_not_rounded(arch: int) -> None:
    query, key, value = inputs()
    all_high = replace(INT8, diagonal_tiles=LENGTH)
    exact = replace(all_high, pv="bf16")
    actual = run(query, one_shot(key, value, all_high, arch), all_high, arch)
    assert relative_error(actual, run(query, one_shot(key, value, exact, arch), exact, arch)) < 1e-3


def test_a_window_over_a_ring_of_tiles() -> None:
    recipe = replace(INT8, sink_tiles=0)
    window = 3 * TILE
    query, key, value = inputs()
    operands = one_shot(key, value, recipe, 90)
    slots = 5  # tiles that the chunk's windows touch
    newest = (LENGTH - 1) // TILE
    tiles = torch.arange(newest - slots + 1, newest + 1)

    def ring(x: Tensor) -> Tensor:
        """Return ``[B, H, tiles, ...]`` as a ring: tile ``t`` in slot ``t % slots``."""
        out = torch.empty((*x.shape[:2], slots, *x.shape[3:]), dtype=x.dtype)
        out[:, :, tiles % slots] = x[:, :, tiles]
        return out

    low = operands.low
    assert low is not None
    assert low.key_factor is not None
    assert low.value_factor is not None
    by_tile = low.value_factor[:, :, None].expand(-1, -1, low.value.shape[2], -1)
    ringed = replace(
        low,
        key=ring(low.key.unflatten(2, (-1, TILE))).flatten(2, 3),
        key_factor=ring(low.key_factor),
        key_layout="ring",
        value=ring(low.value),
        value_factor=ring(by_tile),
        value_layout="ring",
    )
    linear = replace(low, value_factor=by_tile.contiguous())
    expected = run(query, replace(operands, low=linear), recipe, 90, window)
    assert torch.equal(run(query, replace(operands, low=ringed), recipe, 90, window), expected)


@pytest.mark.parametrize("section", [1, 2])
def test_sections_of_heads_are_all_computed(section: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "select_section", lambda kv_heads, size: section)
    case = Case(batch=1, q_heads=6, kv_heads=3, q_len=140, kv_len=140)  # the last section of two has one head
    assert_matches_reference(case, INT8, torch.float16, "cpu")


def test_tensors_that_a_descriptor_cannot_describe() -> None:
    x = torch.zeros(2, 64, 4, 40, dtype=torch.float16).transpose(1, 2)
    assert is_describable(x)
    assert not is_describable(x[..., 1:])  # starts between multiples of 16 bytes
    assert not is_describable(x.transpose(2, 3))  # channels are not side by side
    assert not is_describable(x[:, :1].expand(2, 4, 64, 40))  # heads at one address
    assert not is_describable(torch.zeros(1, 2, 8, 20, dtype=torch.float16))  # rows of 40 bytes
    assert not is_describable(x[:, :, :0])


def test_a_section_fits_in_the_cache() -> None:
    assert select_section(8, 1 << 20) == 8
    assert select_section(64, 8 << 20) == 3
    assert select_section(8, 1 << 30) == 1
