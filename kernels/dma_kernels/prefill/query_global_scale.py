"""NVFP4's global scale of queries, one per head, from the largest finite block."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device.arithmetic import hadamard, program_block
from ..device.blocks import finite_block_amax, nvfp4_global_scale
from ..device.tiles import Rows, load_visible
from ..numerics.formats import NVFP4, padded_channels
from ..numerics.recipe import Recipe
from ..numerics.transforms import hadamard_size
from ..runtime.launch import blocks_of_heads, launch_kernel

QUERY_BLOCK = 64


def query_global_scale(query: Tensor, recipe: Recipe) -> Tensor | None:
    """Return NVFP4's global scale of each head's transformed queries, fp32 ``[B, Hq]``; ``None`` for other formats."""
    if NVFP4.name not in (recipe.query_low, recipe.high):
        return None
    batch, heads, q_len, head_dim = query.shape
    global_scale = query.new_zeros((batch, heads), dtype=torch.int32)
    size = hadamard_size(head_dim) if recipe.rotate else 0
    constants = {
        "Q_HEADS": heads,
        "D": head_dim,
        "BLOCK_D": padded_channels(head_dim),
        "BLOCK_T": QUERY_BLOCK,
        "HADAMARD_SIZE": size,
        "NORM": math.pow(size, -0.5) if recipe.rotate else 1.0,
        "ROUNDING": recipe.scale_rounding,
    }
    grid = blocks_of_heads(batch * heads, -(-q_len // QUERY_BLOCK))
    launch_kernel(query_global_scale_kernel, constants, grid, query, global_scale, *query.stride(), q_len, num_warps=4)
    return global_scale.view(torch.float32)


@triton.jit(do_not_specialize=["q_len"])
def query_global_scale_kernel(
    q_ptr, global_scale_ptr, stride_qb, stride_qh, stride_qt, stride_qd, q_len,
    Q_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    HADAMARD_SIZE: tl.constexpr, NORM: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Raise the NVFP4 global scale of a head to what a block of its transformed queries needs."""
    i_head = tl.program_id(0).to(tl.int64)
    rows = program_block() * BLOCK_T + tl.arange(0, BLOCK_T)
    base = q_ptr + (i_head // Q_HEADS) * stride_qb + (i_head % Q_HEADS) * stride_qh
    x = load_visible(Rows(base, stride_qt, stride_qd), rows, 0, q_len, D, BLOCK_D)
    x = hadamard(x, HADAMARD_SIZE, NORM)
    largest = tl.max(tl.max(finite_block_amax(x), 1), 0)
    # The scale grows with the largest magnitude, so the head's scale is the largest one. Positive floats sort like
    # their bits.
    tl.atomic_max(
        global_scale_ptr + i_head, nvfp4_global_scale(largest, ROUNDING).to(tl.int32, bitcast=True), sem="relaxed"
    )
