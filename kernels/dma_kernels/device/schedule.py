"""Which head and which block of queries a CTA of an attention kernel computes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def schedule(blocks, kv_heads, swizzle_group, GROUP: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """Return the kv head of this CTA (of all batch rows), its query head in the group, and its block of queries.

    CTAs are ordered in L2 swizzle groups: kv heads whose keys and values fit in the L2 cache together. In a group the
    blocks with the most keys go first, so that the tail of the launch is short.
    """
    pid = tl.program_id(0)
    first_head = (pid // (swizzle_group * GROUP * blocks)) * swizzle_group
    heads = tl.minimum(swizzle_group, kv_heads - first_head) * GROUP
    i_inner = pid - first_head * GROUP * blocks
    i_head = i_inner % heads
    i_block = i_inner // heads
    return first_head + i_head // GROUP, i_head % GROUP, blocks - 1 - i_block if IS_CAUSAL else i_block


@triton.jit
def schedule_grid(blocks, swizzle_group, GROUP: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """Return the same in the same order for a grid of (query heads of a swizzle group, blocks, swizzle groups).

    It takes no divisions by run-time numbers, which would delay the load of the queries. The kv head may be past the
    last one.
    """
    i_head = tl.program_id(2) * swizzle_group + tl.program_id(0) // GROUP
    i_group = tl.program_id(0) % GROUP
    return i_head, i_group, blocks - 1 - tl.program_id(1) if IS_CAUSAL else tl.program_id(1)
