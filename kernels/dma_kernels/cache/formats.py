"""Formats of the KV cache: how keys and values are quantized, and which channels are rotated first.

Quantization
    Asymmetric: ``x ~= zero_point + scale * code`` for a group of numbers, with ``code`` an unsigned integer of 4 or 8
    bits. A group of keys is one channel of a tile of 128 tokens; a group of values is up to 64 channels of one token.
    So an outlier key channel does not affect other channels, and scaling a key channel by a power of two changes no
    code. In fp32:

    * ``zero_point`` is the smallest number of the group, rounded down to bfloat16;
    * ``scale`` is ``(largest - zero_point) * (1 / max_code)``, rounded to bfloat16;
    * ``code`` is ``(x - zero_point) / scale``, rounded to nearest even and at most ``max_code``; 0 if ``scale`` is 0.

    Codes are computed from the rounded scale and zero point, so they are the nearest ones. ``scale * code`` is exact in
    fp32. A group with a NaN or an infinity, or whose range overflows fp32, gets a NaN scale and zeros otherwise. All of
    it dequantizes to NaN, so a broken activation shows in the output as it would in 16 bits.

Rotation
    A format may multiply the channels of values, keys or both by the Hadamard matrix ``H`` of
    :func:`~dma_kernels.numerics.transforms.hadamard_transform` before quantization. Dequantized numbers are multiplied
    by its inverse, ``H / order``. ``H`` holds 1 and -1 and its order is a power of two, so only the additions round. A
    non-finite number makes every group of its Hadamard block NaN.

    Rotation spreads an outlier channel over all channels. It always helps values, whose groups span channels. Keys have
    a scale per channel: rotation helps them if the channels of queries and keys are balanced
    (``dma-hf equalize``), and ruins keys with outliers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ..numerics.formats import TILE

VALUE_GROUP = 64
"""Channels of a value that share a scale."""


@dataclass(frozen=True)
class CacheFormat:
    """A precision of cached keys and values."""

    name: str  # the stored name; users choose from ``CACHE_FORMATS``
    bits: int  # bits of a code
    rotate_values: bool = False  # whether values are rotated before quantization
    rotate_keys: bool = False  # whether keys are rotated before quantization

    @property
    def max_code(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1


CACHE_FORMATS: Mapping[str, CacheFormat] = MappingProxyType(
    {format.name: format for format in (CacheFormat("int8", 8), CacheFormat("int4", 4, rotate_values=True))}
)
"""The formats that users choose from, by name."""

EQUALIZED_FORMATS: Mapping[str, CacheFormat] = MappingProxyType(
    {"int4": CacheFormat("int4-equalized", 4, rotate_values=True, rotate_keys=True)}
)
"""Formats that replace those of :data:`CACHE_FORMATS` for models with balanced queries and keys."""

_STORED_FORMATS = {**CACHE_FORMATS, **{format.name: format for format in EQUALIZED_FORMATS.values()}}


def cache_format(name: str, *, is_equalized: bool = False) -> CacheFormat:
    """Return the format with a user-facing name, for a model that is equalized or not.

    Raises:
        ValueError: The name is unknown; the message lists the valid ones.
    """
    try:
        format = CACHE_FORMATS[name]
    except (KeyError, TypeError):
        raise ValueError(f"unknown cache format {name!r}; expected one of {', '.join(CACHE_FORMATS)}") from None
    return EQUALIZED_FORMATS.get(name, format) if is_equalized else format


def stored_format(name: str) -> CacheFormat:
    """Return the format with a stored name (:attr:`CacheFormat.name`); raises as :func:`cache_format` does."""
    return _STORED_FORMATS[name] if name in _STORED_FORMATS else cache_format(name)


@dataclass(frozen=True)
class AffineQuantizedTensor:
    """A quantized tensor, ``x ~= zero_point + scale * code``."""

    code: Tensor  # uint8, in the shape of ``x``
    scale: Tensor  # bfloat16; one entry per group along ``dim``
    zero_point: Tensor  # bfloat16, in the shape of ``scale``
    dim: int  # the dimension that is divided into groups
    group_size: int  # numbers in a group; the last group may be smaller

    def dequantize(self) -> Tensor:
        """Return the numbers in fp32."""
        length = self.code.shape[self.dim]
        scale, zero_point = (
            x.float().repeat_interleave(self.group_size, self.dim).narrow(self.dim, 0, length)
            for x in (self.scale, self.zero_point)
        )
        return zero_point + scale * self.code.float()


def quantize_keys(x: Tensor, format: CacheFormat) -> AffineQuantizedTensor:
    """Quantize tiles of keys ``[..., 128, D]`` with one scale per tile and channel."""
    return _quantize(x, format.max_code, -2, TILE)


def quantize_values(x: Tensor, format: CacheFormat) -> AffineQuantizedTensor:
    """Quantize values ``[..., T, Dv]`` with one scale per token and group of 64 channels."""
    return _quantize(x, format.max_code, -1, VALUE_GROUP)


def _quantize(x: Tensor, max_code: int, dim: int, group_size: int) -> AffineQuantizedTensor:
    groups = torch.tensor_split(x.float(), list(range(group_size, x.shape[dim], group_size)), dim)
    results = [_quantize_group(group, max_code, dim) for group in groups]
    code, scale, zero_point = (torch.cat(pieces, dim) for pieces in zip(*results, strict=True))
    return AffineQuantizedTensor(code, scale, zero_point, dim, group_size)


def _quantize_group(x: Tensor, max_code: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    smallest, largest = torch.aminmax(x, dim=dim, keepdim=True)
    zero_point = _round_down(smallest)
    span = (largest - zero_point).abs()  # without a negative zero
    is_broken = ~span.isfinite()
    scale = (span * (1.0 / max_code)).bfloat16().float()
    scale, zero_point = scale.masked_fill(is_broken, 0.0), zero_point.masked_fill(is_broken, 0.0)
    code = torch.where(scale > 0.0, (x - zero_point) / scale, 0.0).round_().clamp_(max=max_code)
    return code.to(torch.uint8), scale.bfloat16().masked_fill(is_broken, torch.nan), zero_point.bfloat16()


def _round_down(x: Tensor) -> Tensor:
    """Round fp32 towards minus infinity to a bfloat16 number; negative zero becomes positive."""
    bits = x.view(torch.int32)
    bits = torch.where(bits < 0, bits + 0xFFFF, bits) & ~0xFFFF  # rounds magnitudes of negative numbers up
    return bits.view(torch.float32) + 0.0
