"""The operands of a compute path in torch, the reference of the GPU quantizer."""

from __future__ import annotations

from typing import Any

import torch
from dma_kernels import Recipe, key_mean, quantize
from dma_kernels.numerics.formats import MXINT8_UNIT, TILE, UNQUANTIZED
from dma_kernels.numerics.quantize import (
    e2m1_decode,
    e8m0_to_float,
    nvfp4_key_scale,
    unpack_e2m1,
    value_scale,
    values_to_e4m3,
)
from dma_kernels.numerics.transforms import hadamard_rotate
from dma_kernels.prefill.config import ComputePath, select_compute_path
from dma_kernels.prefill.operands import (
    DEQUANTIZED,
    E4M3,
    E5M2,
    INT8,
    RAW,
    OperandFormat,
    Operands,
    Scale,
    TileOperands,
    dequantized_dtype,
)
from dma_kernels.prefill.quantizer import quantize_keys_values
from dma_kernels.testing import assert_bits_equal
from torch import Tensor

HOPPER, AMPERE, BLACKWELL = 90, 80, 100
SMALLEST_FACTOR = 2.0**-126

RECIPES = {
    "int8": Recipe(low="mxint8", shared_scale="tile", smooth_k=True, pv="fp8"),
    "int8-floor-rotated": Recipe(low="mxint8", shared_scale="tile", rotate=True, scale_rounding="floor"),
    "e4m3": Recipe(low="mxfp8", shared_scale="tile", smooth_k=True, rotate=True, pv="fp8"),
    "e4m3-floor": Recipe(low="mxfp8", shared_scale="tile", scale_rounding="floor"),
    "e5m2": Recipe(low="mxfp4", high="mxfp8", scale_rounding="floor", sink_tiles=0),
    "e5m2-row": Recipe(low="mxfp4", shared_scale="row", smooth_k=True),
    "nvfp4": Recipe(low="nvfp4", high="mxfp8", smooth_k=True, rotate=True, pv="fp8"),
    "nvfp4-high": Recipe(low="mxfp4", high="nvfp4", rotate=True),
    "row": Recipe(low="mxfp8", high="mxint8", shared_scale="row", smooth_k=True),
    "int8-block": Recipe(low="mxint8", high="mxfp4", smooth_k=True),
    "keys-only": Recipe(low_q="bf16", low_k="nvfp4", smooth_k=True, rotate=True),
    "search": Recipe(low="nvfp4", high="mxint8", scale_rounding="search", smooth_k=True, rotate=True),
    "search-e8m0": Recipe(low="mxfp4", high="mxfp8", scale_rounding="search"),
    "search-mxint8": Recipe(low="mxint8", scale_rounding="search"),
    "mxfp4-keys": Recipe(low_q="bf16", low_k="mxfp4"),
    "unquantized-keys": Recipe(low_q="mxfp8", low_k="bf16", smooth_k=True, rotate=True),
    "uniform": Recipe(low="bf16", high="bf16", smooth_k=True, pv="fp8"),
    "uniform-mxfp8": Recipe(low="mxfp8", high="mxfp8"),
    "identity": Recipe(low="bf16", high="bf16"),
}


def check(
    key: Tensor, value: Tensor, recipe: Recipe, arch: int, *,
    kv_offset: int = 0, rows: Tensor | None = None, low_tiles: range | None = None,
) -> Operands:  # fmt: skip
    """Compare a call's operands with the specification, given the kernels' mean key."""
    path = select_compute_path(recipe, arch)
    actual = quantize_keys_values(key, value, recipe, path, kv_offset=kv_offset, seq_info=rows, low_tiles=low_tiles)
    expected = expected_operands(key, value, recipe, path, kv_offset=kv_offset, rows=rows, mean=actual.key_mean)
    assert_operands_equal(actual, expected)
    return actual


