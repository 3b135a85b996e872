"""Configuration of the decode kernel: a pure function of the GPU and of shapes and capacities.

See ``benchmarks/decode.md`` for the design and its timings.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.chip import TENSOR_MEMORY_ARCHS

SHARED_MEMORY = {80: 167_936, 90: 233_472, **dict.fromkeys(TENSOR_MEMORY_ARCHS, 233_472)}
"""Bytes of shared memory of an SM, by architecture; 102,400 on others."""
CTA_RESERVED = 1024
"""Bytes of shared memory that CUDA reserves per CTA."""
WARPS_PER_SM = 8
"""Warps that an SM has registers for, with 255 per thread."""
SPLITS = 32
"""A head with more CTAs gets a multiple of this, which splits the steps of long rows most evenly."""


@dataclass(frozen=True)
class DecodeTiling:
    """How the decode kernel divides its work."""

    warps: int  # warps of a CTA
    steps: int  # steps in which a warp loads the keys of a tile, and its values
    stages: int  # steps in shared memory, per warp
    ctas: int  # CTAs of the grid, which split the tiles of all heads


def select_decode_tiling(
    arch: int, block_d: int, block_dv: int, bits: int, *, heads: int, tiles: int, sms: int
) -> DecodeTiling:
    """Return the configuration of a decode step. It does not depend on how many keys a cache holds.

    ``block_d`` and ``block_dv`` are padded head dimensions, ``heads`` the kv heads of all batch rows, and ``tiles`` the
    tiles that a row can hold, unquantized ones included.
    """
    # With two stages, shared alternately by keys and values, more 8-bit or head_dim 256 warps fit in shared memory.
    stages = 2 if block_d == block_dv and (bits == 8 or block_d > 128) else 4
    # At head_dim 256, smaller stages make room for eight 8-bit warps. With few heads, longer loads are faster.
    steps = 4 if stages == 2 and bits == 8 and block_d > 128 and heads >= sms else 2
    stage_bytes = (block_d + block_dv) * 8 * stages * bits // steps + 4 * block_d + 8 * block_dv
    capacity = SHARED_MEMORY.get(arch, 102_400)
    # Four warps halve the splits of few 4-bit heads. With many heads, smaller CTAs hide each other's latency.
    warps = 4 if bits == 4 and heads < sms else 2
    while warps > 1 and warps * stage_bytes + CTA_RESERVED > capacity:
        warps //= 2
    resident = sms * max(1, min(WARPS_PER_SM // warps, capacity // (warps * stage_bytes + CTA_RESERVED)))
    return DecodeTiling(warps, steps, stages, min(_whole_heads(resident, heads), heads * tiles))


def _whole_heads(resident: int, heads: int) -> int:
    """Return a number of CTAs whose shares end where heads do, for rows of equal length.

    That leaves at most an eighth of the ``resident`` CTAs unused.
    """
    each = resident // heads
    if each > SPLITS:
        each -= each % SPLITS
    ctas = each * heads or -(-heads // -(-heads // resident))
    return ctas if 8 * ctas >= 7 * resident else resident
