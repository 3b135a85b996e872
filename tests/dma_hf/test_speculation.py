"""Speculation over a ``DMACache`` writes what greedy decoding writes, whatever is quantised.

In fp64, so that no rounding error of another order of summation tells two tokens apart.
"""

from __future__ import annotations

import pytest
import torch
from dma_kernels.cache.codes import CACHE_FORMATS

import dma_hf
from dma_hf import DMACache

MODELS = {"qwen2": {}, "mistral": {"sliding_window": 150}, "gemma3": {"sliding_window": 200}}

formats = pytest.mark.parametrize("format", CACHE_FORMATS)


def _model(families, name, seed=0):
    model = families[name].build("dma_mxfp", seed=seed, **MODELS[name]).double()
    dma_hf.configure(model, "fp4")
    return model


@formats
@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_many_tokens_equals_as_many_steps_of_one(name, format, families, token_ids, assert_same):
    model = _model(families, name)
    ids = token_ids(1, 700)
    for start, count in ((637, 5), (630, 20), (383, 2), (500, 145)):
        one_by_one, at_once = DMACache(model.config, format), DMACache(model.config, format)
        for cache in (one_by_one, at_once):
            model(ids[:, :start], past_key_values=cache)
        steps = [model(ids[:, [i]], past_key_values=one_by_one).logits for i in range(start, start + count)]
        together = model(ids[:, start : start + count], past_key_values=at_once).logits
        assert_same(together, torch.cat(steps, 1), tolerance=1e-9)
