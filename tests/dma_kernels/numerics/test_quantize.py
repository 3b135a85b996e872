"""MX formats equal torchao bit for bit, and all block formats our oracle, also outside torchao's domain."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from dma_kernels import quantize
from dma_kernels.numerics.formats import BLOCK_FORMATS, block_format
from dma_kernels.numerics.quantize import (
    QuantizedTensor,
    e8m0_to_float,
    nvfp4_global_scale,
    nvfp4_key_scale,
    unpack_e2m1,
    value_scale,
    values_to_e4m3,
)
from dma_kernels.testing import assert_bits_equal, mixed_magnitudes
from hypothesis import given
from hypothesis import strategies as st
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

E8M0_FORMATS = ("mxfp4", "mxfp8", "mxint8")
ALL_FORMATS = tuple(BLOCK_FORMATS)
FORMATS_AND_SHARING = [("nvfp4", "block"), *itertools.product(E8M0_FORMATS, ("block", "row", "tile"))]
TORCHAO_ELEMENTS = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8": torch.float8_e4m3fn}
TORCHAO_MODES = {"floor": ScaleCalculationMode.FLOOR, "ceil": ScaleCalculationMode.RCEIL}
SEEDS = st.integers(0, 2**31 - 1)


def element_codes(quantized: QuantizedTensor) -> torch.Tensor:
    """Return the unpacked integer codes."""
    if quantized.format.name == "mxint8":
        return quantized.data
    codes = quantized.data.view(torch.uint8)
    return codes if quantized.format.name == "mxfp8" else unpack_e2m1(codes)


def scale_values(quantized: QuantizedTensor) -> torch.Tensor:
    """Return the scale of each block, without NVFP4's head scale."""
    return quantized.scale.float() if quantized.format.name == "nvfp4" else e8m0_to_float(quantized.scale)


class TestAgainstTorchao:
    @pytest.mark.parametrize("rounding", ["floor", "ceil"])
    @pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
    @given(seed=SEEDS, binades=st.integers(0, 90), is_bf16=st.booleans(), length=st.integers(1, 9))
    def test_mx_formats_equal_torchao(
        self, format: str, rounding: str, seed: int, binades: int, is_bf16: bool, length: int
    ) -> None:
        # Common domain: torchao divides by at least 2**-126, and its RCEIL skips the division if the code is 0, so the
        # magnitudes stay above 2**-110. Its RCEIL takes the logarithm in fp32, which loses an amax within about
        # 2**-17 of a power of two times the element's largest value; those blocks are left to the oracle below.
        dtype = torch.bfloat16 if is_bf16 else torch.float32
        x = mixed_magnitudes(length, 96, seed=seed, binades=binades, dtype=dtype)
        scale, data = to_mx(x, TORCHAO_ELEMENTS[format], 32, TORCHAO_MODES[rounding])
        ours = quantize(x, format, scale_rounding=rounding)
        clear = torch.ones(length, 3, dtype=torch.bool)
        if rounding == "ceil":
            amax = x.float().view(length, 3, 32).abs().amax(-1)
            ratio = torch.log2(amax.double() / block_format(format).element.max_value)
            clear = (ratio - ratio.round()).abs() > 2.0**-15
            clear |= ratio == ratio.round()
        assert_bits_equal(ours.scale[clear], scale.view(torch.uint8)[clear])
        per_block = (length, 3, -1)
        assert_bits_equal(
            ours.data.view(torch.uint8).view(per_block)[clear], data.view(torch.uint8).view(per_block)[clear]
        )


