"""``generate`` gives the same tokens as with Transformers' own attention, in every mode and with every cache."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import StaticCache, set_seed

NEW_TOKENS = 14
PROMPT = 31  # longer than the window, so that sliding caches drop keys at once

GREEDY = {"do_sample": False}
CACHES = [
    pytest.param({}, id="dynamic"),
    pytest.param({"cache_implementation": "static", "disable_compile": True}, id="static"),
    pytest.param({"use_cache": False}, id="no-cache"),
]


def _left_padded(ids, padding=9):
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return mask


def _upstream(model, *arguments, **options):
    """Return what Transformers' own attention generates; where that fails, ours need not run."""
    try:
        return model.generate(*arguments, max_new_tokens=NEW_TOKENS, **options)
    except (RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"Transformers {transformers.__version__} cannot: {error}")


def _generate(models, ids, **options):
    """Return what both models generate from a left-padded batch."""
    options |= {"attention_mask": _left_padded(ids), "pad_token_id": 0}
    set_seed(0)
    expected = _upstream(models[0], ids, **options)
    assert expected.shape[1] > ids.shape[1]
    set_seed(0)
    return expected, models[1].generate(ids, max_new_tokens=NEW_TOKENS, **options)


@pytest.mark.parametrize("cache", CACHES)
def test_greedy(decoder, cache, model_pair, token_ids):
    expected, actual = _generate(model_pair(decoder), token_ids(2, PROMPT), **GREEDY, **cache)
    assert torch.equal(actual, expected)


def test_sampling_with_a_seed(decoder, model_pair, token_ids):
    expected, actual = _generate(model_pair(decoder), token_ids(2, PROMPT), do_sample=True, top_k=20)
    assert torch.equal(actual, expected)


def test_beam_search(decoder, model_pair, token_ids):
    expected, actual = _generate(model_pair(decoder), token_ids(2, PROMPT), num_beams=3, **GREEDY)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2", "qwen3"])
@pytest.mark.parametrize("mode", ["assistant", "prompt lookup"])
def test_speculation(name, mode, families, model_pair, token_ids):
    family = families[name]
    reference, model = model_pair(family)
    ids = token_ids(1, PROMPT)
    if mode == "assistant":
        _upstream(reference, ids, assistant_model=family.build(family.reference, seed=3), **GREEDY)
        options = {"assistant_model": family.build("dma_mxfp", seed=3)}
    else:
        options = {"prompt_lookup_num_tokens": 3}
    expected = _upstream(reference, ids, **GREEDY)
    assert torch.equal(model.generate(ids, max_new_tokens=NEW_TOKENS, **GREEDY, **options), expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_prefill_in_chunks(name, families, model_pair, token_ids):
    reference, model = model_pair(families[name])
    ids = token_ids(1, PROMPT)
    expected = reference.generate(ids, max_new_tokens=NEW_TOKENS, **GREEDY)
    assert torch.equal(model.generate(ids, max_new_tokens=NEW_TOKENS, prefill_chunk_size=8, **GREEDY), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_static_cache_is_reused(name, families, model_pair, token_ids):
    reference, model = model_pair(families[name])
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + NEW_TOKENS + 5)
    for seed in (1, 2):
        ids = token_ids(1, PROMPT, seed=seed)
        expected = reference.generate(ids, max_new_tokens=NEW_TOKENS, **GREEDY)
        cache.reset()
        actual = model.generate(ids, past_key_values=cache, max_new_tokens=NEW_TOKENS, disable_compile=True, **GREEDY)
        assert torch.equal(actual, expected)
