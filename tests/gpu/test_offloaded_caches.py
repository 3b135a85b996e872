"""Caches offloaded to host memory, which Transformers moves on CUDA streams."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import FAMILIES, IDENTITY, VOCABULARY

import dma_hf
from dma_hf.cache_layers import DMALayer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
def test_offloaded_caches_give_the_same_tokens(name, cache):
    if (name, cache) == ("mistral", "offloaded_static"):
        pytest.skip("Transformers (5.17) looks for a layer to fetch where all have a window and stay on the device")
    ids = torch.randint(3, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0)).cuda()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    model = FAMILIES[name].build("dma_mxfp").cuda()
    dma_hf.configure(model, IDENTITY)
    expected = FAMILIES[name].build("sdpa").cuda().generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation=cache, **options), expected)


def test_a_state_dict_waits_for_offloading(monkeypatch):
    model = FAMILIES["llama"].build("dma_mxfp").cuda().to(torch.bfloat16)
    dma_hf.configure(model, IDENTITY)
    ids = torch.randint(3, VOCABULARY, (2, 400), generator=torch.Generator().manual_seed(0)).cuda()
    cache = dma_hf.DMACache(model.config, offloading=True)
    offload = DMALayer.offload

    def offload_late(layer):
        torch.cuda._sleep(100_000_000)
        offload(layer)

    monkeypatch.setattr(DMALayer, "offload", offload_late)
    model(ids, past_key_values=cache, logits_to_keep=1)
    at_once = copy.deepcopy([layer["tensors"] for layer in cache.state_dict()["layers"]])
    torch.cuda.synchronize()
    later = [layer["tensors"] for layer in cache.state_dict()["layers"]]
    torch.testing.assert_close(at_once, later, rtol=0.0, atol=0.0)
