"""The constexprs of the prefill kernels; each kernel takes one object that holds them all.

A *form* names an operand format (:mod:`dma_kernels.prefill.operands`), a *format* a number format. Triton 3.6
cannot pass their strings to functions, so kernels first assign them to a ``constexpr`` of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..numerics.formats import padded_channels
from ..numerics.transforms import hadamard_size
from .config import OneWarpgroupConfig, PortableConfig, SplitKVConfig, WarpSpecializedConfig
from .operands import TILE_SCALED


@dataclass(frozen=True, kw_only=True)
class _Constants:
    """Constexprs of all kernels."""

    kv_heads: int  # kv heads
    head_dim: int  # channels of queries and keys
    rotate: bool = False  # whether the kernel rotates queries or keys

    @property
    def block_d(self) -> int:
        """``head_dim`` padded."""
        return padded_channels(self.head_dim)

    @property
    def hadamard_size(self) -> int:
        """Order of the rotation's blocks; 0 without rotation."""
        return hadamard_size(self.head_dim) if self.rotate else 0

    @property
    def norm(self) -> float:
        """The scale of the rotation, which makes it orthonormal."""
        return math.pow(self.hadamard_size, -0.5) if self.rotate else 1.0


@dataclass(frozen=True, kw_only=True)
class _ValueConstants(_Constants):
    """Constexprs of kernels whose values may have other channels than keys."""

    value_dim: int  # channels of values

    @property
    def block_dv(self) -> int:
        """``value_dim`` padded."""
        return padded_channels(self.value_dim)


@dataclass(frozen=True, kw_only=True)
class QuantizerConstants(_ValueConstants):
    """Constexprs of the quantizer of keys and values."""

    high_form: str  # form of the keys of high tiles; ``raw`` writes nothing
    high_format: str  # format of the keys of high tiles
    low_form: str  # form of the keys of low tiles; ``none`` writes nothing
    low_format: str  # format of the keys of low tiles
    shared_scale: str  # ``block``, ``row`` or ``tile``: what shares a scale in low tiles
    value_form: str  # form of the values of low tiles; ``raw`` writes nothing
    rounding: str  # rounding of scales
    use_pdl: bool  # let CTAs of the next launch start once all CTAs of this one have started

    @property
    def is_tile_scaled(self) -> bool:
        """Whether keys of low tiles are 8-bit elements with one scale per tile."""
        return any(self.low_form == form.name for form in TILE_SCALED)


@dataclass(frozen=True, kw_only=True)
class PortableConstants(_ValueConstants):
    """Constexprs of the portable kernel."""

    q_heads: int  # query heads
    tuning: PortableConfig  # block sizes and stages
    high_form: str  # form of the keys of high tiles
    high_format: str  # format of keys and queries of high tiles
    low_form: str  # form of the keys of low tiles; ``none`` if there are none
    low_q_format: str  # format of their queries
    low_k_format: str  # format of the keys
    low_shared: str  # ``block`` or ``row``: what shares a scale in low queries
    low_value_form: str  # form of the values of low tiles
    rounding: str  # rounding of the scales of queries
    is_causal: bool  # whether a query attends to no key after its own position
    is_pv_fp8: bool  # whether low tiles have FP8 probabilities
    use_tma: bool  # whether TMA loads quantized operands
    use_raw_tma: bool  # whether TMA loads 16-bit operands

    @property
    def block_d(self) -> int:
        """``head_dim`` padded; block-scaled tensor cores take 64 channels at a time."""
        return max(64 if "packed" in (self.high_form, self.low_form) else 0, padded_channels(self.head_dim))

    @property
    def has_low(self) -> bool:
        """Whether there are low tiles."""
        return self.low_form != "none"

    @property
    def stage_queries(self) -> bool:
        """Whether low queries pass through the rows of the output, if these have room for them."""
        room = {"none": 0, "packed": 0, "dequantized": self.value_dim}.get(self.low_form, 2 * self.value_dim)
        return self.tuning.stage_queries and self.head_dim <= room


@dataclass(frozen=True, kw_only=True)
class SplitKVConstants(_ValueConstants):
    """Constexprs of the split-KV kernels."""

    q_heads: int  # query heads
    tuning: SplitKVConfig  # block sizes and stages
    use_pdl: bool  # whether the second launch may start before the first one ends

    @property
    def block_s(self) -> int:
        """Splits that are combined at once: as many as fit in the registers of a CTA."""
        return 8192 // self.block_dv


@dataclass(frozen=True, kw_only=True)
class _HopperConstants(_Constants):
    """Constexprs of both Hopper kernels."""

    q_heads: int  # query heads
    is_high_unquantized: bool  # whether the keys of high tiles are the caller's own: unpadded and not smoothed
    is_causal: bool  # whether a query attends to no key after its own position
    # whether a low tile may be masked, or keys begin inside a tile; otherwise every query attends to all keys before
    # the band
    masks_low: bool


@dataclass(frozen=True, kw_only=True)
class WarpSpecializedConstants(_HopperConstants):
    """Constexprs of the warp-specialized kernel."""

    tuning: WarpSpecializedConfig  # warpgroups, stages and registers
    is_low_value_unquantized: bool  # whether the values of low tiles are the caller's own, unpadded
    has_mean: bool  # whether keys are smoothed


@dataclass(frozen=True, kw_only=True)
class OneWarpgroupConstants(_HopperConstants):
    """Constexprs of the one-warpgroup kernel."""

    tuning: OneWarpgroupConfig  # stages
    q_form: str  # form of the queries that the CTA quantizes: ``int8`` or ``e4m3``
    q_format: str  # format of these queries
    is_ceil: bool  # whether their scales are rounded up
