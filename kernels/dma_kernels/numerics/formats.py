"""Number formats: all constants and packing layouts of the project.

Element and block formats follow the OCP Microscaling Formats (MX) specification v1.0, sections 5 and 6. NVFP4 follows
NVIDIA's description of the Blackwell data type: E2M1 elements, one E4M3 scale per 16 elements, and one fp32 global
scale.

Conventions
    * A tensor of keys or queries is ``[..., T, D]``: tokens, then channels of the head dimension. Blocks lie along
      ``D``. A ``D`` that is not a multiple of the block size is padded with zeros, which do not affect block maxima.
      Any number of tokens is valid, including 0.
    * **E2M1 packing**: two codes per byte, the even channel in the low nibble, so ``[..., T, D]`` becomes uint8
      ``[..., T, D / 2]``. A code is ``sign << 3 | magnitude``, the magnitude indexing :data:`E2M1_MAGNITUDES`.
    * **Scales** are ``[..., T, D / block]``: for MX formats the uint8 code of an E8M0 number (``2 ** (code - 127)``,
      255 is NaN), for NVFP4 ``float8_e4m3fn``.
    * **MXINT8** elements are int8 in units of ``2 ** -6``, so that the largest is 127 / 64 (the code -128 is unused).

Special values
    * A block of zeros has the E8M0 code 0 (NVFP4: the smallest positive E4M3) and dequantizes to zeros.
    * A block that holds an infinity or a NaN has the scale NaN, and all of it dequantizes to NaN. So a broken
      activation shows in the output, as in full precision. If blocks share a scale, all of them become NaN. NVFP4's
      global scale ignores such blocks. The elements of a broken block have the code 0, in E4M3 a NaN.
    * fp32 subnormals are treated like other values. The scale exponent is at least -127.
    * Values that round up to ``2 ** 128`` or more dequantize to infinity, because they exceed the range of fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

TILE = 128
"""Positions per tile. Part of the rule, and independent of the block sizes of kernels."""
TILE_SHIFT = 7
"""Binary logarithm of :data:`TILE`."""
MAX_POSITION = 1 << 30
"""Largest magnitude of an offset, so that positions fit in int32."""
MAX_BAND_TILES = 1 << 20
"""Largest number of band or sink tiles: more than a sequence has."""

E8M0_BIAS = 127
E8M0_NAN = 255
E8M0_MAX_CODE = 254

FP32_MANTISSA_BITS = 23
FP32_MANTISSA_MASK = (1 << FP32_MANTISSA_BITS) - 1
FP32_EXPONENT_SPECIAL = 255

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E2M1_SECOND = 4.0
SEARCH_MARGIN = 1.0 - 2.0**-10
"""A second scale wins if its loss is below this times the first's: with few bits, losses often tie up to rounding."""
E4M3_MAX = 448.0
E4M3_SMALLEST = 2.0**-9
MXINT8_UNIT = 2.0**-6
MXINT8_MAX_CODE = 127

P_SCALE = 256.0
"""Probabilities in ``(0, 1]`` are multiplied by this before they are cast to E4M3 (``pv = "fp8"``)."""


def padded_channels(channels: int) -> int:
    """Return the channels of a tile in registers: a power of two, and a multiple of every block size."""
    return max(32, 1 << (channels - 1).bit_length())


class ScaleRounding(StrEnum):
    """How the scale of a block is chosen from its largest magnitude ``amax``.

    ``floor`` and ``ceil`` apply to E8M0 exponents. With either, NVFP4's E4M3 scale is rounded to nearest.
    """

    FLOOR = "floor"
    """``floor(log2(amax)) - emax`` (OCP MX v1.0, 6.3): magnitudes above the element's largest saturate."""
    CEIL = "ceil"
    """The smallest exponent with which ``amax`` does not saturate."""
    SEARCH = "search"
    """The better of two scales, by the sum of absolute errors in the block. For E8M0 they are those of ``floor`` and
    ``ceil``. For NVFP4 they map ``amax`` to 6 and to 4, because E2M1 has no value between these ("four over six", arXiv
    2512.02010). Needs ``shared_scale = "block"``."""