def assert_operands_equal(actual: Any, expected: Any) -> None:
    """Compare the operands of a call or of its tiles; unquantized ones are the caller's tensors."""
    for name, wanted in vars(expected).items():
        got = getattr(actual, name)
        assert type(got) is type(wanted), name
        if isinstance(wanted, TileOperands):
            assert_operands_equal(got, wanted)
        elif not isinstance(wanted, Tensor):
            assert got == wanted, name
        elif got is not wanted:
            try:
                assert_bits_equal(got, wanted)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def expected_operands(
    key: Tensor, value: Tensor, recipe: Recipe, path: ComputePath, *,
    kv_offset: int, rows: Tensor | None, mean: Tensor | None,
) -> Operands:  # fmt: skip
    """Return the expected result of :func:`dma_kernels.prefill.quantizer.quantize_keys_values`.

    ``mean`` is the kernel's mean key, fp32 ``[B, Hkv, D]``. Another order of summation may
    round it to the neighboring bfloat16, which is checked here.
    """
    batch, kv_len = key.shape[0], key.shape[2]
    index = torch.arange(kv_len, device=key.device)
    if rows is None:
        position = torch.full((batch,), kv_offset, device=key.device)
        visible = torch.ones(batch, kv_len, dtype=torch.bool, device=key.device)
        tiles = max(1, -(-(kv_len + kv_offset % TILE) // TILE))
    else:
        position = rows[:, 1].long()
        visible = (index >= rows[:, 2:3]) & (index < rows[:, 3:4])
        tiles = max(1, -(-(kv_len + TILE - 1) // TILE))
    entry = (position % TILE)[:, None] + index  # [B, Tk]

    def aligned(x: Tensor) -> Tensor:
        storage = x.new_zeros(*x.shape[:2], tiles * TILE, x.shape[3])
        return storage.scatter_(2, entry[:, None, :, None].expand(x.shape), x)

    writes_keys = path.key is not RAW or path.low_key is not None
    assert (mean is not None) == (recipe.smooth_k and writes_keys)
    if mean is not None:
        mean = mean[:, :, None]
        torch.testing.assert_close(mean, key_mean(key, visible), rtol=2.0**-8, atol=0.0, equal_nan=True)
        assert_bits_equal(mean, mean.to(torch.bfloat16).float())
    hidden = ~visible[:, None, :, None]
    x = key.float().masked_fill(hidden, 0.0)
    if mean is not None:
        x = (x - mean).masked_fill(hidden, 0.0)
    x = hadamard_rotate(x) if recipe.rotate else x
    global_scale = nvfp4_key_scale(x, recipe.scale_rounding, visible)
    x = aligned(x)
    v, v_scale = aligned(value.masked_fill(hidden, 0.0)), value_scale(value, visible)

    def tile_operands(
        form: OperandFormat, key_format: str, query_format: str, shared: str, value_form: OperandFormat
    ) -> TileOperands:
        own, scale, descale = _keys(x, global_scale, form, key_format, shared, recipe, key.dtype, query_format)
        own_value, value_descale = _values(v, v_scale, value_form)
        return TileOperands(
            key=key if own is None else own, value=value if own_value is None else own_value,
            key_format=form, value_format=value_form,
            key_scale=scale, key_descale=descale, value_descale=value_descale,
        )  # fmt: skip

    low = None
    if path.low_key is not None and path.low_value is not None:
        low = tile_operands(path.low_key, recipe.key_low, recipe.query_low, recipe.shared_scale, path.low_value)
    return Operands(
        high=tile_operands(path.key, recipe.high, recipe.high, "block", RAW),
        low=low,
        key_mean=None if mean is None else mean[:, :, 0],
    )


def _keys(
    x: Tensor, global_scale: Tensor, form: OperandFormat, format: str, shared: str, recipe: Recipe, dtype: torch.dtype,
    query_format: str,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return tile-padded keys in an operand format, their block scales and descales."""
    if form is RAW:
        return None, None, None
    target = dequantized_dtype(dtype, query_format, format)
    if format == UNQUANTIZED:
        return x.to(target), None, None
    own_scale = global_scale if format == "nvfp4" else None
    coded = quantize(x, format, scale_rounding=recipe.scale_rounding, shared_scale=shared, global_scale=own_scale)
    tiles = x.shape[2] // TILE
    if form is DEQUANTIZED:
        return coded.dequantize().to(target), None, None
    if form.scale is Scale.BLOCK:
        head = coded.global_scale
        return coded.data, coded.scale, None if head is None else head[..., 0].expand(-1, -1, tiles)
    zero = (x.unflatten(2, (tiles, TILE)) == 0).all(-1).all(-1)
    if form in (INT8, E4M3):
        unit = MXINT8_UNIT if form is INT8 else 1.0
        descale = e8m0_to_float(coded.scale[:, :, ::TILE, 0]) * unit
    else:
        assert form is E5M2
        code = coded.scale.int().unflatten(2, (tiles, TILE))
        top = code.masked_fill(code == 255, 0).amax((-2, -1))  # [B, H, tiles]
        descale = torch.exp2((top - 127 - 13).clamp(min=-126).float())
        shift = e8m0_to_float(coded.scale).unflatten(2, (tiles, TILE)) / descale[..., None, None]
        elements = e2m1_decode(unpack_e2m1(coded.data)).unflatten(2, (tiles, TILE)).unflatten(-1, (-1, 32))
        coded_values = (elements * shift[..., None]).flatten(-2).flatten(2, 3).to(torch.float8_e5m2)
        return coded_values, None, torch.where(zero, 1.0, descale)
    descale = torch.where(descale < SMALLEST_FACTOR, SMALLEST_FACTOR, descale)
    return coded.data, None, torch.where(zero, 1.0, descale)


def _values(v: Tensor, descale: Tensor, form: OperandFormat) -> tuple[Tensor | None, Tensor | None]:
    """Return tile-padded values in an operand format, and their descales."""
    if form is RAW:
        return None, None
    scaled = values_to_e4m3(v, descale)
    if form is DEQUANTIZED:
        return (scaled.float() * descale).to(torch.bfloat16), None
    tiles = scaled.unflatten(2, (-1, TILE)).transpose(-1, -2)  # [B, H, tiles, Dv, 128]
    # Entry 4 t + 2 j + c of a group of 16 holds the key 8 j + 2 t + c.
    order = [
        group + 8 * j + 2 * t + c for group in range(0, TILE, 16) for t in range(4) for j in range(2) for c in (0, 1)
    ]
    return tiles[..., order].contiguous(), descale[:, :, 0]
