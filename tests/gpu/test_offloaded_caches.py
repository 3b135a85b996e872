"""Caches that wait in host memory: Transformers moves them by CUDA streams, so that they exist on a GPU alone."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, IDENTITY, VOCABULARY

import dma_hf

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
def test_the_same_tokens(name, cache):
    if (name, cache) == ("mistral", "offloaded_static"):
        pytest.skip("Transformers (5.17) looks for a layer to fetch where all have a window and stay on the device")
    ids = torch.randint(3, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0)).cuda()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    model = FAMILIES[name].build(dma_hf.NAME).cuda()
    dma_hf.configure(model, IDENTITY)
    expected = FAMILIES[name].build("sdpa").cuda().generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation=cache, **options), expected)