class SharedScale(StrEnum):
    """Which blocks share a scale. Every choice gives a valid MX tensor."""

    BLOCK = "block"
    """Each block has its own scale."""
    ROW = "row"
    """All blocks of a row (one token of one head) share the scale of the row's largest magnitude."""
    TILE = "tile"
    """All keys in a tile of 128 positions share a scale. Queries have the scales of ``row``."""


@dataclass(frozen=True)
class ElementFormat:
    """A scalar format."""

    name: str  # the name in the specification
    emax: int  # exponent of the largest normal number
    max_value: float  # the largest finite magnitude
    bits: int  # storage in bits

    @property
    def max_mantissa(self) -> int:
        """The 23 fp32 mantissa bits of ``max_value``; an ``amax`` with a larger mantissa would saturate."""
        return round((math.ldexp(self.max_value, -self.emax) - 1.0) * (1 << FP32_MANTISSA_BITS))


E2M1 = ElementFormat("E2M1", emax=2, max_value=E2M1_MAX, bits=4)
E4M3 = ElementFormat("E4M3", emax=8, max_value=E4M3_MAX, bits=8)
FIRST_VALUES = ElementFormat("E4M3 with room for later values", emax=3, max_value=E4M3_MAX, bits=8)
"""Target format of the first tile's values with ``pv = "fp8"``: their largest is scaled into [8, 16). Later values may
be 28 times as large. More headroom would cost small values precision."""
SMALLEST_CHANNEL = 2.0**-5
"""Lower bound on the magnitude that a value channel's scale assumes, relative to the head's largest magnitude."""
FIRST_KEYS_ROOM = 32.0
"""Headroom of NVFP4 keys: the largest block may be this many times as large as those of the first tile."""
INT8 = ElementFormat("INT8", emax=0, max_value=MXINT8_MAX_CODE * MXINT8_UNIT, bits=8)


def nvfp4_scale_element(rounding: str) -> ElementFormat:
    """Return the format of a head's largest magnitude in units of its NVFP4 scale.

    The largest number is that of a block scale times the smallest E2M1 number that a block's largest magnitude may
    become: 6, or 4 for a searched scale.
    """
    top = (E2M1_SECOND if rounding == ScaleRounding.SEARCH else E2M1_MAX) * E4M3_MAX
    return ElementFormat("E4M3 scale of E2M1", emax=math.frexp(top)[1] - 1, max_value=top, bits=8)


class ScaleFormat(StrEnum):
    """The format of a block's scale."""

    E8M0 = "E8M0"
    E4M3 = "E4M3"


@dataclass(frozen=True)
class BlockFormat:
    """A block format: its elements, how many of them share a scale, and the format of the scale."""

    name: str
    element: ElementFormat
    block_size: int
    scale: ScaleFormat

    @property
    def bits_per_element(self) -> float:
        """Bits of an element, including the block scale but not NVFP4's global scale."""
        return self.element.bits + 8 / self.block_size


MXFP4 = BlockFormat("mxfp4", E2M1, 32, ScaleFormat.E8M0)
MXFP8 = BlockFormat("mxfp8", E4M3, 32, ScaleFormat.E8M0)
MXINT8 = BlockFormat("mxint8", INT8, 32, ScaleFormat.E8M0)
NVFP4 = BlockFormat("nvfp4", E2M1, 16, ScaleFormat.E4M3)

BLOCK_FORMATS = {f.name: f for f in (MXFP4, MXFP8, MXINT8, NVFP4)}
"""Block formats by name."""
UNQUANTIZED = "bf16"
"""No quantization: the tensor keeps the model's dtype, even if that is fp16 or fp32."""
FORMAT_NAMES = (UNQUANTIZED, *BLOCK_FORMATS)
"""Names of all formats."""


def block_format(name: str) -> BlockFormat:
    """Return the block format called ``name``.

    Raises:
        ValueError: There is none. The message lists the valid names.
    """
    try:
        return BLOCK_FORMATS[name]
    except (KeyError, TypeError):
        raise ValueError(f"unknown block format {name!r}; expected one of {', '.join(BLOCK_FORMATS)}") from None
