"""Which backend attends to a cache. What the kernels compute is tested beside them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from dma_kernels import attention, attention_with_lse
from dma_kernels.cache.api import append, cached_attention
from dma_kernels.cache.chunk import prefill_over_cache
from dma_kernels.cache.decode import decode_attention
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.testing import RECIPES, random_qkv

LENGTH, STORED = 300, 290


@pytest.fixture(params=["mxint8-tile", "nvfp4-keys-values"])
def case(request):
    """New queries, keys and values, a cache of what came before them, and the whole sequence's attention."""
    recipe = RECIPES[request.param]
    query, key, value = random_qkv(q_heads=4, kv_heads=2, q_len=LENGTH, kv_len=LENGTH, dtype=torch.float16)
    sizes = {"batch": 1, "kv_heads": 2, "head_dim": 64, "value_dim": 64}
    storage = LayerStorage.allocate(recipe, **sizes, dtype=torch.float16, device=torch.device("cpu"), tiles=2)
    append(storage, key[:, :, :STORED], value[:, :, :STORED])
    expected = attention(*(x.double() for x in (query, key, value)), recipe)[:, :, STORED:]
    return [x[:, :, STORED:] for x in (query, key, value)], storage, expected


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_every_backend_decodes_and_stores(case, backend):
    new, storage, expected = case
    out = cached_attention(*new, storage, backend=backend)
    assert storage.lengths.tolist() == [LENGTH]
    tolerance = 2e-2 if storage.recipe.pv == "fp8" else 5e-3  # probabilities of three bits fall this way or that
    assert (out - expected).abs().max() / expected.abs().max() < tolerance
    again = cached_attention(new[0], None, None, storage, backend=backend)
    assert storage.lengths.tolist() == [LENGTH]
    torch.testing.assert_close(again, out, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", ["mxint8-tile", "nvfp4-keys-values", "mxfp8-row", "identity"])
@pytest.mark.parametrize("window", [None, 200], ids=["all", "window"])
def test_chunks_over_a_cache(name, window):
    """Of rows that have different padding; one chunk ends in the tile that it begins in, one in the next."""
    recipe = dataclasses.replace(RECIPES[name], sink_tiles=1 if window is None else 0)
    length, padding = 520, torch.tensor([0, 37])
    query, key, value = random_qkv(batch=2, q_len=length, kv_len=length, head_dim=32, dtype=torch.float16)
    sizes = {"batch": 2, "kv_heads": 1, "head_dim": 32, "value_dim": 32, "tiles": 4, "window": window}
    storages = []
    for _ in range(2):
        storage = LayerStorage.allocate(recipe, **sizes, dtype=torch.float16, device=torch.device("cpu"))
        storage.lengths -= padding.int()
        append(storage, key[:, :, :385], value[:, :, :385])
        storages.append(storage)
    for start, end in ((385, 402), (402, length)):
        new = [x[:, :, start:end] for x in (query, key, value)]
        actual, expected = (
            cached_attention(*new, storage, backend=backend, window=window)
            for storage, backend in zip(storages, ("triton", "reference"), strict=True)
        )
        tolerance = 2e-2 if recipe.pv == "fp8" else 5e-3
        assert (actual - expected).abs().max() / expected.abs().max() < tolerance
    for (part, a), b in zip(storages[0].tensors().items(), storages[1].tensors().values(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), part


@pytest.mark.parametrize("name", ["mxint8-tile", "nvfp4-keys-values"])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"sinks": [0.5, 3.0]}], ids=["plain", "softcap", "sinks"])
def test_chunks_and_steps_over_smoothed_keys_equal_one_pass(name, options):
    """The log of the denominator too, which sees what smoothing takes from the scores, as sinks and caps do."""
    recipe, length, first, step = RECIPES[name], 460, 385, 455
    query, key, value = random_qkv(q_len=length, kv_len=length, head_dim=32, dtype=torch.float16)
    options = {key: torch.tensor(value) if key == "sinks" else value for key, value in options.items()}
    exact, exact_lse = attention_with_lse(*(x.double() for x in (query, key, value)), recipe, scale=0.2, **options)
    sizes = {"batch": 1, "kv_heads": 1, "head_dim": 32, "value_dim": 32, "tiles": 4}
    storage = LayerStorage.allocate(recipe, **sizes, dtype=torch.float16, device=torch.device("cpu"))
    append(storage, key[:, :, :first], value[:, :, :first])
    options = {"window": None, "scale": 0.2, "softcap": None, "sinks": None, **options}
    chunk = [x[:, :, first:step] for x in (query, key, value)]
    of_chunk = prefill_over_cache(*chunk, storage, **options)
    append(storage, key[:, :, step:], value[:, :, step:])
    of_step = decode_attention(query[:, :, step:], storage, **options)
    out, lse = (torch.cat(parts, 2) for parts in zip(of_chunk, of_step, strict=True))
    tolerance = 2e-2 if recipe.pv == "fp8" else 5e-3
    assert (out - exact[:, :, first:]).abs().max() / exact.abs().max() < tolerance
    torch.testing.assert_close(lse.double(), exact_lse[:, :, first:], atol=2e-2, rtol=0.0)


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
