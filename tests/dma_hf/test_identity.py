"""Without quantization, ``dma_mxfp`` equals ordinary attention in every decoder. ``tests/hf`` has more models."""

from __future__ import annotations

import copy

import pytest
import torch
from sampling import sampled
from transformers import DynamicCache, StaticCache

import dma_hf

LENGTH = 60  # over twice the window
HIDDEN = {
    "none": {},
    "left": {0: [slice(13)]},
    "right": {0: [slice(-13, None)]},
    "holes": {0: [slice(13), slice(30, 35)], 1: [slice(7, 8)]},
}
"""The hidden tokens of each row of a batch."""


def _mask(ids, side):
    mask = torch.ones_like(ids)
    for row, hidden in HIDDEN[side].items():
        for tokens in hidden:
            mask[row, tokens] = 0
    return mask


@pytest.mark.parametrize("side", HIDDEN)
def test_a_forward_pass_equals_the_reference(decoder, side, model_pair, token_ids, assert_same):
    reference, model = model_pair(decoder)
    ids = token_ids(2, LENGTH)
    mask = _mask(ids, side)
    arguments = {} if side == "none" else {"attention_mask": mask}
    assert_same(model(ids, **arguments).logits, reference(ids, **arguments).logits, mask)


@pytest.mark.parametrize(("cache_class", "options", "prompt"), [
    (DynamicCache, {}, [1, 25, 7]),
    (StaticCache, {"max_cache_len": LENGTH + 9}, [20, 11]),
], ids=["dynamic", "static"])  # fmt: skip
@pytest.mark.parametrize("side", sampled(["none", "left"], "left".__eq__))  # whose other row has no padding
def test_chunks_and_single_tokens_equal_the_reference(
    decoder, side, cache_class, options, prompt, model_pair, token_ids, assert_same
):
    reference, model = model_pair(decoder)
    ids = token_ids(2, LENGTH)
    mask = _mask(ids, side)
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    if decoder.model.startswith("BigBird"):
        positions = {}
    cache, steps, start = cache_class(config=model.config, **options), [], 0
    for length in [*prompt, *[1] * (LENGTH - sum(prompt))]:
        end = start + length
        chunk = {name: tensor[:, start:end] for name, tensor in positions.items()}
        steps.append(model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, **chunk).logits)
        start = end
    assert_same(torch.cat(steps, 1), reference(ids, attention_mask=mask, **positions).logits, mask)


@pytest.mark.parametrize("kind", ["boolean", "additive", "per head"])
def test_a_user_4d_mask_equals_the_reference(decoder, kind, model_pair, token_ids, assert_same):
    reference, model = model_pair(decoder)
    ids = token_ids(2, LENGTH)
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[0, :, 40:, 5:9] = False
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    theirs = mask if decoder.reference == "sdpa" else additive
    ours = {"boolean": mask, "additive": additive, "per head": mask.expand(-1, 4, -1, -1)}[kind]
    layer_types = getattr(model.config, "layer_types", None)
    if layer_types is not None and decoder.window:
        ours, theirs = dict.fromkeys(layer_types, ours), dict.fromkeys(layer_types, theirs)
    assert_same(model(ids, attention_mask=ours).logits, reference(ids, attention_mask=theirs).logits)


def _assert_as_accurate(ours, theirs, exact):
    """Assert that the error is at most twice that of Transformers' own attention in the same dtype."""
    assert (ours.float() - exact).norm() <= 2 * (theirs.float() - exact).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
def test_16_bit_models_are_as_accurate_as_the_reference(name, dtype, families, identity, model_pair, token_ids):
    family = families[name]
    ids = token_ids(2, LENGTH)
    model = family.build("dma_mxfp").to(dtype)
    model.config.dma_mxfp = identity
    ours, theirs = model(ids).logits, family.build(family.reference).to(dtype)(ids).logits
    assert ours.dtype == dtype
    _assert_as_accurate(ours, theirs, model_pair(family)[0](ids).logits)


def test_autocast_applies_as_to_sdpa(families, identity, model_pair, token_ids, assert_same):
    """It leaves fp64 unchanged."""
    ids, pair = token_ids(2, LENGTH), model_pair(families["llama"])
    doubles = [copy.deepcopy(model).double() for model in pair]
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours, exact, same = (model(ids).logits for model in (*pair, *doubles))
    assert (ours.dtype, same.dtype) == (theirs.dtype, torch.float64)
    _assert_as_accurate(ours, theirs, exact)
    assert_same(same, exact, tolerance=1e-12)


@pytest.mark.parametrize("first", [True, False], ids=["from-the-start", "later"])
@pytest.mark.parametrize("room", [None, LENGTH], ids=["dynamic", "static"])
@pytest.mark.parametrize("implementation", ["dma_mxfp", "sdpa"])
def test_autocast_works_with_a_cache(implementation, room, first, families, model_pair, token_ids):
    """Keys are fp32 after rotary embedding and values bf16, but a cache has one dtype."""
    reference, model = model_pair(families["llama"])
    model = copy.deepcopy(model)
    model.set_attn_implementation(implementation)
    ids = token_ids(2, LENGTH)
    outputs = []
    with torch.autocast("cpu", torch.bfloat16):
        theirs = reference(ids).logits
    cache = dma_hf.DMACache(model.config, max_cache_len=room)
    for start, end, is_cast in ((0, 20, first), (20, 21, True), (21, LENGTH, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            outputs.append(model(ids[:, start:end], past_key_values=cache).logits.float())
    assert cache.layers[0].storage.key_residual.dtype == (torch.bfloat16 if first else torch.float32)
    _assert_as_accurate(torch.cat(outputs, 1), theirs, reference(ids).logits)


@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_a_config_may_reverse_what_a_layer_sees(name, families, identity, token_ids, assert_same):
    """The layers of decoders ignore ``config.is_causal``, those of BERT know ``is_decoder``: the mask decides."""
    changes = {"is_decoder": True} if name == "bert" else {"is_causal": False}
    ids = token_ids(2, LENGTH)
    mask = _mask(ids, "right")
    reference, model = (families[name].build(implementation, **changes) for implementation in ("eager", "dma_mxfp"))
    model.config.dma_mxfp = identity
    for arguments in ({}, {"attention_mask": mask}):
        seen = mask if arguments else None
        assert_same(model(ids, **arguments).logits, reference(ids, **arguments).logits, seen)


def _seq2seq_inputs(family, token_ids, side):
    if family.config == "WhisperConfig":  # no padding mask
        return {"input_features": torch.randn(2, 20, 300, generator=torch.Generator().manual_seed(0))}
    ids = token_ids(2, 45)
    return {"input_ids": ids, "attention_mask": _mask(ids, side)}


@pytest.mark.parametrize("side", ["none", "right"])
def test_an_encoder_decoder_equals_the_reference(seq2seq, side, model_pair, token_ids, assert_same):
    reference, model = model_pair(seq2seq)
    inputs = _seq2seq_inputs(seq2seq, token_ids, side)
    expected, actual = (each(**inputs, decoder_input_ids=token_ids(2, 31, seed=2)) for each in (reference, model))
    assert_same(actual.logits, expected.logits)
    assert_same(actual.encoder_last_hidden_state, expected.encoder_last_hidden_state, inputs.get("attention_mask"))
    for options in ({}, {"num_beams": 3}):
        tokens = [each.generate(**inputs, max_new_tokens=12, do_sample=False, **options) for each in (reference, model)]
        assert torch.equal(*tokens)
