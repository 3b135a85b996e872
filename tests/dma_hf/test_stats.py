"""``dma_hf.stats``: the kernels that computed a model's attention, counts of calls, fallbacks and skipped tiles."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from dma_kernels import Recipe, attention
from dma_kernels.runtime.reports import kernel_reports, report
from dma_kernels.testing import random_qkv
from tiny_models import DECODERS, VOCABULARY

import dma_hf
from dma_hf import DMACache
from dma_hf.integrations.internals import CACHE_ARGUMENT
from dma_hf.stats import Use, counted_tiles

stats_module = sys.modules["dma_hf.stats"]  # the function ``stats`` has its name


def test_calls_are_counted_per_layer(llama, families, token_ids):
    dma_hf.configure(llama, "fp4", cache="int4")
    llama.generate(token_ids(1, 20), max_new_tokens=4, do_sample=False, pad_token_id=0)
    found = dma_hf.stats(llama)
    assert list(found.layers) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert found.uses == {Use("reference", "fp4", "int4"): 8}
    assert all(layer.uses == {Use("reference", "fp4", "int4"): 4} for layer in found.layers.values())
    assert dma_hf.stats(llama.model.layers[1]).calls == 4
    assert str(found) == "8 attention calls in 2 layers\n  8 x reference, recipe fp4, cache int4"
    llama(token_ids(1, 20), use_cache=False)
    assert dma_hf.stats(llama).uses[Use("reference", "fp4", "none")] == 2
    dma_hf.reset_stats(llama)
    other = families["llama"].build("dma_mxfp")
    other(token_ids(1, 20))
    assert dma_hf.stats(llama).calls == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="where kernels are interpreted")
def test_kernels_are_named(llama, token_ids):
    llama = llama.half()
    dma_hf.configure(llama, backend="triton", sink_tiles=0)
    cache = DMACache(llama.config, "int8")
    for start, end in ((0, 140), (140, 141), (141, 160)):
        llama(token_ids(1, 160)[:, start:end], **{CACHE_ARGUMENT: cache})
    uses = {Use("portable", "custom", "int8"): 4, Use("decode", "custom", "int8"): 2}
    assert dma_hf.stats(llama).uses == uses


def test_counts_are_freed_with_their_layers(llama, token_ids):
    llama(token_ids(1, 8))
    counted = {id(layer.self_attn) for layer in llama.model.layers}
    assert counted <= stats_module._counts.keys()
    llama.model.layers = torch.nn.ModuleList()
    gc.collect()
    assert not counted & stats_module._counts.keys()


def test_reports_reach_the_innermost_listener():
    outer, inner = [], []
    report("nobody")
    query, key, value = random_qkv(q_len=4, kv_len=4)
    with kernel_reports(outer.append):
        attention(query, key, value, Recipe())
        with kernel_reports(inner.append):
            attention(query, key, value, Recipe())
    assert (outer, inner) == (["reference"], ["reference"])


@pytest.mark.parametrize("function", [dma_hf.stats, dma_hf.reset_stats])
def test_counts_are_those_of_a_module(function, llama):
    with pytest.raises(TypeError, match="model must be a module, got LlamaConfig"):
        function(llama.config)


# ---- skipped tiles

TOKENS = torch.randint(3, VOCABULARY, (1, 460), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def skipping():
    """A model whose low tiles may be skipped."""
    model = DECODERS["llama"].build("dma_mxfp")
    dma_hf.configure(model, backend="reference", exact_until=0, skip_threshold=1e-6)
    return model


def _examined(model):
    """Return the examined tiles of the first head of each layer."""
    return [
        layer.tiles if layer.tiles is None else layer.tiles[0, 1].item()
        for layer in dma_hf.stats(model).layers.values()
    ]


def test_each_layer_and_head_is_counted(skipping):
    """And the shares of skipped ones are reported."""
    assert dma_hf.stats(skipping).skipped_share is None
    with counted_tiles():
        skipping(TOKENS)  # with gradients, as outside no_grad
        with torch.no_grad():
            skipping(TOKENS)
        skipping(TOKENS[:, :50])
    skipping(TOKENS)
    stats = dma_hf.stats(skipping)
    assert list(stats.layers) == [f"model.layers.{index}.self_attn" for index in range(2)]
    layers = [layer.tiles for layer in stats.layers.values()]
    for layer in layers:
        assert layer.shape == (skipping.config.num_attention_heads, 2)
        assert (layer[:, 1] == 2).all()  # tile 1 for the block at 384, in two calls
        assert (layer[:, 0] <= layer[:, 1]).all()
    assert stats.tiles.tolist() == [sum(layer.sum(0) for layer in layers).tolist()]
    assert 0 <= stats.skipped_share <= 1
    assert "of the low tiles counted were skipped" in str(stats)
    assert stats == dma_hf.stats(skipping) != dma_hf.stats(copy.deepcopy(skipping))
    dma_hf.reset_stats(skipping)
    assert dma_hf.stats(skipping).tiles is None


@pytest.mark.parametrize("setting", [{"cache": "int8"}, {"skip_threshold": None}], ids=["decoding", "no threshold"])
def test_what_never_skips_is_not_counted(setting, skipping):
    dma_hf.configure(skipping, **setting)
    with counted_tiles():
        skipping.generate(TOKENS, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(TOKENS))
    assert _examined(skipping) == ([1, 1] if "cache" in setting else [None, None])


def test_a_call_in_nested_blocks_is_counted_once(skipping):
    with counted_tiles():
        with counted_tiles():
            skipping(TOKENS)
        assert _examined(skipping) == [1, 1]
        skipping(TOKENS)
    assert _examined(skipping) == [2, 2]


def test_a_compiled_model_is_counted(skipping):
    compiled = torch.compile(skipping, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(TOKENS, use_cache=False)
        with counted_tiles():
            compiled(TOKENS, use_cache=False)
    assert _examined(skipping) == [1, 1]


def test_each_thread_counts_its_own_calls(skipping):
    """Two blocks overlap, and the one that began first also ends first."""
    other, begun, done = copy.deepcopy(skipping), threading.Event(), threading.Event()

    def count_other():
        with counted_tiles():
            begun.set()
            done.wait()
            other(TOKENS)

    with ThreadPoolExecutor() as pool:
        with counted_tiles():
            future = pool.submit(count_other)
            begun.wait()
            skipping(TOKENS)
        done.set()
        future.result()
    assert _examined(skipping) == _examined(other) == [1, 1]