class TestAgainstOracle:
    @staticmethod
    def check(ours: QuantizedTensor, expected) -> None:
        broken = torch.from_numpy(np.isnan(expected.scales))
        size = ours.format.block_size
        assert_bits_equal(scale_values(ours).double(), torch.from_numpy(expected.scales))
        codes = element_codes(ours).view(*ours.scale.shape, size)[~broken]
        assert_bits_equal(codes, torch.from_numpy(expected.codes).view(*ours.scale.shape, size)[~broken])
        values = ours.dequantize()
        # Exact, except for values that round up past the largest fp32 number.
        assert_bits_equal(values, torch.from_numpy(expected.values).float())

    @pytest.mark.parametrize(("shared", "offset"), [("block", 0), ("row", 0), ("tile", 100), ("tile", -37)])
    @pytest.mark.parametrize("rounding", ["floor", "ceil"])
    @pytest.mark.parametrize("format", E8M0_FORMATS)
    def test_shared_mx_scales_equal_the_oracle(
        self, oracle, format: str, rounding: str, shared: str, offset: int
    ) -> None:
        x = mixed_magnitudes(2, 131, 64, seed=7, binades=8)
        ours = quantize(x, format, scale_rounding=rounding, shared_scale=shared, tile_offset=offset)
        self.check(ours, oracle.quantize(x, format, rounding=rounding, shared=shared, offset=offset))

    @pytest.mark.parametrize("head_dim", [8, 16, 33, 80, 96, 200], ids=lambda d: f"D{d}")
    @pytest.mark.parametrize("format", ALL_FORMATS)
    def test_padded_head_dims_equal_the_oracle(self, oracle, format: str, head_dim: int) -> None:
        x = mixed_magnitudes(2, 7, head_dim, seed=3, binades=4)
        ours = quantize(x, format)
        size = block_format(format).block_size
        blocks = math.ceil(head_dim / size)
        assert ours.scale.shape == (2, 7, blocks)
        assert element_codes(ours).shape == (2, 7, blocks * size)
        assert ours.dequantize().shape == x.shape
        self.check(ours, oracle.quantize(x, format))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=lambda d: str(d)[6:])
    @pytest.mark.parametrize("format", ALL_FORMATS)
    def test_dtypes_equal_the_oracle(self, oracle, format: str, dtype: torch.dtype) -> None:
        x = mixed_magnitudes(1, 5, 64, seed=4, binades=3, dtype=dtype)
        self.check(quantize(x, format), oracle.quantize(x, format))

    @pytest.mark.parametrize("format", ALL_FORMATS)
    @given(seed=SEEDS)
    def test_searched_scales_equal_the_oracle(self, oracle, format: str, seed: int) -> None:
        x = mixed_magnitudes(1, 4, 64, seed=seed, binades=4)
        self.check(quantize(x, format, scale_rounding="search"), oracle.quantize(x, format, rounding="search"))

    @pytest.mark.parametrize(
        ("format", "rounding"), [*itertools.product(E8M0_FORMATS, ("floor", "ceil")), ("nvfp4", "ceil")]
    )
    @given(exponent=st.integers(-149, 127), seed=SEEDS)
    def test_fp32_limits_equal_the_oracle(self, oracle, format: str, rounding: str, exponent: int, seed: int) -> None:
        # Subnormals of every size, and numbers up to the largest of fp32.
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(1, 3, 32, generator=generator, dtype=torch.float64) * 1.96 * 2.0**exponent
        if format == "nvfp4":  # block scales of different sizes, which the head's scale spans
            x *= torch.tensor([0.5, 2.0**-9, 2.0**-18])[:, None]
        x = x.clamp(max=torch.finfo(torch.float32).max).float()
        self.check(quantize(x, format, scale_rounding=rounding), oracle.quantize(x, format, rounding=rounding))

    @pytest.mark.parametrize("format", E8M0_FORMATS)
    def test_amax_at_the_saturation_limit_equals_the_oracle(self, oracle, format: str) -> None:
        largest = torch.tensor(block_format(format).element.max_value)
        edge = torch.stack([largest, largest.nextafter(torch.tensor(0.0)), largest.nextafter(torch.tensor(1e9))])
        x = (edge * torch.tensor([[2.0**-30], [1.0], [2.0**30]])).view(1, 9, 1).expand(1, 9, 32)
        for rounding in ("floor", "ceil"):
            self.check(quantize(x, format, scale_rounding=rounding), oracle.quantize(x, format, rounding=rounding))


