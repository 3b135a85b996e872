"""Element casts and scales for every code and every tie, against ml_dtypes and exact integers."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from dma_kernels import BlockFormat, Recipe, attention
from dma_kernels.numerics import formats
from dma_kernels.numerics import quantize as quantization
from dma_kernels.numerics import recipe as recipes
from dma_kernels.numerics.formats import E2M1, E4M3, INT8, ElementFormat, ScaleFormat
from dma_kernels.numerics.quantize import (
    e2m1_decode,
    e2m1_encode,
    e8m0_scale,
    e8m0_to_float,
    pack_e2m1,
    quantize,
    to_e4m3,
    unpack_e2m1,
)
from dma_kernels.testing import assert_bits_equal, random_qkv

ELEMENT_DTYPES = {"E2M1": ml_dtypes.float4_e2m1fn, "E4M3": ml_dtypes.float8_e4m3fn}


def all_values(name: str) -> np.ndarray:
    """Every value of an element format in code order, fp32, E4M3's two NaNs included."""
    return np.arange(16 if name == "E2M1" else 256, dtype=np.uint8).view(ELEMENT_DTYPES[name]).astype(np.float32)


def ties_and_neighbours(name: str) -> torch.Tensor:
    """Every finite value and midpoint with their fp32 neighbours, and the limits of fp32."""
    values = all_values(name)
    values = np.unique(values[np.isfinite(values)])
    middles = (values[1:] + values[:-1]) / 2
    beyond = values[-1] + (values[-1] - values[-2]) * np.array([0.5, 1.0, 1.5], np.float32)
    edges = np.array([2.0**-149, 2.0**-127, 2.0**-126, 1e30, 3e38], np.float32)
    points = np.concatenate([values, middles, beyond, -beyond, edges, -edges])
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(-np.inf)), np.nextafter(points, np.float32(np.inf))]
    )
    return torch.from_numpy(np.concatenate([points, np.array([0.0, -0.0], np.float32)]))


def all_numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a 16-bit dtype except NaN, as fp32."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    return x[~x.isnan()]


def saturated_codes(x: torch.Tensor, name: str) -> torch.Tensor:
    """Codes by ml_dtypes, saturated because ml_dtypes maps a large E4M3 value to NaN."""
    largest = float(ml_dtypes.finfo(ELEMENT_DTYPES[name]).max)
    return torch.from_numpy(np.clip(x.numpy(), -largest, largest).astype(ELEMENT_DTYPES[name]).view(np.uint8))


def encode(x: torch.Tensor, name: str) -> torch.Tensor:
    return e2m1_encode(x) if name == "E2M1" else to_e4m3(x).view(torch.uint8)


@pytest.mark.parametrize(
    ("name", "block", "bits", "scale"),
    [
        ("mxfp4", 32, 4.25, "E8M0"),
        ("mxfp8", 32, 8.25, "E8M0"),
        ("mxint8", 32, 8.25, "E8M0"),
        ("nvfp4", 16, 4.5, "E4M3"),
    ],
)
def test_block_formats_have_the_specified_sizes_and_scales(name: str, block: int, bits: float, scale: str) -> None:
    made = formats.block_format(name)
    assert (made.name, made.block_size, made.bits_per_element, made.scale) == (name, block, bits, ScaleFormat(scale))


class TestE2M1:
    def test_every_code_decodes_to_its_value(self) -> None:
        assert_bits_equal(e2m1_decode(torch.arange(16, dtype=torch.uint8)), torch.from_numpy(all_values("E2M1")))

    def test_infinity_saturates_and_nan_is_zero(self) -> None:
        x = torch.tensor([math.inf, -math.inf, math.nan, -math.nan])
        assert e2m1_encode(x).tolist() == [7, 15, 0, 0]

    def test_every_byte_packs_and_unpacks(self) -> None:
        packed = torch.arange(256, dtype=torch.uint8)
        codes = unpack_e2m1(packed)
        assert_bits_equal(codes[0::2], packed % 16)  # the even channel is the low nibble
        assert_bits_equal(codes[1::2], packed // 16)
        assert_bits_equal(pack_e2m1(codes), packed)


class TestE4M3:
    def test_nan_stays_nan_and_infinity_saturates(self) -> None:
        cast = to_e4m3(torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 464.5, 1e30])).float()
        assert cast[:2].isnan().all()
        assert cast[2:].tolist() == [448.0, -448.0, 448.0, 448.0]


