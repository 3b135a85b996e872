"""Compile the kernels of a decode step for any NVIDIA chip, without one: see :mod:`aot`.

Tests run this file as a program: ``python aot_decode.py RECIPE:ARCH:HEAD_DIM:QUERIES[:OPTION] ...`` prints the kernels
as JSON. An option is a name in ``aot.OPTIONS``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
from aot import OPTIONS, Compiled, compile_only
from decode_cases import RECIPES
from dma_kernels.cache.decode_step import decode_step
from dma_kernels.cache.storage import LayerStorage


def compile_step(recipe: str, arch: int, head_dim: int, queries: int, option: str = "") -> list[Compiled]:
    """Compile a decode step with 32 query and 8 kv heads."""
    dtype = torch.bfloat16
    storage = LayerStorage.allocate(
        RECIPES[recipe], batch=1, kv_heads=8, head_dim=head_dim, value_dim=head_dim, dtype=dtype,
        device=torch.device("cpu"), tiles=64,
    )  # fmt: skip
    query = torch.empty(1, 32, queries, head_dim, dtype=dtype)
    key = torch.empty(1, 8, queries, head_dim, dtype=dtype)
    with compile_only(arch) as compiled:
        decode_step(query, key, key, storage, scale=0.125, **OPTIONS[option])
    return compiled


if __name__ == "__main__":
    steps = [argument.split(":") for argument in sys.argv[1:]]
    print(json.dumps({":".join(s): [asdict(k) for k in compile_step(s[0], *map(int, s[1:4]), *s[4:])] for s in steps}))
