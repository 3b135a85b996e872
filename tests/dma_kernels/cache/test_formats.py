"""Cache formats: codes equal an oracle's bit for bit, and page blocks have the documented layout."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from dma_kernels.cache.formats import (
    CACHE_FORMATS,
    EQUALIZED_FORMATS,
    AffineQuantizedTensor,
    cache_format,
    quantize_keys,
    quantize_values,
    stored_format,
)
from dma_kernels.cache.page_layout import PageLayout
from ml_dtypes import bfloat16

formats = pytest.mark.parametrize("format", CACHE_FORMATS.values(), ids=CACHE_FORMATS)
EQUALIZED = EQUALIZED_FORMATS["int4"]
every_format = pytest.mark.parametrize(
    "format", [*CACHE_FORMATS.values(), EQUALIZED], ids=[*CACHE_FORMATS, EQUALIZED.name]
)


def oracle(group: list[float], max_code: int) -> tuple[list[int], float, float]:
    """Return codes, scale and zero point of one group by exact search over bfloat16 neighbours."""
    numbers = np.array(group, np.float32)
    zero_point = numbers.min().astype(bfloat16)
    if np.float32(zero_point) > numbers.min():
        zero_point = np.nextafter(zero_point, bfloat16(-np.inf))
    span = numbers.max() - np.float32(zero_point)
    scale = float((span * np.float32(1 / max_code)).astype(bfloat16))
    if scale == 0.0:
        return [0] * len(group), scale, float(zero_point)
    quotients = (numbers - np.float32(zero_point)) / np.float32(scale)
    return [min(round(float(q)), max_code) for q in quotients], scale, float(zero_point)


@formats
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_codes_equal_the_oracle(format, kind) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 70, generator=generator) * torch.logspace(-20, 20, 70, base=2.0) + 3.0
    if kind == "keys":
        codes, groups = quantize_keys(x, format), [(slice(None), i, (0, i)) for i in range(70)]
    else:
        codes = quantize_values(x, format)
        parts = enumerate((slice(0, 64), slice(64, 70)))
        groups = [(token, part, (token, group)) for token, (group, part) in product(range(128), parts)]
    for rows, columns, group in groups:
        expected = oracle(x[rows, columns].tolist(), format.max_code)
        assert (codes.code[rows, columns].tolist(), codes.scale[group], codes.zero_point[group]) == expected


@formats
def test_ties_round_to_even_for_every_code(format) -> None:
    """Scale 1 and zero point -8."""
    whole = torch.arange(format.max_code + 1.0)
    halves = whole[:-1] + 0.5
    for numbers, expected in ((whole, whole), (halves, (halves / 2).round() * 2)):
        x = torch.zeros(len(numbers) + 2)
        x[1], x[2:] = format.max_code, numbers
        padded = torch.cat((x, torch.zeros(-len(x) % 64))).view(-1, 64) - 8.0
        padded[:, 0], padded[:, 1] = -8.0, format.max_code - 8.0
        codes = quantize_values(padded, format)
        assert (codes.scale == 1.0).all()
        assert (codes.zero_point == -8.0).all()
        keep = [i for i in range(2, len(x)) if i % 64 > 1]
        assert torch.equal(codes.code.flatten()[keep].float(), expected[[i - 2 for i in keep]])
        assert torch.equal(codes.dequantize().flatten()[keep], expected[[i - 2 for i in keep]] - 8.0)


@formats
def test_constant_groups_are_exact(format) -> None:
    for number in (0.0, -0.0, 1.5, -3.0e38, 1e-45):
        codes = quantize_values(torch.full((2, 64), number), format)
        if number in (0.0, 1.5):
            assert torch.equal(codes.dequantize(), torch.full((2, 64), number))
        assert torch.allclose(codes.dequantize(), torch.full((2, 64), number), rtol=2**-8, atol=1e-40)
    assert not quantize_values(torch.full((1, 64), -0.0), format).zero_point.signbit().any()


@formats
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
def test_a_non_finite_value_makes_only_its_own_group_nan(format, number) -> None:
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    broken = x.clone()
    broken[5, 7] = number
    for quantize, row, column in ((quantize_keys, slice(None), 7), (quantize_values, 5, slice(0, 64))):
        expected = quantize(x, format).dequantize()
        expected[row, column] = math.nan
        codes = quantize(broken, format)
        assert torch.equal(codes.dequantize().nan_to_num(9.0), expected.nan_to_num(9.0))
        assert (codes.code[row, column] == 0).all()
        assert not codes.zero_point.isnan().any()
    x[0, :2] = torch.tensor([3e38, -3e38])  # a range that overflows fp32
    assert quantize_values(x, format).dequantize()[0, :64].isnan().all()


def assert_equal_quantized(actual: AffineQuantizedTensor, expected: AffineQuantizedTensor) -> None:
    for name in ("code", "scale", "zero_point"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


def hadamard(dim: int) -> torch.Tensor:
    """Return the matrix by definition: entry ``(i, j)`` is ``(-1) ** popcount(i & j)``."""
    order = dim & -dim
    entries = [
        [(-1.0) ** (i % order & j % order).bit_count() * (i // order == j // order) for j in range(dim)]
        for i in range(dim)
    ]
    return torch.tensor(entries)


def rotated(x: torch.Tensor, is_rotated: bool) -> torch.Tensor:
    """Multiply by the matrix; exact for small integers."""
    return x @ hadamard(x.shape[-1]).to(x.dtype) if is_rotated else x


class TestPageLayout:
    @every_format
    @pytest.mark.parametrize("dims", [(128, 128), (64, 64), (80, 96), (33, 20), (256, 40), (1, 65)], ids=str)
    def test_unpack_inverts_encode(self, format, dims) -> None:
        layout = PageLayout(format, *dims)
        key, value = (torch.randint(-9, 10, (2, 3, 128, dim)).float() for dim in dims)
        data = layout.encode(key, value)
        assert data.shape == (2, 3, layout.nbytes)
        assert layout.nbytes % 128 == 0
        keys, values = layout.unpack(data)
        assert_equal_quantized(keys, quantize_keys(rotated(key, format.rotate_keys), format))
        assert_equal_quantized(values, quantize_values(rotated(value, format.rotate_values), format))
        assert layout.encode(key[:0], value[:0]).shape == (0, 3, layout.nbytes)
        assert layout.decode(data[:, :0])[1].shape == (2, 0, 128, dims[1])

    def test_offsets_match_the_documentation(self) -> None:
        """Check one number of each section at an offset computed by hand from the module's docstring."""
        generator = torch.Generator().manual_seed(0)
        key, value = torch.randn(2, 128, 128, generator=generator)
        four, eight = (PageLayout(format, 128, 128) for format in (CACHE_FORMATS["int4"], CACHE_FORMATS["int8"]))
        assert (four.nbytes, eight.nbytes) == (17920, 34304)
        data = four.encode(key, value)
        keys, values = four.unpack(data)
        # Token 77 is row 13 = 8 * 1 + 5 of its block, channel 45 column 13 = 8 * 1 + 2 * 2 + 1: block 2 * 4 + 1, word
        # 16 * 5 + 4 * 2 + 1, bits from 4 * (1 + 4) on. Codes are stored minus 8, in two's complement.
        assert (data[9 * 512 + 4 * 89 + 2] >> 4) ^ 8 == keys.code[77, 45]
        # For values, channel 45 is the row and token 77 the column: block 2 * 4 + 1, the same word and bits.
        assert (data[8704 + 9 * 512 + 4 * 89 + 2] >> 4) ^ 8 == values.code[77, 45]
        bf16 = data.view(torch.bfloat16)
        assert bf16[(8192) // 2 + 32 + 2 * 8 + 2 * 1 + 1] == keys.scale[0, 45]
        assert bf16[(8192 + 256) // 2 + 32 + 2 * 8 + 2 * 1 + 1] == keys.zero_point[0, 45]
        pair = (16896 // 4 + ((2 * 2 + 1) * 8 + 5) * 4 + 1) * 2
        assert bf16[pair] == values.scale[77, 1]
        assert bf16[pair + 1] == values.zero_point[77, 1]
        # Eight bits: blocks of 16 columns, so block 2 * 8 + 2, and byte 1 + 2 of the same word.
        assert eight.encode(key, value)[18 * 512 + 4 * 89 + 3] ^ 0x80 == quantize_keys(key, eight.format).code[77, 45]

    @every_format
    @pytest.mark.parametrize("dim", [128, 80, 33])
    def test_dequantization_undoes_the_rotation(self, format, dim) -> None:
        layout = PageLayout(format, dim, dim)
        key, value = torch.randn(2, 1, 128, dim, generator=torch.Generator().manual_seed(dim))
        data = layout.encode(key, value)
        order = dim & -dim
        for actual, codes, is_rotated in zip(
            layout.decode(data), layout.unpack(data), (format.rotate_keys, format.rotate_values), strict=True
        ):
            expected = rotated(codes.dequantize().double(), is_rotated) / (order if is_rotated else 1)
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)


def test_an_equalized_model_gets_rotated_keys_where_they_help() -> None:
    assert cache_format("int4", is_equalized=True) is EQUALIZED
    assert stored_format(EQUALIZED.name) is EQUALIZED
    assert cache_format("int8", is_equalized=True) is CACHE_FORMATS["int8"]


def test_an_unknown_format_is_rejected() -> None:
    with pytest.raises(ValueError, match="unknown cache format 'int3'; expected one of int8, int4"):
        cache_format("int3")
    with pytest.raises(ValueError, match="unknown cache format 'int4-equalized'; expected one of int8, int4"):
        cache_format(EQUALIZED.name)  # set by the model's configuration, not by the user
