"""Dispatch of attention over a cache, and agreement of its backends."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from decode_cases import assert_storages_equal
from dma_kernels.cache import api as cache_api
from dma_kernels.cache.api import append, cached_attention
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.testing import assert_bits_equal, random_qkv, relative_error


def empty(format: str, padding: tuple[int, ...], **options) -> LayerStorage:
    """Return a cache whose rows begin with padding."""
    sizes = {"batch": len(padding), "kv_heads": 1, "head_dim": 16, "value_dim": 16} | options
    storage = LayerStorage.allocate(format, **sizes, dtype=torch.float16, device=torch.device("cpu"))
    storage.lengths -= torch.tensor(padding).int()
    return storage


@pytest.mark.parametrize(
    ("format", "options"),
    [("int8", {}), ("int4", {"window": 200}), ("int4", {"softcap": 5.0}), ("int4", {"sinks": torch.tensor([0.5, 3])})],
)
def test_chunks_over_a_cache(format, options):
    """Rows differ in padding. One chunk stays within a tile, the other crosses into the next."""
    query, key, value = random_qkv(batch=2, q_len=520, kv_len=520, head_dim=16, dtype=torch.float16)
    storages = [empty(format, (0, 37), tiles=4, window=options.get("window")) for _ in range(2)]
    for storage in storages:
        append(storage, key[:, :, :385], value[:, :, :385])
    for start, end in ((385, 402), (402, 520)):
        new = [x[:, :, start:end] for x in (query, key, value)]
        actual, expected = (
            cached_attention(*new, storage, backend=backend, **options)
            for storage, backend in zip(storages, ("triton", "reference"), strict=True)
        )
        assert relative_error(actual, expected) < 2e-3
    assert_storages_equal(*storages)


@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize(
    ("backend", "window"),
    [("reference", 2**40), ("triton", 2**31 - 1), ("triton", 2**40)],
)
def test_a_window_larger_than_the_sequence_masks_nothing(backend, length, window):
    query, key, value = random_qkv(batch=2, q_len=200, kv_len=200, head_dim=16, dtype=torch.float16)
    results = []
    for each in (window, None):
        storage = empty("int8", (0, 190), tiles=2, window=each)
        append(storage, key[:, :, :-length], value[:, :, :-length])
        new = [x[:, :, -length:] for x in (query, key, value)]
        results.append(cached_attention(*new, storage, window=each, backend=backend))
    assert_bits_equal(*results)


MASKS = {
    "broadcast": ((1, 1, -1, 1), None),
    "keys": ((2, 1, 1, 128), [100, 90]),  # in tile 1, too
    "heads": ((1, 4, -1, 300), [40, 90]),
    "before and after": ((2, 1, -1, 640), [-200, -37]),
    "no key": ((1, 1, 1, 50), [500, 600]),
}


@pytest.mark.parametrize(
    ("call", "is_causal", "mask"),
    [
        *product([(40, False)], [True], (None, *MASKS)),
        # One query, and five of stored keys, run on the same kernel as 40.
        *product([(1, False), (5, True)], [False], (None, "heads", "before and after")),
    ],
)
def test_masks_and_bidirectional_calls_match_the_reference(call, is_causal, mask):
    length, is_stored = call
    query, key, value = random_qkv(
        batch=2, q_heads=4, kv_heads=2, q_len=420, kv_len=420, head_dim=16, dtype=torch.float16
    )
    options = {} if is_causal else {"is_causal": False, "window": 129}
    if mask is not None:
        shape, position = MASKS[mask]
        shape = [length if size == -1 else size for size in shape]
        options["mask"] = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.6
        options["mask_position"] = None if position is None else torch.tensor(position)
    results = []
    for backend in ("triton", "reference"):
        storage = empty("int4", (0, 37), kv_heads=2, tiles=3, window=options.get("window"))
        end = 420 if is_stored else 420 - length
        storage.append(key[:, :, :end], value[:, :, :end])
        new = [None, None] if is_stored else [key[:, :, end:], value[:, :, end:]]
        results.append((cached_attention(query[:, :, -length:], *new, storage, **options, backend=backend), storage))
    (ours, stored), (expected, expected_stored) = results
    torch.testing.assert_close(ours, expected, atol=3e-3, rtol=0.0)
    assert_storages_equal(stored, expected_stored)


@pytest.mark.parametrize(
    ("count", "options"), [(1, {"mask": torch.ones(1, 1, 1, 1).bool()}), (1, {"is_causal": False}), (1, {}), (40, {})]
)
def test_triton_backend_never_calls_the_reference(count, options, monkeypatch):
    monkeypatch.setattr(cache_api, "resolve_backend", lambda *_: "triton")  # as ``auto`` on a GPU
    monkeypatch.setattr(cache_api, "cached_attention_reference", None)
    query, key, value = random_qkv(q_len=count, kv_len=count, head_dim=16, dtype=torch.float16)
    storage = empty("int4", (0,), tiles=1)
    for length, new in ((count, (key, value)), (2 * count, (key, value)), (2 * count, (None, None))):
        assert torch.isfinite(cached_attention(query, *new, storage, backend="auto", **options)).all()
        assert storage.lengths.tolist() == [length]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("count", [1, 100])
def test_keys_past_the_reserved_tiles_are_rejected(backend, count, monkeypatch):
    """The longer of two padded rows with two pages each does not fit, and nothing is stored."""
    monkeypatch.setattr(cache_api, "resolve_backend", lambda *_: backend)  # also used for storing
    query, key, value = random_qkv(batch=2, q_len=600, kv_len=600, head_dim=16, dtype=torch.float16)
    storage = empty("int8", (60, 100), tiles=2)
    append(storage, key[:, :, : 443 - count], value[:, :, : 443 - count])
    assert storage.lengths.tolist() == [383 - count, 343 - count]  # tile 2 is incomplete
    cached_attention(*(x[:, :, 443 - count : 443] for x in (query, key, value)), storage)
    before = storage.mapped(torch.clone)
    new = [x[:, :, 443 : 443 + count] for x in (query, key, value)]
    message = r"the cache has room for 2 tiles of 128 tokens, but \d+ tokens fill 3; call reserve\(3\) first"
    for call in (lambda: cached_attention(*new, storage), lambda: append(storage, *new[1:])):
        with pytest.raises(ValueError, match=message):
            call()
    assert_storages_equal(storage, before)
    storage.reserve(3)
    cached_attention(*new, storage)
    assert storage.lengths.tolist() == [383 + count, 343 + count]
