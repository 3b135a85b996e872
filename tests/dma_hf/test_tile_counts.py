"""Counting skipped tiles per layer."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_models import DECODERS, VOCABULARY

import dma_hf
from dma_hf.stats import counted_tiles

TOKENS = torch.randint(3, VOCABULARY, (1, 460), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def model():
    model = DECODERS["llama"].build("dma_mxfp")
    dma_hf.configure(model, backend="reference", exact_until=0, skip_threshold=1e-6)
    return model


def _tiles(model):
    return [layer.tiles for layer in dma_hf.stats(model).layers.values()]


def test_each_layer_and_head_is_counted(model):
    with counted_tiles():
        model(TOKENS)  # with gradients, as outside no_grad
        with torch.no_grad():
            model(TOKENS)
        model(TOKENS[:, :50])
    model(TOKENS)
    heads = model.config.num_attention_heads
    assert list(dma_hf.stats(model).layers) == [f"model.layers.{index}.self_attn" for index in range(2)]
    for layer in _tiles(model):
        assert layer.shape == (heads, 2)
        assert (layer[:, 1] == 2).all()  # tile 1 for the block at 384, in two calls
        assert (layer[:, 0] <= layer[:, 1]).all()


def test_prefill_with_a_cache_is_counted_and_decoding_is_not(model):
    dma_hf.configure(model, cache="int8")
    with counted_tiles():
        model.generate(TOKENS, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(TOKENS))
    assert [layer[0, 1].item() for layer in _tiles(model)] == [1, 1]


def test_a_model_without_a_threshold_has_no_counts(model):
    dma_hf.configure(model, skip_threshold=None)
    with counted_tiles():
        model(TOKENS)
    assert _tiles(model) == [None, None]


def test_a_call_in_nested_blocks_is_counted_once(model):
    with counted_tiles():
        with counted_tiles():
            model(TOKENS)
        assert [layer[0, 1].item() for layer in _tiles(model)] == [1, 1]
        model(TOKENS)
    assert [layer[0, 1].item() for layer in _tiles(model)] == [2, 2]


def test_a_compiled_model_is_counted(model):
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(TOKENS, use_cache=False)
        with counted_tiles():
            compiled(TOKENS, use_cache=False)
    assert [layer[0, 1].item() for layer in _tiles(model)] == [1, 1]


def test_each_thread_counts_its_own_calls(model):
    """Two blocks overlap, and the one that began first also ends first."""
    other, begun, done = copy.deepcopy(model), threading.Event(), threading.Event()

    def count_other():
        with counted_tiles():
            begun.set()
            done.wait()
            other(TOKENS)

    with ThreadPoolExecutor() as pool:
        with counted_tiles():
            future = pool.submit(count_other)
            begun.wait()
            model(TOKENS)
        done.set()
        future.result()
    for each in (model, other):
        assert [layer[0, 1].item() for layer in _tiles(each)] == [1, 1]


def test_stats_report_the_shares_of_skipped_tiles(model):
    assert dma_hf.stats(model).skipped_share is None
    for _ in range(2):
        with counted_tiles():
            model(TOKENS)
    stats = dma_hf.stats(model)
    layers = list(stats.layers.values())
    assert stats.tiles.tolist() == [sum(layer.tiles.sum(0) for layer in layers).tolist()]
    assert 0 <= stats.skipped_share <= 1
    assert "of the low tiles counted were skipped" in str(stats)
    dma_hf.reset_stats(model)
    assert dma_hf.stats(model).tiles is None
