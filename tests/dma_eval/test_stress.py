"""Twins: scales are the same function with other channels, biases another one; the model itself is left as it was."""

from __future__ import annotations

import pytest
import torch
from dma_eval.stress import TWINS, Twin, attention_layers, key_ranges, stressed
from tiny_models import DECODERS, VOCABULARY

from dma_hf.equalization import measure_ranges


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def _tokens(length=64):
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3", "gpt_oss", "cohere2", "deepseek_v3"])
@pytest.mark.parametrize("twin", TWINS[1:], ids=lambda twin: twin.name)
def test_scales_keep_the_function_and_biases_change_it(name, twin):
    model, tokens = DECODERS[name].build(DECODERS[name].reference), _tokens()
    before = model(input_ids=tokens[None]).logits
    ranges = measure_ranges(model, tokens)
    layers = attention_layers(model, tokens)
    with stressed(model, layers, twin):
        during = model(input_ids=tokens[None]).logits
        changed = measure_ranges(model, tokens)
    assert torch.equal(during, before) == twin.is_same_function
    assert torch.equal(model(input_ids=tokens[None]).logits, before)
    for module, (queries, keys) in changed.items():
        old_queries, old_keys = ranges[module]
        if twin.keys != 1:
            is_scaled = keys != old_keys
            torch.testing.assert_close(keys, torch.where(is_scaled, old_keys * twin.keys, old_keys))
            assert is_scaled.any(1).all()
            assert not is_scaled.all()
            torch.testing.assert_close(
                queries[queries != old_queries], (old_queries / twin.keys)[queries != old_queries]
            )
        elif twin.bias:
            assert (keys.amax(-1) > 0.9 * twin.bias).all()
        else:
            assert torch.equal(keys, old_keys)


def test_values_behind_a_gate_are_refused():
    model, tokens = DECODERS["llama"].build("sdpa"), _tokens()
    layers = attention_layers(model, tokens)
    layers[1].module.o_proj.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    with (
        pytest.raises(ValueError, match="its values do not go from"),
        stressed(model, layers, Twin("", values=8.0)),
    ):
        pass
    assert not layers[0].module.v_proj._forward_hooks


def test_the_channel_that_stands_out_is_found():
    model, tokens = DECODERS["llama"].build("sdpa"), _tokens()
    plain = key_ranges(model, tokens)
    model.model.layers[1].self_attn.k_proj.weight[16 + 3] *= 64
    first, second = key_ranges(model, tokens)
    assert first == plain[0]
    assert (second.layer, second.head, second.channel in (3, 11)) == ("model.layers.1.self_attn", 1, True)
    assert second.ratio > 20
