"""Compile the kernels of a chunk of queries over a cache for any NVIDIA chip, without one: see :mod:`aot`.

Tests run this file as a program: ``python aot_chunk.py RECIPE:ARCH:HEAD_DIM:VALUE_DIM[:body] ...`` prints the kernels
as JSON: those that gather, append, dequantise and attend, or with ``body`` the one that dequantises a body, all of it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
from aot import Compiled, compile_only
from decode_cases import RECIPES
from dma_kernels.cache.chunk import prefill_over_cache
from dma_kernels.cache.dequantize import dequantize_body
from dma_kernels.cache.storage import LayerStorage


def compile_chunk(recipe: str, arch: int, head_dim: int, value_dim: int, option: str = "") -> list[Compiled]:
    """Compile a chunk of 200 queries with 4 query and 2 kv heads."""
    dtype = torch.bfloat16
    storage = LayerStorage.allocate(
        RECIPES[recipe], batch=1, kv_heads=2, head_dim=head_dim, value_dim=value_dim, dtype=dtype,
        device=torch.device("cpu"), tiles=4,
    )  # fmt: skip
    query, key, value = (
        torch.zeros(1, 200, heads, dim, dtype=dtype).transpose(1, 2)
        for heads, dim in ((4, head_dim), (2, head_dim), (2, value_dim))
    )
    with compile_only(arch) as compiled:
        if option == "body":
            dequantize_body(storage, dtype, dtype)
        else:
            prefill_over_cache(query, key, value, storage, window=None, scale=0.125, softcap=None, sinks=None)
    return compiled


if __name__ == "__main__":
    chunks = [argument.split(":") for argument in sys.argv[1:]]
    found = {":".join(c): compile_chunk(c[0], *map(int, c[1:4]), *c[4:]) for c in chunks}
    print(json.dumps({chunk: [asdict(kernel) for kernel in kernels] for chunk, kernels in found.items()}))
