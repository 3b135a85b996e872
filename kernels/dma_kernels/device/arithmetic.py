"""Arithmetic of the number formats on the device, bit for bit that of :mod:`dma_kernels.numerics.quantize`."""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from ..numerics import formats

IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether Triton's interpreter runs the kernels; read at import, as by ``triton.jit``."""

_MANTISSA_BITS = tl.constexpr(formats.FP32_MANTISSA_BITS)
_MANTISSA_MASK = tl.constexpr(formats.FP32_MANTISSA_MASK)
_SUBNORMAL = tl.constexpr(1 << (formats.FP32_MANTISSA_BITS - 1))  # the bits of 2 ** -127
_SPECIAL = tl.constexpr(formats.FP32_EXPONENT_SPECIAL)
_MAX_CODE = tl.constexpr(formats.E8M0_MAX_CODE)
_NAN_CODE = tl.constexpr(formats.E8M0_NAN)
_E4M3_MAX = tl.constexpr(formats.E4M3_MAX)
_FP16_MAX = tl.constexpr(65_504.0)
_INT8_MAX = tl.constexpr(formats.MXINT8_MAX_CODE * formats.MXINT8_UNIT)
# Adding 1.5 * 2^23 units leaves the integer, rounded to nearest, in the lowest byte.
_INT8_ROUNDING = tl.constexpr(1.5 * 2.0**23 * formats.MXINT8_UNIT)

# The minimax polynomial of tanh(y) / y - 1 in u^2, for u = 2 log2(e) y in -1..1; its relative error is 4e-8.
_TANH_COEFFICIENTS = (-0.040036991238594055, 0.001918970374390483, -8.532182255294174e-05)
_TANH_1, _TANH_2, _TANH_3 = map(tl.constexpr, _TANH_COEFFICIENTS)
_SOFTCAP_ASM = tl.constexpr(
    "{{ .reg .f32 u, z, small, large; .reg .pred is_small; "
    "mul.rn.f32 u, $1, $2; "
    "mul.rn.f32 z, u, u; "
    "fma.rn.f32 small, z, {2}, {1}; "
    "fma.rn.f32 small, z, small, {0}; "
    "mul.rn.f32 small, z, small; "
    "fma.rn.f32 small, $1, small, $1; "
    "ex2.approx.ftz.f32 large, u; "
    "fma.rn.f32 large, large, 0f3F000000, 0f3F000000; "
    "rcp.approx.ftz.f32 large, large; "
    "neg.f32 large, large; "
    "fma.rn.f32 large, large, $3, $3; "
    "setp.lt.f32 is_small, z, 0f3F800000; "
    "selp.f32 $0, small, large, is_small; }}".format(
        *(f"0f{struct.pack('>f', each).hex().upper()}" for each in _TANH_COEFFICIENTS)
    )
)


@triton.jit
def program_block():
    """Return the block index of this CTA, over both block axes of a grid of ``launch.blocks_of_heads``."""
    return tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def e8m0_encode(amax, ELEMENT: tl.constexpr, IS_CEIL: tl.constexpr):
    """Return the E8M0 code, int32, of the scale of a block whose largest magnitude is the fp32 ``amax``.

    ``ELEMENT`` is the :class:`~dma_kernels.numerics.formats.ElementFormat`.
    """
    bits = amax.to(tl.int32, bitcast=True)
    exponent = bits >> _MANTISSA_BITS
    code = exponent - ELEMENT.emax
    if IS_CEIL:
        code += ((bits & _MANTISSA_MASK) > ELEMENT.max_mantissa).to(tl.int32)
    code = tl.minimum(tl.maximum(code, 0), _MAX_CODE)
    return tl.where(exponent == _SPECIAL, _NAN_CODE, code)


