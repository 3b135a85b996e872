"""Which backend attends to a cache. What the kernels compute is tested beside them."""

from __future__ import annotations

import pytest
import torch
from decode_cases import FORMATS, assert_storages_equal
from dma_kernels.cache.api import append, cached_attention
from dma_kernels.cache.reference import cached_attention_reference
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.testing import assert_bits_equal, random_qkv, relative_error

LENGTH, STORED = 300, 290


@pytest.fixture(params=FORMATS)
def case(request):
    """New queries, keys and values, a cache of what came before them, and exact attention over it."""
    query, key, value = random_qkv(q_heads=4, kv_heads=2, q_len=LENGTH, kv_len=LENGTH, dtype=torch.float16)
    sizes = {"batch": 1, "kv_heads": 2, "head_dim": 64, "value_dim": 64}
    storage = LayerStorage.allocate(
        request.param, **sizes, dtype=torch.float16, device=torch.device("cpu"), tiles=2, sink_tiles=0
    )
    append(storage, key[:, :, :STORED], value[:, :, :STORED])
    new = [x[:, :, STORED:] for x in (query, key, value)]
    expected, _ = cached_attention_reference(
        new[0].float(), *new[1:], storage, is_causal=True, window=None, scale=0.125
    )
    return new, storage, expected


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_every_backend_decodes_and_stores(case, backend):
    new, storage, expected = case
    out = cached_attention(*new, storage, backend=backend)
    assert storage.lengths.tolist() == [LENGTH]
    assert relative_error(out, expected) < 2e-3
    again = cached_attention(new[0], None, None, storage, backend=backend)
    assert storage.lengths.tolist() == [LENGTH]
    torch.testing.assert_close(again, out, rtol=0, atol=2e-3)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 200}, {"softcap": 5.0}, {"sinks": torch.tensor([0.5, 3.0])}],
    ids=["all", "window", "softcap", "sinks"],
)
def test_chunks_over_a_cache(format, options):
    """Of rows that have different padding; one chunk ends in the tile that it begins in, one in the next."""
    length, padding = 520, torch.tensor([0, 37])
    query, key, value = random_qkv(batch=2, q_len=length, kv_len=length, head_dim=32, dtype=torch.float16)
    sizes = {"batch": 2, "kv_heads": 1, "head_dim": 32, "value_dim": 32, "tiles": 4, "window": options.get("window")}
    storages = []
    for _ in range(2):
        storage = LayerStorage.allocate(format, **sizes, dtype=torch.float16, device=torch.device("cpu"))
        storage.lengths -= padding.int()
        append(storage, key[:, :, :385], value[:, :, :385])
        storages.append(storage)
    for start, end in ((385, 402), (402, length)):
        new = [x[:, :, start:end] for x in (query, key, value)]
        actual, expected = (
            cached_attention(*new, storage, backend=backend, **options)
            for storage, backend in zip(storages, ("triton", "reference"), strict=True)
        )
        assert relative_error(actual, expected) < 2e-3
    assert_storages_equal(*storages)


@pytest.mark.parametrize("window", [2**30, 2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_window_of_everything_hides_nothing(backend, length, window):
    query, key, value = random_qkv(batch=2, q_len=200, kv_len=200, head_dim=16, dtype=torch.float16)
    results = []
    for each in (window, None):
        storage = LayerStorage.allocate(
            "int8", batch=2, kv_heads=1, head_dim=16, value_dim=16, tiles=2, window=each, dtype=torch.float16,
            device=torch.device("cpu"),
        )  # fmt: skip
        storage.lengths -= torch.tensor([0, 190]).int()
        append(storage, key[:, :, :-length], value[:, :, :-length])
        new = [x[:, :, -length:] for x in (query, key, value)]
        results.append(cached_attention(*new, storage, window=each, backend=backend))
    assert_bits_equal(*results)


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (3, {"mask": torch.ones(1, 1, 3, 1).bool()}, r"over a cache it takes no mask, got one of shape \[1, 1, 3, 1\]"),
        (3, {"is_causal": False}, "over a cache it is causal, got is_causal=False"),
    ],
    ids=["mask", "not causal"],
)
def test_what_the_kernel_cannot(case, count, options, message):
    """Asked for by name it raises, and nothing is stored; ``auto`` computes it in torch."""
    new, storage, _ = case
    new = [x[:, :, :1].expand(-1, -1, count, -1) for x in new]
    with pytest.raises(
        RuntimeError, match=f"backend='triton' cannot run: {message}; use backend='reference' or 'auto'"
    ):
        cached_attention(*new, storage, backend="triton", **options)
    assert storage.lengths.tolist() == [STORED]
    assert torch.isfinite(cached_attention(*new, storage, **options)).all()
    assert storage.lengths.tolist() == [STORED + count]
