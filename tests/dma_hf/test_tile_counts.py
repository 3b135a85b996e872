"""Counting skipped tiles per layer."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_models import DECODERS, VOCABULARY

import dma_hf

TOKENS = torch.randint(3, VOCABULARY, (1, 460), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def model():
    model = DECODERS["llama"].build("dma_mxfp")
    dma_hf.configure(model, backend="reference", skip_threshold=1e-6)
    return model


def test_each_layer_and_head_is_counted(model):
    with dma_hf.counted_tiles() as counts:
        model(TOKENS)  # with gradients, as outside no_grad
        with torch.no_grad():
            model(TOKENS)
        model(TOKENS[:, :50])
    model(TOKENS)
    heads = model.config.num_attention_heads
    assert list(counts) == [layer.self_attn for layer in model.model.layers]
    for layer in counts.values():
        assert layer.shape == (heads, 2)
        assert (layer[:, 1] == 2).all()  # tile 1 for the block at 384, in two calls
        assert (layer[:, 0] <= layer[:, 1]).all()


def test_prefill_with_a_cache_is_counted_and_decoding_is_not(model):
    dma_hf.configure(model, cache="int8")
    with dma_hf.counted_tiles() as counts:
        model.generate(TOKENS, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(TOKENS))
    assert [layer[0, 1].item() for layer in counts.values()] == [1] * len(counts)
    assert counts


def test_a_model_without_a_threshold_has_no_counts(model):
    dma_hf.configure(model, skip_threshold=None)
    with dma_hf.counted_tiles() as counts:
        model(TOKENS)
    assert counts == {}


def test_the_innermost_block_counts(model):
    with dma_hf.counted_tiles() as outer:
        with dma_hf.counted_tiles() as inner:
            model(TOKENS)
        assert inner
        assert outer == {}
        model(TOKENS)
    assert outer


def test_a_compiled_model_is_counted(model):
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(TOKENS, use_cache=False)
        with dma_hf.counted_tiles() as counts:
            compiled(TOKENS, use_cache=False)
    assert [layer[0, 1].item() for layer in counts.values()] == [1] * len(model.model.layers)


def test_each_thread_counts_its_own_calls(model):
    """Two blocks overlap, and the one that began first also ends first."""
    other, begun, done = copy.deepcopy(model), threading.Event(), threading.Event()

    def count_other():
        with dma_hf.counted_tiles() as counts:
            begun.set()
            done.wait()
            other(TOKENS)
        return counts

    with ThreadPoolExecutor() as pool:
        with dma_hf.counted_tiles() as counts:
            future = pool.submit(count_other)
            begun.wait()
            model(TOKENS)
        done.set()
        others = future.result()
    for each, found in ((model, counts), (other, others)):
        assert list(found) == [layer.self_attn for layer in each.model.layers]
        assert dma_hf.stats(each).skipped_share is not None


def test_stats_report_the_shares_of_skipped_tiles(model):
    assert dma_hf.stats(model).skipped_share is None
    for _ in range(2):
        with dma_hf.counted_tiles() as counts:
            model(TOKENS)
    stats = dma_hf.stats(model)
    layers = list(stats.layers.values())
    assert [layer.tiles.tolist() for layer in layers] == [(2 * tiles).tolist() for tiles in counts.values()]
    assert stats.tiles.tolist() == [sum(layer.tiles.sum(0) for layer in layers).tolist()]
    assert 0 <= stats.skipped_share <= 1
    assert "of the low tiles counted were skipped" in str(stats)
    dma_hf.reset_stats(model)
    assert dma_hf.stats(model).tiles is None
