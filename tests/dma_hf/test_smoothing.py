"""Smoothing with sink logits and softcaps, which are not invariant to a shift of all scores."""

from __future__ import annotations

import pytest
import torch

import dma_hf
from dma_hf import DMACache

LENGTH, PREFILL = 520, 510  # tiles 1 and 2 are low at the end


def _pair(families, name):
    """Return models with Transformers' own attention and with ``balanced``; keys have a large mean.

    Values have 16 bits, because E4M3 values cost a random model more accuracy than its scores do.
    """
    family = families[name]
    models = family.build(family.reference), family.build("dma_mxfp")
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        for layer in model.model.layers:
            projection = layer.self_attn.k_proj
            projection.bias = torch.nn.Parameter(torch.linspace(-6.0, 6.0, projection.out_features))
            layer.self_attn.q_proj.weight *= 30.0
    dma_hf.configure(models[1], "balanced", pv="bf16")
    return models


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_balanced_is_close_to_transformers_own_attention(name, families, token_ids):
    reference, model = _pair(families, name)
    ids = token_ids(1, LENGTH)
    exact = reference(ids).logits

    def error(logits):
        expected = exact[:, -logits.shape[1] :]
        return float((logits - expected).norm() / expected.norm())

    assert error(model(ids).logits) < 0.05
    cache = DMACache(model.config)
    model(ids[:, :PREFILL], past_key_values=cache)
    steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(PREFILL, LENGTH)]
    assert error(torch.cat(steps, 1)) < 0.05