@triton.jit
def e8m0_decode(code):
    """Return ``2 ** (code - 127)`` as fp32; NaN for the code 255."""
    bits = tl.where(code == 0, _SUBNORMAL, code << _MANTISSA_BITS)
    return tl.where(code == _NAN_CODE, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def e8m0_reciprocal(code):
    """Return ``2 ** (127 - code)`` as fp32; a product with it is exact, like the specification's division."""
    return tl.where(code == _NAN_CODE, float("nan"), e8m0_decode(-code + _MAX_CODE))


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Convert fp32 to a 16-bit dtype; finite numbers stay finite."""
    if DTYPE == tl.float16:  # noqa: SIM300 (a constexpr)
        x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -_FP16_MAX), _FP16_MAX), x)
    return x.to(DTYPE)


@triton.jit
def dot(a, b):
    """Multiply tiles, accumulating in fp32 or int32. The interpreter lacks bfloat16 products, and uses fp32."""
    if a.dtype == tl.int8:
        product = tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)
    elif IS_INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b)
    return product


@triton.jit
def apply_softcap(x, softcap):
    """Return ``softcap * tanh(x / softcap)`` of fp32 ``x``, in any base, with a relative error of a few ulp.

    So a softcap far above the logits changes nothing.
    """
    # tanh(y) = 1 - 2 / (2^u + 1), with u = 2 log2(e) y, is off by an ulp of 1. So small results take a polynomial.
    slope = 2.8853900817779268 / softcap
    if IS_INTERPRETED:
        u = x * slope
        z = u * u
        small = x + x * (z * (_TANH_1 + z * (_TANH_2 + z * _TANH_3)))
        y = tl.where(z < 1.0, small, softcap - 2.0 * softcap / (tl.exp2(u) + 1.0))
    else:
        # Element by element: with an operation at a time for a whole tile, the kernels would spill it.
        y = tl.inline_asm_elementwise(
            _SOFTCAP_ASM, "=f,f,f,f", [x, slope, softcap], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def with_sign(magnitude, x):
    """Copy the sign bits of fp32 ``x`` to fp32 magnitudes; this keeps -0.0."""
    sign = x.to(tl.int32, bitcast=True) & (-2147483648)
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def round_to_bfloat16(x):
    """Round fp32 to the nearest bfloat16 value, ties to even, still fp32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF).to(tl.float32, bitcast=True)


@triton.jit
def round_to_e4m3(x):
    """Round fp32 in 0..448 to the nearest E4M3 value, ties to even, still fp32: for chips without the cast."""
    bits = x.to(tl.int32, bitcast=True)
    # Drop 20 of fp32's 23 mantissa bits. Below 2^-6, E4M3 has a fixed step of 2^-9, which is the ulp of 2^14.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
    subnormal = (x + 16384.0) - 16384.0
    return tl.where(x < 0.015625, subnormal, normal)


