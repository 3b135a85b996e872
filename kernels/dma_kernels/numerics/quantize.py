"""Block quantization in PyTorch: the specification of every format, on any device.

Casts use IEEE fp32 arithmetic only. Scales of MX formats are powers of two, so dividing by them is exact. NVFP4 divides
once, correctly rounded. Fused kernels reproduce these results bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from . import formats
from .call import check_floating, check_kind, is_broadcastable, is_int, is_integer
from .formats import TILE, BlockFormat, ElementFormat, ScaleFormat, ScaleRounding, SharedScale, block_format
from .transforms import first_tile

_Choice = TypeVar("_Choice", bound=StrEnum)


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor in a block format. Layouts: see :mod:`dma_kernels.numerics.formats`."""

    # elements ``[..., T, D']`` with ``D'`` the padded head dimension: ``float8_e4m3fn``, int8, or uint8 pairs of E2M1
    # codes (then ``D' / 2``)
    data: Tensor
    scale: Tensor  # ``[..., T, D' / block]``: uint8 E8M0 codes or, for NVFP4, ``float8_e4m3fn``
    global_scale: Tensor | None  # NVFP4's second scale, fp32 ``[..., 1, 1]``; ``None`` for the other formats
    format: BlockFormat  # the block format
    head_dim: int  # ``D`` before padding

    def dequantize(self) -> Tensor:
        """Return the represented values, fp32 ``[..., T, D]``."""
        _, decode = _ELEMENT_CODECS[self.format.element]
        scale, divisor = _scale_as_quotient(self.scale, self.global_scale)
        blocks = _split(decode(self.data), self.format.block_size) * scale / divisor
        return blocks.flatten(-2)[..., : self.head_dim]


@torch.no_grad()
def quantize(
    x: Tensor,
    format: str | BlockFormat,
    *,
    scale_rounding: str = ScaleRounding.CEIL,
    shared_scale: str = SharedScale.BLOCK,
    global_scale: Tensor | None = None,
    tile_offset: int | Tensor = 0,
) -> QuantizedTensor:
    """Quantize the last dimension of ``x`` in blocks. The result has no gradient.

    Args:
        x: ``[..., T, D]``, floating point. Arithmetic is in fp32.
        format: A block format or its name.
        scale_rounding: ``floor``, ``ceil`` or ``search``, see :class:`~dma_kernels.numerics.formats.ScaleRounding`.
        shared_scale: ``block``, ``row``, or ``tile`` (rows whose positions lie in one tile of 128 share a scale).
        global_scale: NVFP4's fp32 scale, broadcastable to ``[..., 1, 1]``. By default :func:`nvfp4_global_scale` of
            the largest finite block, for each ``[T, D]`` matrix.
        tile_offset: Position of row 0 for ``tile``: an int, or an integer tensor ``[B]`` with one for each entry of the
            first dimension.

    Raises:
        TypeError: An argument has the wrong type, ``x`` is not floating point, or ``global_scale`` is not fp32.
        ValueError: A shape or a device is invalid, an option is unknown, or options exclude each other. NVFP4 scales
            and searched scales cannot be shared, and only NVFP4 has a ``global_scale``.
    """
    fmt = format if isinstance(format, BlockFormat) else block_format(format)
    check_floating("x", x)
    if x.ndim < 2:
        raise ValueError(f"x must be [..., tokens, head_dim], got shape {tuple(x.shape)}")
    rounding = _choice("scale_rounding", scale_rounding, ScaleRounding)
    shared = _choice("shared_scale", shared_scale, SharedScale)
    head_dim = x.shape[-1]
    blocks = _split(F.pad(x.float(), (0, -head_dim % fmt.block_size)), fmt.block_size)
    amax = blocks.abs().amax(-1)  # [..., T, D' / block]
    is_searched = rounding is ScaleRounding.SEARCH
    if is_searched and shared is not SharedScale.BLOCK:
        raise ValueError(f"scale_rounding='search' needs shared_scale='block', got {str(shared)!r}")
    if fmt.scale is ScaleFormat.E4M3:
        if shared is not SharedScale.BLOCK:
            raise ValueError(f"shared_scale={str(shared)!r} applies to E8M0 scales; {fmt.name} needs 'block'")
        if global_scale is None:
            # An infinity or a NaN breaks its own block, not the head.
            finite = F.pad(amax.masked_fill(~amax.isfinite(), 0.0), (0, 1, 0, 1))  # so that no dimension is empty
            global_scale = nvfp4_global_scale(finite.amax((-2, -1), keepdim=True), rounding)
        else:
            _check_global_scale(global_scale, x)
        scale, other = (
            _nvfp4_block_scale(amax, global_scale, largest) for largest in (formats.E2M1_MAX, formats.E2M1_SECOND)
        )
        units: tuple[Any, Any] = scale.float(), other.float()
    else:
        if global_scale is not None:
            raise ValueError(f"global_scale applies to nvfp4, not to {fmt.name}, whose scales are powers of two alone")
        amax = _share_amax(amax, shared, tile_offset).expand(amax.shape)
        scale = e8m0_scale(amax, fmt.element, ScaleRounding.CEIL if is_searched else rounding)
        other = e8m0_scale(amax, fmt.element, ScaleRounding.FLOOR)
        units = 2, 1  # where the two differ
    divisor, factor = _scale_as_quotient(scale, global_scale)
    scaled = blocks * factor / divisor
    if is_searched:
        divisor, factor = _scale_as_quotient(other, global_scale)
        scaled_by_other = blocks * factor / divisor
        loss = _loss(scaled, fmt.element) * units[0]
        is_better = _loss(scaled_by_other, fmt.element) * units[1] < loss * formats.SEARCH_MARGIN
        scale = torch.where(is_better, other.view(torch.uint8), scale.view(torch.uint8)).view(scale.dtype)
        scaled = torch.where(is_better[..., None], scaled_by_other, scaled)
    encode, _ = _ELEMENT_CODECS[fmt.element]
    return QuantizedTensor(encode(scaled.flatten(-2)), scale, global_scale, fmt, head_dim)


