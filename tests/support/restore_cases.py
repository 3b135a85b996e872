"""Cases of restoring a cache, for the interpreter and for a GPU."""

from __future__ import annotations

import torch
from decode_cases import Case
from dma_kernels.cache.restore import restore_dense
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.numerics.formats import TILE
from dma_kernels.testing import assert_bits_equal

CASES = {
    "ragged": Case(kv_len=400, padding=(0, 130, 390, 420)),
    "ring": Case(kv_len=900, kv_heads=1, window=200, padding=(0, 600)),
    "no-band": Case(kv_len=400, kv_heads=1, diagonal_tiles=0, sink_tiles=0),
    "head-dim-80-96": Case(kv_len=400, kv_heads=1, head_dim=80, value_dim=96),
    "head-dim-96-40": Case(kv_len=400, kv_heads=1, head_dim=96, value_dim=40),
    "head-dim-192-128": Case(kv_len=400, kv_heads=1, head_dim=192, value_dim=128),
    "head-dim-256": Case(kv_len=400, kv_heads=1, head_dim=256),
    "head-dim-8": Case(kv_len=400, kv_heads=1, head_dim=8),
}


def assert_restored(storage: LayerStorage, dtype: torch.dtype) -> None:
    """Compare the kernel with torch on a range that exceeds the stored keys, and on a part of it."""
    longest = int(storage.lengths.max())
    start = torch.full_like(storage.lengths, -5)
    for part in ((start, longest + 9), (start + 75, 200)):
        for actual, expected in zip(restore_dense(storage, *part), storage.restore(*part), strict=True):
            assert actual.dtype == dtype
            assert actual.is_contiguous()
            assert_bits_equal(actual, expected)


def assert_dense(storage: LayerStorage, case: Case) -> None:
    """Compare the KV that a chunk of 30 tokens reads, its own included, with torch."""
    dtype, device = storage.key_residual.dtype, storage.key_residual.device.type
    _, key, value = Case(**{**vars(case), "kv_len": 30}).inputs(dtype, device)
    out_len = min(case.kv_len, (case.window or case.kv_len) + TILE) + 100
    restored = {}
    for rows, length, part in storage.by_length():
        first = max(0, length - (case.window or length)) // TILE * TILE
        last_tile = max(length, 0) // TILE * TILE
        if first not in restored:
            first_position = torch.full_like(storage.lengths, first)
            restored[first] = (
                restore_dense(storage, first_position, out_len, key, value),
                restore_dense(storage, first_position, out_len, as_low=True),
            )
        high, low = restored[first]
        for actual, held, new in zip(high, part.gather(first, max(length, 0), length, 0), (key, value), strict=True):
            seen = max(length, 0) - first
            assert_bits_equal(actual[rows, :, :seen], held.to(dtype))
            added = new[rows, :, max(-length, 0) :]
            assert_bits_equal(actual[rows, :, seen : seen + added.shape[2]], added.contiguous())
            assert (actual[rows, :, seen + added.shape[2] :] == 0).all()
        for actual, held in zip(low, part.gather(first, max(length, 0), length, last_tile), strict=True):
            assert_bits_equal(actual[rows, :, : held.shape[2]], held.to(dtype))
            assert (actual[rows, :, held.shape[2] :] == 0).all()


def random_pages(format: str, dtype: torch.dtype, device: str) -> LayerStorage:
    """Return a cache with random codes, scales and zero points, some of them NaN."""
    storage = Case(kv_len=1024).storage(format, dtype, device, is_filled=False)
    storage.lengths += 1024
    generator = torch.Generator().manual_seed(0)
    storage.kv_pages.copy_(torch.randint(0, 256, storage.kv_pages.shape, generator=generator, dtype=torch.uint8))
    sizes = storage.page_layout.section_bytes
    for start, size in ((sizes[0], 2 * sizes[1]), (sum(sizes[:4]), sizes[4])):
        numbers = torch.randn(*storage.kv_pages.shape[:2], size // 2, generator=generator)
        numbers[torch.rand(numbers.shape, generator=generator) < 0.1] = torch.nan
        storage.kv_pages[..., start : start + size] = numbers.bfloat16().view(torch.uint8).to(device)
    return storage