class TestUnusualValues:
    @pytest.mark.parametrize("format", ALL_FORMATS)
    def test_a_zero_block_quantizes_to_zero(self, format: str) -> None:
        x = torch.cat([torch.zeros(1, 32), torch.full((1, 32), 6.0)], dim=-1)
        ours = quantize(x, format)
        zeros = ours.scale[0, 0].float().item()
        assert zeros == (2.0**-9 if format == "nvfp4" else 0)  # E4M3's smallest; the E8M0 code 0
        assert_bits_equal(ours.dequantize()[:, :32], torch.zeros(1, 32))
        assert_bits_equal(ours.dequantize()[:, 32:], x[:, 32:])
        assert_bits_equal(quantize(0.0 * x, format).dequantize(), 0.0 * x)

    @pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "nvfp4"])
    def test_negative_zero_keeps_its_sign(self, format: str) -> None:
        x = torch.full((1, 32), 6.0)
        x[0, 5] = -0.0
        assert_bits_equal(quantize(x, format).dequantize(), x)

    @pytest.mark.parametrize("value", [math.inf, -math.nan], ids=["inf", "-nan"])
    @pytest.mark.parametrize("format", ALL_FORMATS)
    def test_a_non_finite_value_makes_only_its_block_nan(self, oracle, format: str, value: float) -> None:
        size = block_format(format).block_size
        x = mixed_magnitudes(1, 3, 2 * size, seed=5, binades=2)
        x[0, 1, 3] = value
        ours = quantize(x, format)
        broken = torch.zeros_like(x, dtype=torch.bool)
        broken[0, 1, :size] = True
        assert torch.equal(ours.dequantize().isnan(), broken)
        assert ours.scale[0, 1, 0].float().isnan() or ours.scale[0, 1, 0].item() == 255
        TestAgainstOracle.check(ours, oracle.quantize(x, format))
        if format != "mxfp8":  # E4M3 can encode NaN; other formats store 0 in a NaN block
            assert not (element_codes(ours)[0, 1, :size] != 0).any()

    @pytest.mark.parametrize("value", [math.inf, math.nan], ids=["inf", "nan"])
    @pytest.mark.parametrize(("shared", "rows"), [("row", {1}), ("tile", {0, 1, 2})])
    @pytest.mark.parametrize("format", E8M0_FORMATS)
    def test_a_non_finite_value_makes_all_rows_of_its_scale_nan(
        self, format: str, shared: str, rows: set[int], value: float
    ) -> None:
        x = torch.ones(5, 64)
        x[1, 40] = value
        nan = quantize(x, format, shared_scale=shared, tile_offset=125).dequantize().isnan()
        assert {row for row in range(5) if nan[row].any()} == rows
        assert {row for row in range(5) if nan[row].all()} == rows

    @pytest.mark.parametrize("shape", [(2, 0, 64), (0, 3, 64), (3, 0)], ids=str)
    @pytest.mark.parametrize(("format", "shared"), FORMATS_AND_SHARING)
    def test_empty_tensors_quantize(self, format: str, shared: str, shape: tuple[int, ...]) -> None:
        ours = quantize(torch.empty(shape), format, shared_scale=shared)
        assert ours.dequantize().shape == shape
        assert ours.scale.shape == (*shape[:-1], shape[-1] // block_format(format).block_size)
        if format == "nvfp4":
            assert ours.global_scale is not None
            assert ours.global_scale.shape == (*shape[:-2], 1, 1)


def test_each_batch_row_has_its_own_tile_offset() -> None:
    x = mixed_magnitudes(3, 2, 260, 32, seed=9, binades=8)
    offsets = torch.tensor([0, -37, 100], dtype=torch.int8)
    together = quantize(x, "mxfp8", shared_scale="tile", tile_offset=offsets)
    for row, offset in enumerate(offsets.tolist()):
        alone = quantize(x[row], "mxfp8", shared_scale="tile", tile_offset=offset)
        assert_bits_equal(together.scale[row], alone.scale)
        assert_bits_equal(together.data[row], alone.data)
    shared = quantize(x, "mxfp8", shared_scale="tile", tile_offset=offsets[1:2])
    assert_bits_equal(shared.scale[1], together.scale[1])


class TestNVFP4HeadScale:
    @given(st.floats(2.0**-120, 2.0**126, width=32))
    def test_it_is_the_smallest_power_of_two_that_fits(self, amax: float) -> None:
        scale = nvfp4_global_scale(torch.tensor(amax)).item()
        assert math.frexp(scale)[0] == 0.5
        assert Fraction(amax) <= 6 * 448 * Fraction(scale)
        assert Fraction(amax) > 3 * 448 * Fraction(scale) or scale == 2.0**-126

    def test_every_head_has_its_own_also_for_zero_and_nan(self) -> None:
        x = torch.ones(2, 3, 4, 32)
        x[1, 2], x[0, 1] = 3000.0, 0.0
        made = quantize(x, "nvfp4").global_scale
        assert made is not None
        assert made.shape == (2, 3, 1, 1)
        assert made.flatten().tolist() == [2.0**-11, 2.0**-126, *[2.0**-11] * 3, 2.0]
        assert nvfp4_global_scale(torch.tensor(math.nan)).isnan()


class TestScalesOfTheFirstTile:
    def test_channels_are_scaled_to_8_to_16_and_count_as_a_32nd_of_the_head(self) -> None:
        value = mixed_magnitudes(2, 3, 50, 16, seed=8, binades=4)
        scale = value_scale(value)
        assert scale.shape == (2, 3, 1, 16)
        ratio = value.abs().amax(-2, keepdim=True) / scale
        assert ratio.max() < 16.0
        assert ratio.min() >= 8.0
        assert (torch.frexp(scale).mantissa == 0.5).all()
        value = torch.tensor([1.0, -64.0, 2.0, 0.0]).view(1, 1, 1, 4)
        assert value_scale(value).flatten().tolist() == [0.25, 8.0, 0.25, 0.25]

    def test_masked_and_later_tokens_do_not_affect_scales(self) -> None:
        value = torch.ones(2, 1, 4 + 128, 8)
        value[0, :, 0] = math.inf
        value[0, :, 129], value[1, :, 128] = 100.0, 1000.0
        visible = torch.ones(2, 132, dtype=torch.bool)
        visible[0, 0] = visible[1, 3] = False
        scale = value_scale(value, visible)
        assert scale[0].unique().tolist() == [0.125]
        assert scale[1].unique().tolist() == [64.0]
        assert value_scale(value[1:])[0].unique().tolist() == [0.125]

    @pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
    def test_zero_empty_and_non_finite_values_have_finite_scales(self, broken: float) -> None:
        value = torch.zeros(1, 2, 3, 3)
        value[0, 1, 0] = torch.tensor([2.0, 1.0, broken])
        value[0, 1, 1, 2] = 0.5
        scale = value_scale(value)
        assert scale.flatten().tolist() == [0.125, 0.125, 0.125, 0.25, 0.125, 0.0625]
        assert_bits_equal(value_scale(torch.zeros(1, 2, 0, 3)), torch.full((1, 2, 1, 3), 0.125))
        coded = values_to_e4m3(value, scale).float()
        assert coded[0, 1, 0, 2].isnan()
        assert coded.isnan().sum() == 1

    def test_later_values_saturate_at_28_times_the_first_tile(self) -> None:
        value = torch.tensor([15.0, 420.0, 448.0, -1000.0]).view(1, 1, 4, 1)
        scale = value_scale(value[:, :, :1])
        assert scale.item() == 1.0
        assert values_to_e4m3(value, scale).float().flatten().tolist() == [15.0, 416.0, 448.0, -448.0]

    @pytest.mark.parametrize(("rounding", "largest"), [("ceil", 6.0), ("search", 4.0)])
    def test_nvfp4_keys_have_headroom_of_32_over_the_first_tile(self, rounding: str, largest: float) -> None:
        key = mixed_magnitudes(2, 3, 300, 32, seed=3, binades=4)
        scale = nvfp4_key_scale(key, rounding)
        assert scale.shape == (2, 3, 1, 1)
        first = key[:, :, :128].abs().amax((-2, -1), keepdim=True)
        assert_bits_equal(scale, nvfp4_global_scale(first, rounding) * 32)
        blocks = first / largest / scale
        assert blocks.max() <= 14.0
        assert blocks.min() > 7.0
        later = torch.cat((key, key[:, :, :1] * 1e4), 2)
        assert_bits_equal(nvfp4_key_scale(later, rounding), scale)
        broken = torch.tensor([[0.0, math.nan], [1.0, math.inf]]).view(1, 2, 2, 1)  # counts as a maximum of 1
        one = nvfp4_global_scale(torch.ones(()), rounding) * 32
        assert nvfp4_key_scale(broken, rounding).flatten().tolist() == [one, one]


TILES = {"format": "mxfp8", "shared_scale": "tile"}


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (torch.zeros(2, 32, dtype=torch.int32), {"format": "mxfp8"}, TypeError, "x must be floating point"),
        ([[1.0]], {"format": "mxfp8"}, TypeError, "x must be a torch.Tensor, got list"),
        *(
            (torch.zeros(2, 32), {"format": x}, ValueError, "unknown block format .*; expected one of mxfp4")
            for x in ("bf16", ["mxfp8"])
        ),
        *(
            (torch.zeros(2, 8, 32), {**TILES, "tile_offset": x}, TypeError, "tile_offset must be an int or an integer")
            for x in (1.5, torch.tensor([1.5, 2.0]))
        ),
        *(
            (torch.zeros(3, 8, 32), {"format": "nvfp4", "global_scale": x}, error, f"global_scale must be {message}")
            for x, error, message in (
                (1.0, TypeError, "a torch.Tensor, got float"),
                (torch.ones((), dtype=torch.float64), TypeError, "fp32, got torch.float64"),
                (torch.ones((), device="meta"), ValueError, "on the device of x, cpu, got meta"),
                (torch.ones(2, 1, 1), ValueError, r"broadcastable to \[3, 1, 1\], got shape \[2, 1, 1\]"),
                (torch.ones(3, 8, 1), ValueError, r"broadcastable to \[3, 1, 1\], got shape \[3, 8, 1\]"),
            )
        ),
        (torch.zeros(32), {"format": "mxfp8"}, ValueError, r"x must be \[\.\.\., tokens, head_dim\]"),
        *(
            (torch.zeros(2, 32), {"format": format, **options}, ValueError, message)
            for format, options, message in (
                ("mxfp8", {"scale_rounding": "even"}, "scale_rounding must be one of floor, ceil, search; got 'even'"),
                ("nvfp4", {"shared_scale": "head"}, "shared_scale must be one of block, row, tile; got 'head'"),
                ("nvfp4", {"shared_scale": "row"}, "shared_scale='row' applies to E8M0 scales; nvfp4 needs 'block'"),
                ("mxfp8", {"scale_rounding": "search", "shared_scale": "row"}, "'search' needs shared_scale='block'"),
                ("mxint8", {"global_scale": torch.ones(())}, "global_scale applies to nvfp4, not to mxint8"),
            )
        ),
        (torch.zeros(3, 8, 32), {**TILES, "tile_offset": torch.tensor([1, 2])}, ValueError, r"a tensor \[3\]"),
        (
            torch.zeros(3, 8, 32),
            {**TILES, "tile_offset": torch.zeros(3, dtype=torch.int64, device="meta")},
            ValueError,
            "tile_offset must be on the device of x, cpu, got meta",
        ),
        (torch.zeros(8, 32), {**TILES, "tile_offset": torch.tensor([1, 2])}, ValueError, r"a tensor \[1\]"),
        (torch.zeros(2, 8, 32), {**TILES, "tile_offset": torch.tensor([[1], [2]])}, ValueError, r"a tensor \[2\]"),
    ],
)
def test_an_invalid_argument_is_rejected(
    x: torch.Tensor, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quantize(x, **options)


@pytest.mark.parametrize(("format", "shared"), FORMATS_AND_SHARING)
def test_flushed_subnormal_numbers_make_nothing_nan(format: str, shared: str) -> None:
    """A block of zeros has the scale 2^-127, which is subnormal in fp32; numbers near 2^127 have the largest scales."""
    x = mixed_magnitudes(64, 64, seed=1)
    x[:32] = 0.0
    x[40, :32] *= 2.0**-126
    x[41] = 2.0**127
    expected = quantize(x, format, shared_scale=shared)
    assert torch.set_flush_denormal(True)
    try:
        flushed = quantize(x, format, shared_scale=shared)
        values = flushed.dequantize()
    finally:
        torch.set_flush_denormal(False)
    assert values.isfinite().all()
    normal = slice(42, 64)
    assert_bits_equal(flushed.data[normal], expected.data[normal])
    assert_bits_equal(values[normal], expected.dequantize()[normal])
    assert (values[:32] == 0.0).all()


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_quantization_has_no_gradient(format: str) -> None:
    """PyTorch would round gradients to E4M3 where it casts to that."""
    assert not quantize(torch.randn(4, 32, requires_grad=True), format).dequantize().requires_grad


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_the_default_dtype_does_not_matter(format: str, default: torch.dtype) -> None:
    x = mixed_magnitudes(64, 64, seed=5, binades=4)
    expected = quantize(x, format, scale_rounding="search")
    values = expected.dequantize()
    torch.set_default_dtype(default)
    try:
        found = quantize(x, format, scale_rounding="search")
        assert_bits_equal(found.dequantize(), values)
        assert_bits_equal(found.data, expected.data)
    finally:
        torch.set_default_dtype(torch.float32)
