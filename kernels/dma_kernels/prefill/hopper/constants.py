"""The constexprs of Hopper's prefill kernels; each kernel takes one value that holds them all."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WarpSpecializedConstants:
    """Constexprs of the kernel.

    Attributes:
        q_heads: Query heads.
        kv_heads: kv heads.
        head_dim: Channels of queries, keys and values.
        block_d: Channels padded to a power of two, as descriptors load them.
        warpgroups: Consumer warpgroups.
        stages: Stages of the pipeline.
        registers: Registers of a thread of the consumers except the first, which gets the rest.
        k_layout: ``caller`` or ``aligned`` (:mod:`dma_kernels.prefill.operands`), of the keys of high tiles.
        v_layout: The same of the values of high tiles.
        v_low_layout: The same of the values of low tiles.
        is_causal: Whether a query attends to no key after its own position.
        masks_low: Whether a low tile may be masked, or keys begin inside a tile. Otherwise every query attends to all
            keys before the band.
        has_mean: Whether keys are smoothed.
        is_high_unquantized: Whether the keys of high tiles are the caller's own, which are not smoothed.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    block_d: int
    warpgroups: int
    stages: int
    registers: int
    k_layout: str
    v_layout: str
    v_low_layout: str
    is_causal: bool
    masks_low: bool
    has_mean: bool
    is_high_unquantized: bool


@dataclass(frozen=True)
class MultiCTAConstants:
    """Constexprs of the kernel.

    Attributes:
        q_heads: Query heads.
        kv_heads: kv heads.
        head_dim: Channels of queries, keys and values.
        block_d: Channels padded to 64 or 128, as descriptors load them.
        k_stages: Stages of keys, 1 or 2; 2 for 16-bit low keys.
        v_stages: Stages of values, 1 or 2.
        k_layout: ``caller`` or ``aligned`` (:mod:`dma_kernels.prefill.operands`), of the keys of high tiles.
        q_element: Elements of the queries that the CTA quantises: ``int8`` or ``e4m3``.
        q_format: Their format.
        is_ceil: How their scales are rounded.
        hadamard_size: Order of their rotation: 32, 64 or 128; 0 where they are not rotated.
        is_causal: Whether a query attends to no key after its own position.
        masks_low: Whether a low tile may be masked, or keys begin inside a tile. Otherwise every query attends to all
            keys before the band.
        is_high_unquantized: Whether the keys of high tiles are the caller's own, which are not smoothed.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    block_d: int
    k_stages: int
    v_stages: int
    k_layout: str
    q_element: str
    q_format: str
    is_ceil: bool
    hadamard_size: int
    is_causal: bool
    masks_low: bool
    is_high_unquantized: bool

    @property
    def norm(self) -> float:
        """The factor of the rotation."""
        return math.pow(self.hadamard_size, -0.5) if self.hadamard_size else 1.0
