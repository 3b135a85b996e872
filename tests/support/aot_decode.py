"""Compile the cache kernels for any NVIDIA GPU, without one; see :mod:`aot`.

Tests run this file as a program that reads ``FORMAT:ARCH:HEAD_DIM:VALUE_DIM:QUERIES[:OPTION]``: a decode step, or a
chunk of more than 16 queries. An option is a name in ``aot.OPTIONS``.
"""

from __future__ import annotations

from unittest import mock

import torch
from aot import OPTIONS, Compiled, answer_calls, compile_only
from dma_kernels.cache.chunked_prefill import chunk_attention, launch_chunk
from dma_kernels.cache.decode import decode_step, launch_decode
from dma_kernels.cache.reference import CacheOptions
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.runtime import chip

SMS = 132  # multiprocessors of the chip: with 8 kv heads a step has fewer heads than that, with ``many`` more


def compile_step(
    format: str, arch: int, head_dim: int, value_dim: int, queries: int, option: str = ""
) -> list[Compiled]:
    """Compile a call with 32 query and 8 kv heads."""
    dtype = torch.float16 if option == "fp16" else torch.bfloat16
    batch = 32 if option == "many" else 1
    storage = LayerStorage.allocate(
        format, batch=batch, kv_heads=8, head_dim=head_dim, value_dim=value_dim, dtype=dtype,
        device=torch.device("cpu"), tiles=64,
    )  # fmt: skip
    query, key, value = (
        torch.zeros(batch, queries, heads, dim, dtype=dtype).transpose(1, 2)
        for heads, dim in ((32, head_dim), (8, head_dim), (8, value_dim))
    )
    with compile_only(arch) as compiled, mock.patch.object(chip, "sm_count", return_value=SMS):
        for planned in (launch_decode, launch_chunk):
            planned.plan.cache_clear()  # plans are not keyed by chip
        attend = decode_step if queries <= 16 else chunk_attention
        attend(query, key, value, storage, CacheOptions(scale=0.125, **OPTIONS[option]))
    return compiled


if __name__ == "__main__":
    answer_calls(compile_step)
