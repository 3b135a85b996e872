"""Bodies of caches that the dequantising kernel is tried on, in the interpreter and on a GPU."""

from __future__ import annotations

import torch
from decode_cases import RECIPES, Case
from dma_kernels.cache.dequantize import dequantize_body
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.numerics.formats import TILE
from dma_kernels.testing import assert_bits_equal
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

CASES = {
    "ragged": Case(kv_len=400, padding=(0, 130, 390, 420)),
    "ring": Case(kv_len=900, window=200, padding=(0, 600)),
    "head-dim-80-96": Case(kv_len=300, head_dim=80, value_dim=96),
    "head-dim-96-40": Case(kv_len=300, head_dim=96, value_dim=40),
    "head-dim-128-64": Case(kv_len=300, head_dim=128),
    "head-dim-192-128": Case(kv_len=300, kv_heads=1, head_dim=192, value_dim=128),
    "head-dim-256": Case(kv_len=300, kv_heads=1, head_dim=256),
    "head-dim-8": Case(kv_len=300, head_dim=8),
}


def complete_slots(storage: LayerStorage) -> list[int]:
    """Return how many slots of each row hold a complete tile."""
    return [min(max(length, 0) // TILE, storage.slots) for length in storage.lengths.tolist()]


def decoded(storage: LayerStorage, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values of the whole body as the codecs have them."""
    key = storage.key_codec.decode(storage.key_body).to(dtype).flatten(2, 3)
    return key, storage.value_codec.decode(storage.value_body).to(dtype).flatten(2, 3)


def assert_dequantized(storage: LayerStorage, dtype: torch.dtype) -> None:
    """Hold the kernel against the codecs, to the bit, wherever there is a complete tile."""
    assert any(complete_slots(storage))
    results = dequantize_body(storage, dtype, dtype)
    for actual, expected in zip(results, decoded(storage, dtype), strict=True):
        assert actual is not None
        assert actual.is_contiguous()
        for row, slots in enumerate(complete_slots(storage)):
            assert_bits_equal(actual[row, :, : slots * TILE], expected[row, :, : slots * TILE])


def random_body(recipe: str, dtype: torch.dtype, device: str) -> LayerStorage:
    """Return a cache whose body is random bytes: every code with every scale, and tiles whose factor is NaN.

    On a CPU E8M0 scales keep their elements among the normal numbers, for Triton's interpreter mistakes others.
    """
    case = Case(kv_len=1024, head_dim=64)
    storage = case.storage(RECIPES[recipe], dtype, device, is_filled=False)
    storage.lengths += case.kv_len
    generator = torch.Generator().manual_seed(0)
    for body in (storage.key_body, storage.value_body):
        for name, part in body.items():
            raw = torch.randint(0, 256, part.view(torch.uint8).shape, generator=generator, dtype=torch.uint8)
            if part.dtype == torch.float8_e4m3fn:
                raw[raw & 0x7F == 0x7F] = 0x33  # a NaN, which quantisers leave to the scale
            if part.dtype == torch.float32:
                powers = torch.randint(-6, 7, part.shape, generator=generator).float().exp2()
                raw = powers.masked_fill(torch.rand(part.shape, generator=generator) < 0.1, torch.nan)
            elif name == "scale" and "factor" not in body and device == "cpu":
                raw.clamp_(min=16)
            elif part.element_size() > 1:
                raw = torch.randn(part.shape, generator=generator).to(part.dtype)
            body[name] = raw.view(part.dtype).to(device)
    return storage