def e8m0_scale(amax: Tensor, element: ElementFormat, rounding: str = ScaleRounding.CEIL) -> Tensor:
    """Return the uint8 E8M0 code of the scale for blocks with the fp32 largest magnitudes ``amax``, any shape.

    The code stays in 0..254. An ``amax`` near the top of fp32 can saturate INT8, whose scale would have to be
    ``2 ** 128``. The bits of a subnormal one are read like those of a normal number, and can give the code 1 instead
    of 0.
    """
    bits = amax.float().view(torch.int32)
    exponent = (bits >> formats.FP32_MANTISSA_BITS) & formats.FP32_EXPONENT_SPECIAL  # a NaN may have a sign
    code = exponent - element.emax
    if ScaleRounding(rounding) is ScaleRounding.CEIL:
        code = code + ((bits & formats.FP32_MANTISSA_MASK) > element.max_mantissa).int()
    code = code.clamp(0, formats.E8M0_MAX_CODE)
    return torch.where(exponent == formats.FP32_EXPONENT_SPECIAL, formats.E8M0_NAN, code).to(torch.uint8)


def e8m0_to_float(code: Tensor) -> Tensor:
    """Return ``2 ** (code - 127)`` as fp32; the code 255 is NaN and the code 0 the fp32 subnormal ``2 ** -127``."""
    bits = code.int() << formats.FP32_MANTISSA_BITS
    bits = torch.where(code == 0, 1 << (formats.FP32_MANTISSA_BITS - 1), bits)
    return torch.where(code == formats.E8M0_NAN, torch.nan, bits.view(torch.float32))


def nvfp4_global_scale(amax: Tensor, rounding: str = ScaleRounding.CEIL) -> Tensor:
    """Return NVFP4's fp32 scale for heads with the largest magnitudes ``amax``: a power of two.

    The smallest power of two with which no block scale overflows E4M3. NVIDIA's choice is ``amax / (6 * 448)`` itself.
    A power of two costs less than one of E4M3's 15 binades, and quantized values do not depend on it. So a longer
    context with a larger maximum leaves earlier keys unchanged, and decode and prefill see the same numbers.
    """
    return e8m0_to_float(e8m0_scale(amax, formats.nvfp4_scale_element(rounding))).clamp(min=2.0**-126)


