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


def _examined(model):
    """Return the examined tiles of the first head of each layer."""
    return [
        layer.tiles if layer.tiles is None else layer.tiles[0, 1].item()
        for layer in dma_hf.stats(model).layers.values()
    ]


def test_each_layer_and_head_is_counted(model):
    """And the shares of skipped ones are reported."""
    assert dma_hf.stats(model).skipped_share is None
    with counted_tiles():
        model(TOKENS)  # with gradients, as outside no_grad
        with torch.no_grad():
            model(TOKENS)
        model(TOKENS[:, :50])
    model(TOKENS)
    stats = dma_hf.stats(model)
    assert list(stats.layers) == [f"model.layers.{index}.self_attn" for index in range(2)]
    layers = [layer.tiles for layer in stats.layers.values()]
    for layer in layers:
        assert layer.shape == (model.config.num_attention_heads, 2)
        assert (layer[:, 1] == 2).all()  # tile 1 for the block at 384, in two calls
        assert (layer[:, 0] <= layer[:, 1]).all()
    assert stats.tiles.tolist() == [sum(layer.sum(0) for layer in layers).tolist()]
    assert 0 <= stats.skipped_share <= 1
    assert "of the low tiles counted were skipped" in str(stats)
    dma_hf.reset_stats(model)
    assert dma_hf.stats(model).tiles is None


@pytest.mark.parametrize("setting", [{"cache": "int8"}, {"skip_threshold": None}], ids=["decoding", "no threshold"])
def test_what_never_skips_is_not_counted(setting, model):
    dma_hf.configure(model, **setting)
    with counted_tiles():
        model.generate(TOKENS, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(TOKENS))
    assert _examined(model) == ([1, 1] if "cache" in setting else [None, None])


def test_a_call_in_nested_blocks_is_counted_once(model):
    with counted_tiles():
        with counted_tiles():
            model(TOKENS)
        assert _examined(model) == [1, 1]
        model(TOKENS)
    assert _examined(model) == [2, 2]


def test_a_compiled_model_is_counted(model):
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(TOKENS, use_cache=False)
        with counted_tiles():
            compiled(TOKENS, use_cache=False)
    assert _examined(model) == [1, 1]


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
    assert _examined(model) == _examined(other) == [1, 1]
