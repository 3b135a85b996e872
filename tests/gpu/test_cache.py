"""``DMACache`` on a GPU: kernels, steps without synchronization, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES

import dma_hf
from dma_hf import DMACache

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_gradients")]

PROMPT, STEPS = 380, 10


@pytest.fixture(params=["int8", "int4"])
def model(request):
    model = FAMILIES["llama"].build("dma_mxfp").to("cuda", torch.bfloat16)
    dma_hf.configure(model, "balanced", cache=request.param, backend="triton", sink_tiles=0, exact_until=0)
    return model


@pytest.fixture
def ids():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 97, (2, PROMPT + STEPS), generator=generator).cuda()


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
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(token, past_key_values=cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_cuda_graph_replays_a_step(model, ids):
    """Across a tile boundary, where a replay quantizes the complete tile."""
    expected_cache, cache = (DMACache(model.config, max_cache_len=512) for _ in range(2))
    for each in (expected_cache, cache):
        model(ids[:, :PROMPT], past_key_values=each)
    token = ids[:, PROMPT : PROMPT + 1].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm-up for the capture, undone by the reset
        model(token, past_key_values=cache)
    torch.cuda.current_stream().wait_stream(stream)
    cache.reset()
    model(ids[:, :PROMPT], past_key_values=cache)
    before = {name: t.clone() for i, layer in enumerate(cache.layers) for name, t in _tensors(i, layer)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(token, past_key_values=cache).logits
    for i, layer in enumerate(cache.layers):  # capturing runs nothing on the device
        for name, tensor in _tensors(i, layer):
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
    for step in range(PROMPT, PROMPT + STEPS):
        token.copy_(ids[:, step : step + 1])
        graph.replay()
        expected = model(ids[:, step : step + 1], past_key_values=expected_cache).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=0.05)
    assert int(cache.get_seq_length()) == PROMPT + STEPS


def _tensors(index, layer):
    named = {"tokens": layer.tokens.view(1)} | layer.storage.tensors()
    return [(f"{index}.{name}", tensor) for name, tensor in named.items()]


def test_a_mask_may_change_during_generation(ids):
    """The result equals that of a CPU in fp32."""
    results = []
    for device in ("cpu", "cuda"):
        model = FAMILIES["llama"].build("dma_mxfp").to(device)
        dma_hf.configure(model, "balanced")
        cache, tokens = DMACache(model.config), ids[:, :303].to(device)
        mask = torch.ones_like(tokens)
        model(tokens[:, :300], attention_mask=mask[:, :300], past_key_values=cache)
        mask[1, :40] = 0
        steps = [(300, 301), (301, 302), (302, 303)]
        logits = [model(tokens[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits for a, b in steps]
        results.append(torch.cat(logits, 1).cpu())
    assert (results[0] - results[1]).abs().max() < 1e-2 * results[0].abs().max()
