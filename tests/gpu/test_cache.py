"""``DMACache`` on a GPU: kernels, steps without synchronization, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_calls import capture, no_synchronization
from dma_kernels.testing import assert_bits_equal
from tiny_models import FAMILIES

import dma_hf
from dma_hf import DMACache

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
    with no_synchronization():
        model(token, past_key_values=cache)


def test_a_cuda_graph_replays_a_step(model, ids):
    """Across a tile boundary, where a replay quantizes the complete tile."""
    expected_cache, cache = (DMACache(model.config, max_cache_len=512) for _ in range(2))
    token = ids[:, PROMPT : PROMPT + 1].clone()
    stream = torch.cuda.Stream()
    for each in (expected_cache, cache):
        model(ids[:, :PROMPT], past_key_values=each)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm-up for the capture, undone by the reset
        model(token, past_key_values=cache)
    torch.cuda.current_stream().wait_stream(stream)
    cache.reset()
    model(ids[:, :PROMPT], past_key_values=cache)
    tensors = [layer.tokens.view(1) for layer in cache.layers]
    tensors += [tensor for layer in cache.layers for tensor in layer.storage.tensors().values()]
    before = [tensor.clone() for tensor in tensors]
    graph, logits = capture(lambda: model(token, past_key_values=cache).logits)
    for tensor, old in zip(tensors, before, strict=True):  # capturing runs nothing on the device
        assert_bits_equal(tensor, old)
    for step in range(PROMPT, PROMPT + STEPS):
        token.copy_(ids[:, step : step + 1])
        graph.replay()
        expected = model(ids[:, step : step + 1], past_key_values=expected_cache).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=0.05)
    assert int(cache.get_seq_length()) == PROMPT + STEPS
