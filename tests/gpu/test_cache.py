"""Caches on a GPU: the kernels of ``DMACache``, steps without synchronization, and offloading to host memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from cuda_calls import no_synchronization
from tiny_models import FAMILIES, IDENTITY

import dma_hf
from dma_hf import DMACache
from dma_hf.cache_layers import DMALayer

pytestmark = pytest.mark.gpu

PROMPT, STEPS = 380, 10


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=["int8", "int4"])
def model(request):
    model = FAMILIES["llama"].build("dma_mxfp").to("cuda", torch.bfloat16)
    dma_hf.configure(model, "balanced", cache=request.param, backend="triton", sink_tiles=0, exact_until=0)
    return model


def _ids(length):
    return torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(0)).cuda()


@pytest.fixture
def ids():
    return _ids(PROMPT + STEPS)


def _decode(model, ids, cache):
    model(ids[:, :300], past_key_values=cache)
    steps = [(300, PROMPT), *((i, i + 1) for i in range(PROMPT, ids.shape[1]))]
    return torch.cat([model(ids[:, a:b], past_key_values=cache).logits for a, b in steps], 1)


@pytest.mark.parametrize("capacity", [None, 512], ids=["dynamic", "static"])
def test_kernels_agree_with_the_reference(model, ids, capacity):
    actual = _decode(model, ids, DMACache(model.config, max_cache_len=capacity)).float()
    dma_hf.configure(model, backend="reference")
    expected = _decode(model, ids, DMACache(model.config, max_cache_len=capacity)).float()
    assert (actual - expected).abs().max() / expected.abs().max() < 0.05


def test_a_step_does_not_synchronize_with_the_host(model, ids):
    cache = DMACache(model.config, max_cache_len=512)
    _decode(model, ids, cache)
    token = ids[:, :1].contiguous()
    with no_synchronization():
        model(token, past_key_values=cache)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
def test_offloaded_caches_give_the_same_tokens(name, cache):
    if (name, cache) == ("mistral", "offloaded_static"):
        pytest.skip("Transformers (5.17) looks for a layer to fetch where all have a window and stay on the device")
    ids, options = _ids(40), {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    model = FAMILIES[name].build(dma_hf.NAME).cuda()
    dma_hf.configure(model, IDENTITY)
    expected = FAMILIES[name].build("sdpa").cuda().generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation=cache, **options), expected)


def test_a_state_dict_waits_for_offloading(monkeypatch):
    model = FAMILIES["llama"].build(dma_hf.NAME).cuda().to(torch.bfloat16)
    dma_hf.configure(model, IDENTITY)
    cache = DMACache(model.config, offloading=True)
    offload = DMALayer.offload

    def offload_late(layer):
        torch.cuda._sleep(100_000_000)
        offload(layer)

    monkeypatch.setattr(DMALayer, "offload", offload_late)
    model(_ids(400), past_key_values=cache, logits_to_keep=1)
    at_once = copy.deepcopy([layer["tensors"] for layer in cache.state_dict()["layers"]])
    torch.cuda.synchronize()
    later = [layer["tensors"] for layer in cache.state_dict()["layers"]]
    torch.testing.assert_close(at_once, later, rtol=0.0, atol=0.0)
