"""Compile the cache kernels for any NVIDIA GPU, without one; see :mod:`aot`.

Tests run this file as a program that reads ``FORMAT:ARCH:HEAD_DIM:VALUE_DIM:QUERIES``: a decode step, or a chunk of
more than 16 queries.
"""

from __future__ import annotations

import torch
from aot import Compiled, answer_calls, compile_only
from dma_kernels.cache.chunked_prefill import chunk_attention, launch_chunk
from dma_kernels.cache.decode import decode_step, launch_decode
from dma_kernels.cache.reference import CacheOptions
from dma_kernels.cache.storage import LayerStorage

SMS = 132
"""Multiprocessors of the chip, more than heads of a step."""


def compile_step(format: str, arch: int, head_dim: int, value_dim: int, queries: int) -> list[Compiled]:
    """Compile a call with 32 query and 8 kv heads."""
    storage = LayerStorage.allocate(
        format, batch=1, kv_heads=8, head_dim=head_dim, value_dim=value_dim, dtype=torch.bfloat16,
        device=torch.device("cpu"), tiles=64,
    )  # fmt: skip
    query, key, value = (
        torch.zeros(1, queries, heads, dim, dtype=torch.bfloat16).transpose(1, 2)
        for heads, dim in ((32, head_dim), (8, head_dim), (8, value_dim))
    )
    with compile_only(arch, SMS) as compiled:
        for planned in (launch_decode, launch_chunk):
            planned.plan.cache_clear()  # plans are not keyed by chip
        attend = decode_step if queries <= 16 else chunk_attention
        attend(query, key, value, storage, CacheOptions(scale=0.125))
    return compiled


if __name__ == "__main__":
    answer_calls(compile_step)
