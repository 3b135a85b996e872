"""``dma_hf.stats``: the kernels that computed a model's attention, call counts and fallbacks."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from dma_kernels import Recipe, attention
from dma_kernels.runtime.reports import kernel_reports, report
from dma_kernels.testing import random_qkv

import dma_hf
from dma_hf import DMACache
from dma_hf.integrations.internals import CACHE_ARGUMENT
from dma_hf.stats import Use

stats_module = sys.modules["dma_hf.stats"]  # the function ``stats`` has its name


@pytest.fixture
def llama(families):
    return families["llama"].build("dma_mxfp")


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


def test_fallbacks_are_counted_with_their_reason(llama, token_ids):
    dma_hf.configure(llama, on_unsupported="sdpa")
    llama.train()
    for layer in llama.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.warns(UserWarning, match="does not support dropout"):
        llama(token_ids(1, 8))
    found = dma_hf.stats(llama)
    assert (found.calls, found.fallbacks) == (2, {"dropout": 2})
    assert str(found).endswith("2 x SDPA instead: dropout")


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
