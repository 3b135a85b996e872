"""The constexprs of Hopper's prefill kernels; each kernel takes one value that holds them all."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WarpSpecializedConstants:
    """Constexprs of the kernel."""

    q_heads: int  # query heads
    kv_heads: int  # kv heads
    head_dim: int  # channels of queries, keys and values
    block_d: int  # channels padded to a power of two, as descriptors load them
    warpgroups: int  # consumer warpgroups
    stages: int  # stages of the pipeline
    registers: int  # registers of a thread of the consumers except the first, which gets the rest
    k_layout: str  # ``caller`` or ``aligned`` (:mod:`dma_kernels.runtime.operand_formats`), of the keys of high tiles
    v_layout: str  # the same of the values of high tiles
    v_low_layout: str  # the same of the values of low tiles
    is_causal: bool  # whether a query attends to no key after its own position
    # whether a low tile may be masked, or keys begin inside a tile. Otherwise every query attends to all keys before
    # the band
    masks_low: bool
    has_mean: bool  # whether keys are smoothed
    is_high_unquantized: bool  # whether the keys of high tiles are the caller's own, which are not smoothed


@dataclass(frozen=True)
class MultiCTAConstants:
    """Constexprs of the kernel."""

    q_heads: int  # query heads
    kv_heads: int  # kv heads
    head_dim: int  # channels of queries, keys and values
    block_d: int  # channels padded to 64 or 128, as descriptors load them
    k_stages: int  # stages of keys, 1 or 2; 2 for 16-bit low keys
    v_stages: int  # stages of values, 1 or 2
    k_layout: str  # ``caller`` or ``aligned`` (:mod:`dma_kernels.runtime.operand_formats`), of the keys of high tiles
    q_element: str  # elements of the queries that the CTA quantises: ``int8`` or ``e4m3``
    q_format: str  # their format
    is_ceil: bool  # how their scales are rounded
    hadamard_size: int  # order of their rotation: 32, 64 or 128; 0 where they are not rotated
    is_causal: bool  # whether a query attends to no key after its own position
    # whether a low tile may be masked, or keys begin inside a tile. Otherwise every query attends to all keys before
    # the band
    masks_low: bool
    is_high_unquantized: bool  # whether the keys of high tiles are the caller's own, which are not smoothed

    @property
    def norm(self) -> float:
        """The factor of the rotation."""
        return math.pow(self.hadamard_size, -0.5) if self.hadamard_size else 1.0
