"""The warning about keys that 4 bits cannot represent."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import dma_hf.attention


@pytest.fixture
def qwen(families):
    """A model whose layer 1 has a key channel that is far larger than the others, as a bias makes it in Qwen2.5."""
    model = families["qwen2"].build("dma_mxfp")
    attention = model.model.layers[1].self_attn
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight *= 30.0
    attention.k_proj.bias[3] = 100.0
    return model


def warnings_of(function, ids, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(ids, **options)
    messages = [str(each.message) for each in caught]
    return [each for each in messages if "cannot represent the keys of this model in 4 bits" in each]


@pytest.mark.parametrize(("preset", "length"), [("paper", 128), ("fp4", 2049)])  # the first prompts with low tiles
def test_presets_of_4_bits_warn_once_and_name_the_layer_and_the_way_out(preset, length, qwen, families, token_ids):
    dma_hf.configure(qwen, preset)
    assert warnings_of(qwen, token_ids(1, length - 1)) == []
    (message,) = warnings_of(qwen, token_ids(1, length))
    assert message.startswith(f"the preset '{preset}' cannot represent the keys")
    assert "attention logits of layer 1 are off by" in message
    assert "Use the preset 'balanced', or add the layer to high_layers. `dma-hf equalize` makes " in message
    assert warnings_of(qwen, token_ids(1, length)) == []
    ordinary = families["qwen2"].build("dma_mxfp")
    dma_hf.configure(ordinary, preset, exact_until=0)
    assert warnings_of(ordinary, token_ids(1, 130)) == []


def test_another_recipe_is_checked_again(qwen, token_ids):
    dma_hf.configure(qwen, "balanced", exact_until=0)
    assert warnings_of(qwen, token_ids(1, 130)) == []
    dma_hf.configure(qwen, "balanced", low_k="mxfp4", shared_scale="block", exact_until=0)
    (message,) = warnings_of(qwen, token_ids(1, 130))
    assert message.startswith("this recipe cannot represent")


def test_the_longest_row_of_a_padded_batch_over_a_packed_cache_is_checked(qwen, token_ids):
    dma_hf.configure(qwen, "paper")
    mask = torch.ones(2, 140, dtype=torch.long)
    mask[0, :120] = 0
    options = {"attention_mask": mask, "cache": dma_hf.DMACache(qwen.config)}
    assert len(warnings_of(qwen, token_ids(2, 140), **options)) == 1


@pytest.mark.parametrize("cache", [None, "int8"])
def test_a_prompt_of_generate_batch_is_checked(qwen, token_ids, cache):
    dma_hf.configure(qwen, "paper", cache=cache)
    options = {
        "generation_config": GenerationConfig(max_new_tokens=1, do_sample=False, pad_token_id=0),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=60, use_cuda_graph=False),
    }
    prompts = [token_ids(1, length)[0].tolist() for length in (20, 130)]
    (message,) = warnings_of(qwen.generate_batch, prompts, **options)
    assert "attention logits of layer 1 are off by" in message


def test_a_compiled_model_is_not_checked(qwen, token_ids):
    dma_hf.configure(qwen, "paper")
    compiled = torch.compile(qwen, backend="eager", fullgraph=True)
    assert warnings_of(compiled, token_ids(1, 130), use_cache=False) == []


def test_layers_repeat_the_call_of_the_first_layer_once_they_are_checked(qwen, token_ids, monkeypatch):
    seen = []
    check = dma_hf.attention.check_first_prompt
    monkeypatch.setattr(dma_hf.attention, "check_first_prompt", lambda *call: seen.append(call[0]) or check(*call))
    dma_hf.configure(qwen, "paper")
    warnings_of(qwen, token_ids(1, 130))
    assert len(seen) == 2
    qwen(token_ids(1, 130))
    assert len(seen) == 3


def test_the_first_layer_that_is_off_besides_the_high_ones_is_named(qwen, token_ids):
    qwen.model.layers[0].self_attn.load_state_dict(qwen.model.layers[1].self_attn.state_dict())
    for layers, expected in (((), ["layer 0 are off"]), ((0,), ["layer 1 are off"]), ((0, 1), [])):
        dma_hf.configure(qwen, "paper", high_layers=layers)
        found = warnings_of(qwen, token_ids(1, 130))
        assert [text in message for text, message in zip(expected, found, strict=True)] == [True] * len(expected)
