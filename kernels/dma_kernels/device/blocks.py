"""Block formats: quantize a tile in registers, bit for bit as :mod:`dma_kernels.numerics.quantize` does.

A tile is fp32 ``[ROWS, WIDTH]``, ``WIDTH`` a multiple of the block, with zeros in padded rows and channels. A quantized
tile is a pair of elements and scales. Elements, ``[ROWS, BLOCKS, SIZE]``, are numbers of the element format (integers
for MXINT8), still in fp32. Scales, ``[ROWS, BLOCKS]``, are int32 E8M0 codes or, for NVFP4, E4M3 numbers in fp32.
Nothing here needs a cast that some chips lack.

Formats and scale sharing are the names of :mod:`dma_kernels.numerics.formats`, as constexprs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from ..numerics import formats
from .arithmetic import IS_INTERPRETED, e8m0_decode, e8m0_encode, e8m0_reciprocal, round_to_e4m3, with_sign

_FIRST_KEYS_ROOM = tl.constexpr(formats.FIRST_KEYS_ROOM)
_E2M1_MAX = tl.constexpr(formats.E2M1_MAX)
_E2M1_SECOND = tl.constexpr(formats.E2M1_SECOND)
_SEARCH_MARGIN = tl.constexpr(formats.SEARCH_MARGIN)
_E4M3_MAX = tl.constexpr(formats.E4M3_MAX)
_E4M3_SMALLEST = tl.constexpr(formats.E4M3_SMALLEST)
_INT8_STEPS = tl.constexpr(1.0 / formats.MXINT8_UNIT)
_INT8_UNIT = tl.constexpr(formats.MXINT8_UNIT)
_INT8_MAX = tl.constexpr(float(formats.MXINT8_MAX_CODE))
_NAN_CODE = tl.constexpr(formats.E8M0_NAN)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_E5M2_SHIFT = tl.constexpr(13)  # log2 of the largest scale in the operand format E5M2
_nvfp4_scale_element = triton.constexpr_function(formats.nvfp4_scale_element)


@triton.constexpr_function
def _element_of(FORMAT):
    """Return the element format of a block format."""
    return formats.BLOCK_FORMATS[FORMAT].element


@triton.jit
def _to_e4m3_and_back(x):
    """Round non-negative fp32 to the nearest E4M3 value, ties to even, saturating, still fp32; undefined for NaN."""
    if cuda_capability_geq(8, 9) and not IS_INTERPRETED:
        rounded = x.to(tl.float8e4nv).to(tl.float32)
    else:
        rounded = round_to_e4m3(tl.minimum(x, _E4M3_MAX))
    return rounded


@triton.jit
def _round_magnitude(x, FORMAT: tl.constexpr):
    """Round non-negative fp32 to a block format's nearest element, ties to even, saturating; undefined for NaN."""
    if FORMAT == "mxint8":
        # Adding and subtracting 2^23 rounds to an integer.
        rounded = tl.minimum((x * _INT8_STEPS + 8388608.0) - 8388608.0, _INT8_MAX)
    elif FORMAT == "mxfp8":
        rounded = _to_e4m3_and_back(x)
    else:
        # E2M1's steps are 0.5 below 2, 1 below 4 and 2 above: the ulp of x's own binade, but at least [1, 2), times
        # 2^22.
        binade = (tl.maximum(x, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        # Both products are exact.
        rounded = tl.minimum(tl.fma(binade, -4194304.0, tl.fma(binade, 4194304.0, x)), _E2M1_MAX)
    return rounded


@triton.jit
def e2m1_code(x):
    """Return the code, int32, of an E2M1 number in fp32."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # From 1 up, codes count the exponent and the one mantissa bit; 1.0 has the code 2.
    code = tl.where(magnitude < 0x3F800000, (magnitude != 0).to(tl.int32), (magnitude >> 22) - 252)
    return code | ((bits >> 28) & 8)


@triton.jit
def block_amax(x, SIZE: tl.constexpr):
    """Return the bits of the largest magnitude of each block of ``[ROWS, WIDTH]``, int32 ``[ROWS, WIDTH / SIZE]``.

    The bits of magnitudes sort like the numbers, with infinity and NaN above all others.
    """
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    return tl.max(tl.reshape(bits, [x.shape[0], x.shape[1] // SIZE, SIZE]), 2)


@triton.jit
def e8m0_scale(bits, FORMAT: tl.constexpr, IS_CEIL: tl.constexpr):
    """Return the E8M0 codes, int32, for largest magnitudes with the fp32 ``bits``, any shape."""
    return e8m0_encode(bits.to(tl.float32, bitcast=True), _element_of(FORMAT), IS_CEIL)


@triton.jit
def row_scale(bits, FORM: tl.constexpr, FORMAT: tl.constexpr, IS_CEIL: tl.constexpr):
    """Return the scales that turn rows into 8-bit elements, and the descales of these, fp32.

    ``bits`` are those of the rows' largest magnitudes.
    """
    code = e8m0_scale(bits, FORMAT, IS_CEIL)
    # The smallest scale could make a descale underflow, so a row of zeros gets 1. NaN propagates to the descale.
    descale = tl.where(bits == 0, 1.0, e8m0_decode(code))
    if FORM == "int8":
        descale *= _INT8_UNIT
    return e8m0_reciprocal(code), descale


@triton.jit
def finite_block_amax(x):
    """Return :func:`block_amax` of NVFP4's blocks, with 0 for those that hold an infinity or a NaN."""
    bits = block_amax(x, 16)
    return tl.where(bits < _INFINITY_BITS, bits, 0)


@triton.jit
def nvfp4_global_scale(bits, ROUNDING: tl.constexpr):
    """Return NVFP4's fp32 global scale for the bits of a head's largest finite magnitude: a power of two."""
    code = e8m0_encode(bits.to(tl.float32, bitcast=True), _nvfp4_scale_element(ROUNDING), True)
    return e8m0_decode(tl.maximum(code, 1))


@triton.jit
def nvfp4_key_scale(amax, ROUNDING: tl.constexpr):
    """Return NVFP4's fp32 global scale of a head's keys, given the largest finite magnitude of their first tile."""
    amax = tl.where(amax == 0.0, 1.0, amax)
    return nvfp4_global_scale(amax.to(tl.int32, bitcast=True), ROUNDING) * _FIRST_KEYS_ROOM


@triton.jit
def _divide(x, divisor, reciprocal):
    """Divide fp32 by a number of at most four significant bits, given its rounded reciprocal; correctly rounded.

    A product with Markstein's correction is correctly rounded for every such divisor: a test tries them all.
    """
    if IS_INTERPRETED:
        # The interpreter's fma rounds twice.
        quotient = tl.math.div_rn(x, tl.broadcast_to(divisor, x.shape))
    else:
        divisor, reciprocal = tl.broadcast_to(divisor, x.shape), tl.broadcast_to(reciprocal, x.shape)
        quotient = x * reciprocal
        quotient = tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)
    return quotient


@triton.jit
def _reciprocal(x):
    """Return the rounded reciprocal of E4M3 numbers above 0, fp32; NaN of NaN."""
    if IS_INTERPRETED:
        reciprocal = tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    else:
        # The hardware reciprocal is off by at most an ulp. A Newton step leaves an error of 2^-46, and none of the
        # eight mantissas has a reciprocal that close to a rounding midpoint.
        reciprocal = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
        one = tl.full(x.shape, 1.0, tl.float32)
        reciprocal = tl.fma(reciprocal, tl.fma(-x, reciprocal, one), reciprocal)
    return reciprocal


@triton.jit
def _nvfp4_block_scale(bits, amax, LARGEST: tl.constexpr):
    """Return the E4M3 scale, still fp32, that maps a block's largest magnitude to the E2M1 number ``LARGEST``.

    ``bits`` are those of the magnitude; ``amax`` is the magnitude in units of the global scale.
    """
    scale = _divide(amax, tl.full([1, 1], LARGEST, tl.float32), tl.full([1, 1], 1.0 / LARGEST, tl.float32))
    scale = _to_e4m3_and_back(tl.maximum(scale, _E4M3_SMALLEST))
    return tl.where(bits < _INFINITY_BITS, scale, float("nan"))


@triton.jit
def round_to_units_e4m3(x, scale):
    """Round fp32 ``x`` to E4M3 in units of ``scale``, a power of two, saturating, still fp32; NaN stays NaN."""
    scaled = x * (1.0 / scale)
    rounded = with_sign(round_to_e4m3(tl.minimum(tl.abs(scaled), _E4M3_MAX)), x) * scale
    return tl.where(scaled == scaled, rounded, scaled)


@triton.jit
def _loss(scaled, rounded, FORMAT: tl.constexpr):
    """Return the sum of absolute errors of each block, added pairwise, in the order of the specification."""
    ROWS: tl.constexpr = scaled.shape[0]
    BLOCKS: tl.constexpr = scaled.shape[1]
    SIZE: tl.constexpr = scaled.shape[2]
    if FORMAT == "mxint8":
        rounded = rounded * _INT8_UNIT
    error = tl.abs(scaled - rounded)
    for level in tl.static_range(0, 5):
        if (SIZE >> level) > 1:
            # Not tl.split: the compiler would compute the blocks a second time for its layout.
            error = tl.sum(tl.reshape(error, [ROWS, BLOCKS, SIZE >> (level + 1), 2]), 3)
    return tl.reshape(error, [ROWS, BLOCKS])


@triton.jit
def quantize_blocks(x, global_scale, FORMAT: tl.constexpr, SHARED: tl.constexpr, ROUNDING: tl.constexpr):
    """Quantize fp32 ``[ROWS, WIDTH]``; return elements and scales as the module describes.

    ``global_scale`` is NVFP4's, unused in other formats. With ``SHARED = "tile"`` all rows have one scale.
    """
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    SIZE: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    bits = block_amax(x, SIZE)
    # Round magnitudes, which takes fewer instructions; the signs are restored at the end.
    blocks = tl.reshape(tl.abs(x), [ROWS, WIDTH // SIZE, SIZE])
    if FORMAT == "nvfp4":
        # global_scale is a power of two of at least 2^-126, so its reciprocal is exact.
        unit = tl.zeros(bits.shape, tl.float32) + 1.0 / global_scale
        amax = bits.to(tl.float32, bitcast=True) * unit
        blocks *= unit[:, :, None]
        scale = _nvfp4_block_scale(bits, amax, _E2M1_MAX)
        scaled = _divide(blocks, scale[:, :, None], _reciprocal(scale)[:, :, None])
        elements = _round_magnitude(scaled, FORMAT)
        if ROUNDING == "search":
            other = _nvfp4_block_scale(bits, amax, _E2M1_SECOND)
            scaled_by_other = _divide(blocks, other[:, :, None], _reciprocal(other)[:, :, None])
            others = _round_magnitude(scaled_by_other, FORMAT)
            loss = _loss(scaled, elements, FORMAT) * scale
            is_better = _loss(scaled_by_other, others, FORMAT) * other < loss * _SEARCH_MARGIN
            scale = tl.where(is_better, other, scale)
            elements = tl.where(is_better[:, :, None], others, elements)
        is_broken = scale != scale
    else:
        if SHARED != "block":
            tl.static_assert(ROUNDING != "search", "a scale that is searched for is its block's own")
            bits = tl.max(bits, 1, keep_dims=True)
            if SHARED == "tile":
                bits = tl.max(bits, 0, keep_dims=True)
            bits = tl.broadcast_to(bits, [ROWS, WIDTH // SIZE])
        scale = e8m0_scale(bits, FORMAT, ROUNDING != "floor")
        scaled = blocks * e8m0_reciprocal(scale)[:, :, None]
        elements = _round_magnitude(scaled, FORMAT)
        if ROUNDING == "search":
            other = e8m0_scale(bits, FORMAT, False)
            scaled_by_other = blocks * e8m0_reciprocal(other)[:, :, None]
            others = _round_magnitude(scaled_by_other, FORMAT)
            # Where the two differ, ceil is twice floor.
            loss = 2.0 * _loss(scaled, elements, FORMAT)
            is_better = (_loss(scaled_by_other, others, FORMAT) < loss * _SEARCH_MARGIN) & (other < scale)
            scale = tl.where(is_better, other, scale)
            elements = tl.where(is_better[:, :, None], others, elements)
        is_broken = scale == _NAN_CODE
    elements = with_sign(elements, tl.reshape(x, elements.shape))  # E2M1 has a code for -0.0
    if FORMAT == "mxint8":
        elements += 0.0  # an integer has no -0.0
    elements = tl.where(is_broken[:, :, None], float("nan") if FORMAT == "mxfp8" else 0.0, elements)
    return elements, scale


@triton.jit
def dequantize_blocks(elements, scale, global_scale, FORMAT: tl.constexpr):
    """Return the values of elements and scales, fp32 ``[ROWS, WIDTH]``."""
    if FORMAT == "nvfp4":
        values = elements * (scale * global_scale)[:, :, None]
    else:
        if FORMAT == "mxint8":
            elements = elements * _INT8_UNIT
        values = elements * e8m0_decode(scale)[:, :, None]
    return tl.reshape(values, [elements.shape[0], elements.shape[1] * elements.shape[2]])


@triton.jit
def pack_e2m1(elements):
    """Return the codes of E2M1 elements in pairs, the even channel in the low nibble: uint8 ``[ROWS, WIDTH / 2]``."""
    ROWS: tl.constexpr = elements.shape[0]
    WIDTH: tl.constexpr = elements.shape[1] * elements.shape[2]
    even, odd = tl.split(tl.reshape(e2m1_code(elements), [ROWS, WIDTH // 2, 2]))
    return (even | (odd << 4)).to(tl.uint8)


@triton.jit
def mxfp4_to_e5m2(elements, scale, AXIS: tl.constexpr):
    """Fold MXFP4 scales into E5M2 elements, exact for scales of at least ``2 ** -28`` times the largest.

    ``AXIS`` says what shares a descale: ``tile`` or ``row``.

    Returns:
        E5M2 numbers in fp32 ``[ROWS, WIDTH]``, NaN in a broken block; and their descale, fp32 ``[1, 1]`` or
        ``[ROWS, 1]``, a power of two of at least ``2 ** -126``. The descale of zeros is 1.
    """
    finite = tl.where(scale == _NAN_CODE, 0, scale)
    top = tl.max(finite, 1, keep_dims=True)
    largest = tl.max(tl.max(tl.abs(elements), 2), 1, keep_dims=True)
    if AXIS == "tile":
        top = tl.max(top, 0, keep_dims=True)
        largest = tl.max(largest, 0, keep_dims=True)
    descale_code = tl.maximum(top - _E5M2_SHIFT, 1)
    ratio = e8m0_decode(tl.maximum(scale - descale_code + 127, 0))
    ratio = tl.where(scale == _NAN_CODE, float("nan"), ratio)
    values = tl.reshape(elements * ratio[:, :, None], [elements.shape[0], elements.shape[1] * elements.shape[2]])
    descale = tl.where(largest == 0.0, 1.0, e8m0_decode(descale_code))
    return values, descale
