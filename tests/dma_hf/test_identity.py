"""Without quantization, ``dma_mxfp`` equals ordinary attention in every decoder and encoder."""

from __future__ import annotations

import copy

import pytest
import torch
from sampling import sampled
from transformers import DynamicCache, StaticCache

import dma_hf

LENGTH = 60  # over twice the window
PADDING = 13


def _padded(batch_ids, side):
    """Mask the first or last tokens of the first row."""
    mask = torch.ones_like(batch_ids)
    if side == "left":
        mask[0, :PADDING] = 0
    else:
        mask[0, -PADDING:] = 0
    return mask


def _position_ids(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


def test_a_forward_pass_equals_the_reference(decoder, model_pair, token_ids, assert_same):
    reference, model = model_pair(decoder)
    ids = token_ids(2, LENGTH)
    assert_same(model(ids).logits, reference(ids).logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_equals_the_reference(decoder, side, model_pair, token_ids, assert_same):
    reference, model = model_pair(decoder)
    ids = token_ids(3, LENGTH)
    mask = _padded(ids, side)
    assert_same(model(ids, attention_mask=mask).logits, reference(ids, attention_mask=mask).logits, mask)


def test_padding_with_holes_equals_the_reference(decoder, model_pair, token_ids, assert_same):
    reference, model = model_pair(decoder)
    ids = token_ids(2, LENGTH)
    mask = _padded(ids, "left")
    mask[0, 30:35] = 0
    mask[1, 7] = 0
    assert_same(model(ids, attention_mask=mask).logits, reference(ids, attention_mask=mask).logits, mask)


def test_packed_sequences_equal_the_reference(decoder, model_pair, token_ids, assert_same):
    if decoder.model.startswith("BigBird"):
        pytest.skip("takes no position_ids")
    reference, model = model_pair(decoder)
    ids = token_ids(1, LENGTH)
    position_ids = torch.cat((torch.arange(17), torch.arange(33), torch.arange(10)))[None]
    arguments = {"position_ids": position_ids, "use_cache": False}
    packed = model(ids, **arguments).logits
    assert_same(packed[:, 17:50], model(ids[:, 17:50], use_cache=False).logits)
    if decoder.model != "GptOssForCausalLM":  # whose masks upstream do not separate packed sequences
        assert_same(packed, reference(ids, **arguments).logits)


@pytest.mark.parametrize(("cache_class", "options", "prompt"), [
    (DynamicCache, {}, [(0, 20)]),
    (StaticCache, {"max_cache_len": LENGTH + 9}, [(0, 20), (20, 31)]),
], ids=["dynamic", "static"])  # fmt: skip
@pytest.mark.parametrize("side", sampled([None, "left"], "left".__eq__))  # whose other row has no padding
def test_decoding_token_by_token_equals_the_reference(
    decoder, side, cache_class, options, prompt, model_pair, token_ids, assert_same
):
    reference, model = model_pair(decoder)
    ids = token_ids(2, LENGTH)
    mask = torch.ones_like(ids) if side is None else _padded(ids, side)
    positions = {} if decoder.model.startswith("BigBird") else {"position_ids": _position_ids(mask)}
    expected = reference(ids, attention_mask=mask, **positions).logits
    cache = cache_class(config=model.config, **options)
    steps = []
    for start, end in [*prompt, *((i, i + 1) for i in range(prompt[-1][1], LENGTH))]:
        chunk = {name: tensor[:, start:end] for name, tensor in positions.items()}
        out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, **chunk)
        steps.append(out.logits)
    assert_same(torch.cat(steps, 1), expected, mask)


def test_chunked_prefill_equals_the_reference(decoder, model_pair, token_ids, assert_same):
    reference, model = model_pair(decoder)
    ids = token_ids(2, LENGTH)
    cache = DynamicCache(config=model.config)
    steps = [model(chunk, past_key_values=cache).logits for chunk in ids.split([1, 25, 7, 27], dim=1)]
    assert_same(torch.cat(steps, 1), reference(ids).logits)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
def test_16_bit_models_are_as_accurate_as_the_reference(name, dtype, families, identity, model_pair, token_ids):
    """The error against fp32 is at most twice that of Transformers' own attention in the same dtype."""
    family = families[name]
    ids = token_ids(2, LENGTH)
    exact = model_pair(family)[0](ids).logits
    theirs = family.build(family.reference).to(dtype)(ids).logits
    model = family.build("dma_mxfp").to(dtype)
    model.config.dma_mxfp = identity
    ours = model(ids).logits
    assert ours.dtype == dtype
    assert (ours.float() - exact).norm() <= 2 * (theirs.float() - exact).norm()


def test_autocast_applies_as_to_sdpa(families, model_pair, token_ids):
    """Autocast applies to it as it does to SDPA."""
    reference, model = model_pair(families["llama"])
    ids = token_ids(2, LENGTH)
    exact = reference(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = reference(ids).logits, model(ids).logits
    assert ours.dtype == theirs.dtype
    assert (ours.float() - exact).norm() <= 2 * (theirs.float() - exact).norm()


def test_autocast_leaves_fp64_unchanged(families, identity, token_ids, assert_same):
    models = [families["llama"].build(implementation).double() for implementation in ("sdpa", "dma_mxfp")]
    models[1].config.dma_mxfp = identity
    ids = token_ids(2, LENGTH)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = (model(ids).logits for model in models)
    assert ours.dtype == torch.float64
    assert_same(ours, theirs, tolerance=1e-12)


@pytest.mark.parametrize("first", [True, False], ids=["from-the-start", "later"])
@pytest.mark.parametrize("room", [None, LENGTH], ids=["dynamic", "static"])
@pytest.mark.parametrize("implementation", ["dma_mxfp", "sdpa"])
def test_autocast_works_with_a_cache(implementation, room, first, families, model_pair, token_ids):
    """Keys are fp32 after rotary embedding and values bf16, but a cache has one dtype."""
    reference, model = model_pair(families["llama"])
    model = copy.deepcopy(model)
    model.set_attn_implementation(implementation)
    ids = token_ids(2, LENGTH)
    exact = reference(ids).logits
    outputs = []
    with torch.autocast("cpu", torch.bfloat16):
        theirs = reference(ids).logits
    cache = dma_hf.DMACache(model.config, max_cache_len=room)
    for start, end, is_cast in ((0, 20, first), (20, 21, True), (21, LENGTH, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            outputs.append(model(ids[:, start:end], past_key_values=cache).logits.float())
    assert cache.layers[0].storage.key_residual.dtype == (torch.bfloat16 if first else torch.float32)
    assert (torch.cat(outputs, 1) - exact).norm() <= 2 * (theirs.float() - exact).norm()


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_an_encoder_equals_the_reference(encoder, side, model_pair, token_ids, assert_same):
    reference, model = model_pair(encoder)
    ids = token_ids(2, LENGTH)
    mask = torch.ones_like(ids) if side is None else _padded(ids, side)
    assert_same(model(ids, attention_mask=mask).logits, reference(ids, attention_mask=mask).logits, mask)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_bidirectional_decoder_equals_the_reference(name, families, identity, token_ids, assert_same):
    """The layers ignore ``config.is_causal``: the mask decides, as with eager attention."""
    ids = token_ids(2, LENGTH)
    mask = _padded(ids, "right")
    models = [families[name].build(implementation, is_causal=False) for implementation in ("eager", "dma_mxfp")]
    models[1].config.dma_mxfp = identity
    full = models[1](ids).logits
    assert_same(full, models[0](ids).logits)
    assert not torch.allclose(full[:, :5], models[1](ids[:, :5]).logits)
    expected = models[0](ids, attention_mask=mask).logits
    assert_same(models[1](ids, attention_mask=mask).logits, expected, mask)


def test_bert_as_a_decoder_equals_the_reference(families, identity, token_ids, assert_same):
    ids = token_ids(2, LENGTH)
    models = [families["bert"].build(name, is_decoder=True) for name in ("sdpa", "dma_mxfp")]
    models[1].config.dma_mxfp = identity
    assert_same(models[1](ids).logits, models[0](ids).logits)


@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
def test_an_encoder_decoder_equals_the_reference(seq2seq, is_padded, model_pair, token_ids, assert_same):
    reference, model = model_pair(seq2seq)
    inputs = _seq2seq_inputs(seq2seq, token_ids, is_padded)
    targets = token_ids(2, 31, seed=2)
    expected = reference(**inputs, decoder_input_ids=targets)
    actual = model(**inputs, decoder_input_ids=targets)
    assert_same(actual.logits, expected.logits)
    real = inputs.get("attention_mask")
    assert_same(actual.encoder_last_hidden_state, expected.encoder_last_hidden_state, real)


def test_an_encoder_decoder_generates_the_same_tokens(seq2seq, model_pair, token_ids):
    reference, model = model_pair(seq2seq)
    inputs = _seq2seq_inputs(seq2seq, token_ids, is_padded=False)
    for options in ({}, {"num_beams": 3}):
        tokens = [each.generate(**inputs, max_new_tokens=12, do_sample=False, **options) for each in (reference, model)]
        assert torch.equal(*tokens)


def _seq2seq_inputs(family, token_ids, is_padded):
    if family.config == "WhisperConfig":  # no padding mask
        return {"input_features": torch.randn(2, 20, 300, generator=torch.Generator().manual_seed(0))}
    ids = token_ids(2, 45)
    return {"input_ids": ids, "attention_mask": _padded(ids, "right") if is_padded else torch.ones_like(ids)}