@pytest.mark.parametrize("name", ["E2M1", "E4M3"])
class TestElementCasts:
    def test_ties_and_neighbours_equal_ml_dtypes(self, name: str) -> None:
        x = ties_and_neighbours(name)
        assert_bits_equal(encode(x, name), saturated_codes(x, name))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    def test_every_16_bit_number_equals_ml_dtypes(self, name: str, dtype: torch.dtype) -> None:
        x = all_numbers(dtype)
        assert_bits_equal(encode(x, name), saturated_codes(x, name))


class TestMXINT8:
    """A block with its largest magnitude in [1, 2) has the floor scale 1, so elements are multiples of 1/64."""

    def test_codes_equal_exact_rounding(self) -> None:
        halves = [Fraction(k, 128) for k in range(-255, 256)]  # every code and every tie
        x = torch.tensor([float(h) for h in halves])
        x = torch.cat([x, x.nextafter(torch.tensor(9.0)), x.nextafter(torch.tensor(-9.0))])
        blocks = torch.zeros(len(x), 32)
        blocks[:, 0], blocks[:, 1] = 1.0, x
        # Python's round() of a Fraction is exact and takes ties to even.
        expected = [max(-127, min(127, round(Fraction(v) * 64))) for v in x.tolist()]
        quantized = quantize(blocks, "mxint8", scale_rounding="floor")
        assert quantized.scale.unique().tolist() == [127]
        assert quantized.data[:, 1].tolist() == expected
        assert_bits_equal(quantized.dequantize()[:, 1], torch.tensor(expected) / 64)


class TestE8M0:
    def test_every_code_decodes_to_its_power_of_two(self) -> None:
        codes = torch.arange(256, dtype=torch.uint8)
        expected = codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        assert_bits_equal(e8m0_to_float(codes), torch.from_numpy(expected))

    @pytest.mark.parametrize("rounding", ["floor", "ceil"])
    @pytest.mark.parametrize("element", [E2M1, E4M3, INT8], ids=lambda element: element.name)
    def test_subnormal_and_zero_amax_have_the_smallest_scales(self, element: ElementFormat, rounding: str) -> None:
        amax = torch.tensor([0, 1, 0x3FFFFF, 0x400000, 0x7C0000], dtype=torch.int32).view(torch.float32)
        assert e8m0_scale(amax, element, rounding).tolist() == [0] * 5
        # The last subnormals reach 2 - 2**-22 in units of 2**-127, which INT8 (127 / 64) cannot hold.
        last = torch.tensor([0x7FFFFF], dtype=torch.int32).view(torch.float32)
        assert e8m0_scale(last, element, rounding).tolist() == [int(element is INT8 and rounding == "ceil")]
        # The largest number of fp32 needs the scale 2^128 for INT8, which E8M0 lacks.
        largest = torch.tensor([torch.finfo(torch.float32).max])
        assert e8m0_scale(largest, INT8, rounding).tolist() == [254]

    @pytest.mark.parametrize("rounding", ["floor", "ceil"])
    def test_infinity_and_nan_have_the_nan_scale(self, rounding: str) -> None:
        # A vectorized maximum produces NaNs with the sign bit set.
        negative = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
        amax = torch.cat([torch.tensor([math.inf, math.nan]), negative])
        assert e8m0_scale(amax, E4M3, rounding).tolist() == [255, 255, 255]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add 4-bit integers, one per byte, in blocks of 16."""
    element = ElementFormat("INT4", emax=2, max_value=7.0, bits=4)
    codec = (lambda x: x.round().clamp(-7, 7).nan_to_num().to(torch.int8), torch.Tensor.float)
    monkeypatch.setitem(quantization._ELEMENT_CODECS, element, codec)
    monkeypatch.setitem(formats.BLOCK_FORMATS, "mxint4", BlockFormat("mxint4", element, 16, ScaleFormat.E8M0))
    monkeypatch.setattr(recipes, "FORMAT_NAMES", (*recipes.FORMAT_NAMES, "mxint4"))


@pytest.mark.usefixtures("toy")
def test_a_new_format_needs_only_an_element_its_codec_and_a_block_format() -> None:
    """As ``docs/extending.md`` says."""
    query, key, value = random_qkv(q_len=400, kv_len=400)
    exact = attention(query, key, value, Recipe(low="bf16"))
    low = attention(query, key, value, Recipe(low="mxint4", rotate=True))
    # All earlier tiles are high, and are computed in another block of products.
    torch.testing.assert_close(low[:, :, :256], exact[:, :, :256], rtol=1e-4, atol=1e-5)
    error = (low - exact)[:, :, 256:].norm() / exact[:, :, 256:].norm()
    assert 0.001 < error < 0.3