def nvfp4_key_scale(key: Tensor, rounding: str, visible: Tensor | None = None) -> Tensor:
    """Return NVFP4's fp32 scale for the transformed keys of each head: a power of two, from the first tile.

    It maps the largest block scale there below 14, of E4M3's 448. So later keys may be 32 times as large, and blocks a
    hundredth as large keep all bits of their scale. Like the mean key, it is known before the first low tile.
    ``visible``, boolean ``[B, T]``, are the visible keys, all by default; the first 128 of them are read.

    Returns:
        fp32 ``[B, H, 1, 1]``. A head without finite nonzero numbers there gets the scale for a largest number of 1.
    """
    amax = _first_magnitudes(key, visible).amax((-2, -1), keepdim=True)
    return nvfp4_global_scale(torch.where(amax == 0, 1.0, amax), rounding) * formats.FIRST_KEYS_ROOM


def value_scale(value: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the scale of ``pv = "fp8"``: a power of two for each batch row, kv head and channel, from the first tile.

    It maps the largest magnitude of a channel there to [8, 16), of E4M3's 448. So a later value may be 28 times as
    large before it saturates, and one a thousandth as large keeps all its bits. Like the mean key, the scale is known
    before the first low tile, and a longer context does not change it. A channel's magnitude counts as at least a 32nd
    of the head's largest one there. ``visible`` is as for :func:`nvfp4_key_scale`.

    Returns:
        fp32 ``[B, H, 1, D]``, at least ``2 ** -126``; 1/8 for a head without finite nonzero numbers there.
    """
    channel = _first_magnitudes(value, visible).amax(-2, keepdim=True)
    head = channel.amax(-1, keepdim=True)
    channel = torch.where(head == 0, 1.0, torch.maximum(channel, head * formats.SMALLEST_CHANNEL))
    return e8m0_to_float(e8m0_scale(channel, formats.FIRST_VALUES, ScaleRounding.FLOOR)).clamp(min=2.0**-126)


def values_to_e4m3(value: Tensor, scale: Tensor) -> Tensor:
    """Return values ``[B, H, T, D]`` in units of :func:`value_scale`; an infinity, which E4M3 lacks, becomes NaN."""
    value = value.float()
    return to_e4m3(value / scale + value * 0.0)


def to_e4m3(x: Tensor) -> Tensor:
    """Cast to E4M3, nearest-even and saturating; NaN stays NaN. fp64 is rounded to fp32 first.

    Before 2.12, torch itself converts magnitudes above 464 to NaN instead of saturating.
    """
    return x.clamp(-formats.E4M3_MAX, formats.E4M3_MAX).to(torch.float8_e4m3fn)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack uint8 E2M1 codes ``[..., D]`` in pairs, the even channel in the low nibble, to ``[..., D / 2]``."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Undo :func:`pack_e2m1`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def e2m1_encode(x: Tensor) -> Tensor:
    """Round to the nearest E2M1 code, ties to the even code, saturating at 6.

    NaN, which E2M1 lacks, gives the code 0 whatever its sign bit: the scale of its block is NaN.

    The boundaries are the midpoints of :data:`~dma_kernels.numerics.formats.E2M1_MAGNITUDES`; whether a midpoint itself
    goes up depends on which neighbour is even.
    """
    m = x.abs()
    code = (m > 0.25).to(torch.uint8) + (m >= 0.75) + (m > 1.25) + (m >= 1.75) + (m > 2.5) + (m >= 3.5) + (m > 5.0)
    return code | ((torch.signbit(x) & ~x.isnan()).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Return the fp32 values of uint8 E2M1 codes; -0.0 for the code 8."""
    magnitudes = torch.tensor(formats.E2M1_MAGNITUDES, dtype=torch.float32, device=codes.device)
    return torch.cat((magnitudes, -magnitudes))[codes.int()]


def _first_magnitudes(x: Tensor, visible: Tensor | None) -> Tensor:
    """Return fp32 magnitudes of the first 128 visible tokens of ``[B, H, T, D]``; 0 for non-finite numbers."""
    magnitude = x.float().abs().nan_to_num(nan=0.0, posinf=0.0)
    if visible is None:
        magnitude = magnitude[..., :TILE, :]
    else:
        magnitude = magnitude.masked_fill(~first_tile(visible)[:, None, :, None], 0.0)
    return F.pad(magnitude, (0, 0, 0, 1))  # so that no dimension is empty


def _choice(name: str, value: str, enum: type[_Choice]) -> _Choice:
    try:
        return enum(value)
    except ValueError:
        raise ValueError(f"{name} must be one of {', '.join(enum)}; got {value!r}") from None


def _check_global_scale(scale: Any, x: Tensor) -> None:
    check_kind("global_scale", scale, x, "x")
    full = (*x.shape[:-2], 1, 1)
    if not is_broadcastable(scale.shape, full):
        raise ValueError(f"global_scale must be broadcastable to {list(full)}, got shape {list(scale.shape)}")
    if scale.dtype != torch.float32:
        raise TypeError(f"global_scale must be fp32, got {scale.dtype}")


def _scale_as_quotient(scale: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor | float]:
    """Return block scales, E8M0 codes or NVFP4's E4M3 numbers, as quotients of two fp32 numbers, ``[..., block, 1]``.

    Both are normal numbers: a CPU may be set to flush the smallest scale, 2^-127, to 0.
    """
    if global_scale is not None:
        return (scale.float() * global_scale)[..., None], 1.0
    exponent = scale.int()[..., None] - formats.E8M0_BIAS
    up, down = (formats.E8M0_BIAS + each.clamp(min=0) for each in (exponent, -exponent))
    return e8m0_to_float(up), e8m0_to_float(down)


def _split(x: Tensor, block_size: int) -> Tensor:
    """Split the last dimension in blocks, ``[..., D]`` to ``[..., D / block, block]``."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // block_size, block_size)


def _share_amax(amax: Tensor, shared: SharedScale, tile_offset: int | Tensor) -> Tensor:
    if shared is SharedScale.BLOCK or amax.numel() == 0:
        return amax
    row = amax.amax(-1, keepdim=True)  # [..., T, 1]
    if shared is SharedScale.ROW:
        return row
    length = row.shape[-2]
    if not (is_integer(tile_offset) if isinstance(tile_offset, Tensor) else is_int(tile_offset)):
        raise TypeError(f"tile_offset must be an int or an integer tensor, got {tile_offset!r}")
    if isinstance(tile_offset, Tensor):
        check_kind("tile_offset", tile_offset, amax, "x")
        if tile_offset.ndim != 1 or (tile_offset.shape[0] != 1 and (row.ndim < 3 or len(tile_offset) != len(row))):
            raise ValueError(
                f"tile_offset must be an int or a tensor [{len(row) if row.ndim > 2 else 1}], "
                f"got shape {list(tile_offset.shape)}"
            )
        tile_offset = tile_offset.long().view(-1, *[1] * (row.ndim - 2))  # [B, 1..]
    # Row indices relative to the start of the first row's tile.
    index = (torch.arange(length, device=row.device) + tile_offset % TILE).div(TILE, rounding_mode="floor")
    index = index.expand(row.shape[:-1])[..., None]
    most_tiles = (length + TILE - 2) // TILE + 1
    largest = row.new_zeros((*row.shape[:-2], most_tiles, 1)).scatter_reduce(-2, index, row, "amax")
    return largest.gather(-2, index)


def _loss(scaled: Tensor, element: ElementFormat) -> Tensor:
    """Return the sum of absolute errors of each block ``[..., n]``, added pairwise, so that its bits are defined."""
    encode, decode = _ELEMENT_CODECS[element]
    error = (scaled - _split(decode(encode(scaled.flatten(-2))), scaled.shape[-1])).abs()
    while error.shape[-1] > 1:
        error = error[..., ::2] + error[..., 1::2]
    return error[..., 0]


def _nvfp4_block_scale(amax: Tensor, global_scale: Tensor, largest: float) -> Tensor:
    """Return the E4M3 scale that takes ``amax`` to the E2M1 number ``largest``."""
    # Restore NaN explicitly: the clamp to E4M3's range would hide an infinite block.
    scale = (amax / global_scale / largest).clamp(formats.E4M3_SMALLEST, formats.E4M3_MAX)
    return torch.where(amax.isfinite(), scale, torch.nan).to(torch.float8_e4m3fn)


def _encode_int8(x: Tensor) -> Tensor:
    codes = (x / formats.MXINT8_UNIT).round().clamp(-formats.MXINT8_MAX_CODE, formats.MXINT8_MAX_CODE)
    return codes.nan_to_num().to(torch.int8)


_ELEMENT_CODECS: dict[ElementFormat, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    formats.E2M1: (lambda x: pack_e2m1(e2m1_encode(x)), lambda data: e2m1_decode(unpack_e2m1(data))),
    formats.E4M3: (to_e4m3, Tensor.float),
    formats.INT8: (_encode_int8, lambda data: data.float() * formats.MXINT8_UNIT),
}
"""Functions that encode numbers, scaled to an element format, as stored elements ``[..., D']``, and decode to fp32."""