@triton.jit
def to_e4m3(x):
    """Cast fp32 in -448..448 to E4M3, nearest-even; NaN stays NaN."""
    if IS_INTERPRETED:
        # The interpreter's cast does not round to nearest, and turns NaN into a number. So round first: casting an E4M3
        # number is exact.
        code = with_sign(round_to_e4m3(tl.abs(x)), x).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        result = tl.where(x == x, code, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        result = x.to(tl.float8e4nv)
    return result


@triton.jit
def _saturated_code(x):
    """Return the E4M3 code, int32, of fp32 numbers of any size, saturating; NaN stays NaN."""
    saturated = tl.where(x == x, tl.minimum(tl.maximum(x, -448.0), 448.0), x)
    return to_e4m3(saturated).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def pack_e4m3(a, b, c, d):
    """Cast four fp32 tensors to E4M3, saturating, and pack them in the bytes of an int32, ``a`` in the lowest."""
    if IS_INTERPRETED:
        word = _saturated_code(a) | (_saturated_code(b) << 8) | (_saturated_code(c) << 16) | (_saturated_code(d) << 24)
    else:
        # The instruction casts two numbers. Triton would take both from one tensor, and unpack the bytes again.
        word = tl.inline_asm_elementwise(
            """
            {
                .reg .b16 low, high;
                cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
                cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
                mov.b32 $0, {low, high};
            }
            """,
            "=r,f,f,f,f",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return word


@triton.jit
def to_e5m2(x):
    """Cast fp32 in -57344..57344 to E5M2; exact for E5M2 numbers, nearest-even for subnormals; NaN stays NaN."""
    if IS_INTERPRETED:
        # Subnormals have a step of 2^-16, the ulp of 2^7. The rest is as in to_e4m3.
        magnitude = tl.abs(x)
        rounded = tl.where(magnitude < 0.00006103515625, (magnitude + 128.0) - 128.0, magnitude)
        code = with_sign(rounded, x).to(tl.float8e5).to(tl.uint8, bitcast=True)
        code = tl.where(x == x, code, 0x7F).to(tl.uint8)
        result = code.to(tl.float8e5, bitcast=True)
    else:
        result = x.to(tl.float8e5)
    return result


@triton.jit
def to_elements(x, reciprocal, FORM: tl.constexpr, IS_CEIL: tl.constexpr):
    """Return fp32 ``x`` times a power of two as 8-bit elements. Saturates unless ``IS_CEIL``, where scales fit.

    NaN stays NaN in E4M3, and becomes an arbitrary integer in INT8.
    """
    x = x * reciprocal
    if FORM == "int8":
        if not IS_CEIL:
            x = tl.minimum(tl.maximum(x, -_INT8_MAX), _INT8_MAX)
        elements = (x + _INT8_ROUNDING).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        tl.static_assert(FORM == "e4m3", "FORM must be int8 or e4m3")
        if not IS_CEIL:
            x = tl.where(x == x, tl.minimum(tl.maximum(x, -_E4M3_MAX), _E4M3_MAX), x)
        elements = to_e4m3(x)
    return elements


@triton.jit
def permute_keys(p):
    """Reorder the columns of ``[M, N]`` probabilities in groups of 16, to the order of the values in memory.

    A Hopper tensor core gives thread ``t`` of four the columns ``8 j + 2 t + {0, 1}`` of a product, and takes from it
    the columns ``4 t + {0, 1, 2, 3}`` of an 8-bit operand. The sum over keys is independent of their order. So values
    are stored in the order ``(t, j, c)`` of key ``8 j + 2 t + c``, and threads exchange no probabilities: this only
    renames registers.
    """
    M: tl.constexpr = p.shape[0]
    N: tl.constexpr = p.shape[1]
    grouped = tl.permute(tl.reshape(p, [M, N // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    return tl.reshape(grouped, [M, N])


@triton.jit
def hadamard(x, SIZE: tl.constexpr, NORM):
    """Rotate the rows of fp32 ``[ROWS, BLOCK_D]`` by Hadamard blocks of order ``SIZE``, in the reference's order.

    A ``SIZE`` of 0 does not rotate. An MMA with the matrix would spread a row over more threads, which makes its scale
    more expensive.
    """
    ROWS: tl.constexpr = x.shape[0]
    BLOCK_D: tl.constexpr = x.shape[1]
    for level in tl.static_range(0, 8):
        if (1 << level) < SIZE:
            pairs = tl.reshape(x, [ROWS, BLOCK_D // (2 << level), 2, 1 << level])
            bits = pairs.to(tl.int32, bitcast=True)
            # The other number of a pair is the sum of their bits (mod 2^32) minus the bits of this one. Reductions keep
            # numbers in place; tl.split and tl.join would scatter the blocks of a format over threads.
            other = (tl.sum(bits, 2)[:, :, None, :] - bits).to(tl.float32, bitcast=True)
            sign = tl.where(tl.arange(0, 2) == 0, 1.0, -1.0)[None, None, :, None]
            x = tl.reshape(other + sign * pairs, [ROWS, BLOCK_D])
    if SIZE > 0:
        x = x * NORM
    return x
