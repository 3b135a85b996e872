"""A sequence has the same logits in one pass, token by token, and next to padding.

Tokens after the prompt attend exactly, unless the preset quantizes high tiles. Under every preset. Sequences span
several tiles of 128, so that low, diagonal and sink tiles all occur. Sliding-window models are not smoothed, because
their caches drop the first tile, which has the mean. In fp64, so that the order of summation does not change
quantization codes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from sampling import sampled
from transformers import DynamicCache, StaticCache

import dma_hf

LENGTH, PREFILL = 430, 372  # the last tile starts at 384
WINDOW = 300
PADDING = 77  # not a multiple of the tile size

SETTINGS = {
    "balanced": {},
    "fp4": {},
    "paper": {},
    "no band": {"low": "mxfp8", "shared_scale": "row", "diagonal_tiles": 0, "sink_tiles": 0},
    "straight": {"low": "mxint8", "rotate": False, "diagonal_tiles": 0, "sink_tiles": 2},
    "exact start": {"diagonal_tiles": 0, "sink_tiles": 0, "exact_until": 256},
}
"""Changes of a preset, or of ``balanced``; unless they say so, without an exact start, which would be all of a text."""
MODELS = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "gemma3": ("gemma3", {"sliding_window": WINDOW}),
}
IN_CI = {
    *(("llama", setting) for setting in ("balanced", "paper", "no band", "exact start")),
    *(("mistral", "paper"), ("mistral", "straight"), ("gemma3", "fp4"), ("gemma3", "no band")),
}
TOLERANCE = 1e-6  # some layers compute in fp32


def models(*names):
    cases = sampled(product(names, SETTINGS), lambda *case: case in IN_CI)
    return pytest.mark.parametrize(("name", "setting"), cases, indirect=["setting"])


@pytest.fixture(params=SETTINGS)
def setting(request):
    name = request.param
    preset = name if name in dma_hf.PRESETS else "balanced"
    return dma_hf.DMAConfig.from_preset(preset, **{"exact_until": 0} | SETTINGS[name])


def _model(families, name, setting):
    family, changes = MODELS[name]
    model = families[family].build("dma_mxfp", **changes).double()
    if "sliding_window" in changes:
        setting = replace(setting, smooth_k=False)
    dma_hf.configure(model, setting)
    return model


def _decode(model, ids, cache, mask=None):
    """Return logits of a prefill followed by single tokens."""
    steps = []
    for start, end in [(0, PREFILL), *((i, i + 1) for i in range(PREFILL, LENGTH))]:
        arguments = {}
        if mask is not None:
            position_ids = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:end]
            arguments = {"attention_mask": mask[:, :end], "position_ids": position_ids}
        steps.append(model(ids[:, start:end], past_key_values=cache, **arguments).logits)
    return torch.cat(steps, 1)


def _one_pass(model, ids, setting, identity, prompt=PREFILL):
    """Return logits of a prompt in one pass and of the tokens after it in another, exact where decoding is."""
    if setting.high != "bf16":
        return model(ids).logits
    cache = DynamicCache(config=model.config)
    logits, current = model(ids[:, :prompt], past_key_values=cache).logits, dma_hf.configure(model)
    dma_hf.configure(model, identity)
    logits = torch.cat((logits, model(ids[:, prompt:], past_key_values=cache).logits), 1)
    dma_hf.configure(model, current)
    return logits


def test_quantization_changes_the_logits(families, setting, identity, token_ids):
    """Otherwise a backend that ignores its settings would pass the other tests."""
    model = _model(families, "llama", setting)
    ids = token_ids(1, LENGTH)
    quantized = model(ids).logits
    dma_hf.configure(model, identity)
    error = (quantized - model(ids).logits).abs().max() / quantized.abs().max()
    assert 1e-4 < error < 0.2


@models("llama", "gemma3")
def test_a_static_cache_equals_one_forward_pass(name, setting, identity, families, token_ids, assert_same):
    model = _model(families, name, setting)
    ids = token_ids(1, LENGTH)
    decoded = _decode(model, ids, StaticCache(config=model.config, max_cache_len=LENGTH + 50))
    assert_same(decoded, _one_pass(model, ids, setting, identity), tolerance=TOLERANCE)


@models("llama", "mistral")
def test_chunked_prefill_equals_one_forward_pass(name, setting, families, token_ids, assert_same):
    model = _model(families, name, setting)
    ids = token_ids(1, LENGTH)
    cache = DynamicCache(config=model.config)
    chunks = [model(chunk, past_key_values=cache).logits for chunk in ids.split([200, 100, 64, 66], dim=1)]
    assert_same(torch.cat(chunks, 1), model(ids).logits, tolerance=TOLERANCE)


@pytest.mark.parametrize("seen", [slice(PADDING, None), slice(-PADDING)], ids=["left", "right"])
@models(*MODELS)
def test_a_padded_row_equals_the_unpadded_row(name, setting, seen, families, token_ids, assert_same):
    model = _model(families, name, setting)
    ids = token_ids(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[0] = 0
    mask[0, seen] = 1
    batch = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    assert_same(batch[:1, seen], model(ids[:1, seen]).logits, tolerance=TOLERANCE)
    assert_same(batch[1:], model(ids[1:]).logits, tolerance=TOLERANCE)


@models(*MODELS)
def test_token_by_token_equals_one_forward_pass(name, setting, identity, families, token_ids, assert_same):
    """Also in a left-padded row whose sliding cache has dropped the padding and the first real keys."""
    model = _model(families, name, setting)
    ids = token_ids(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    decoded = _decode(model, ids, DynamicCache(config=model.config), mask)
    expected = [
        _one_pass(model, ids[row : row + 1, padding:], setting, identity, prompt=PREFILL - padding)
        for row, padding in enumerate((PADDING, 0))
    ]
    assert_same(decoded[:1, PADDING:], expected[0], tolerance=TOLERANCE)
    assert_same(decoded[1:], expected[1], tolerance=TOLERANCE)
