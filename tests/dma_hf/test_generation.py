"""``generate`` gives the same tokens as Transformers' own attention, in every mode and with every cache."""

from __future__ import annotations

import pytest
import torch
import transformers
from sampling import sampled
from transformers import set_seed

NEW_TOKENS = 14
PROMPT = 31  # longer than the window, so that sliding caches drop keys immediately

GREEDY = {"do_sample": False}
CACHES = [
    pytest.param({}, id="dynamic"),
    pytest.param({"cache_implementation": "static", "disable_compile": True}, id="static"),
    pytest.param({"use_cache": False}, id="no-cache", marks=pytest.mark.exhaustive),
]


def _left_padded(ids, padding=9):
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return mask


def _upstream(model, *arguments, **options):
    """Return the tokens of Transformers' own attention; skip if it fails."""
    try:
        return model.generate(*arguments, max_new_tokens=NEW_TOKENS, **options)
    except (RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"Transformers {transformers.__version__} cannot: {error}")


def _generate(models, ids, **options):
    """Return the tokens of both models for a left-padded batch."""
    options |= {"attention_mask": _left_padded(ids), "pad_token_id": 0}
    set_seed(0)
    expected = _upstream(models[0], ids, **options)
    assert expected.shape[1] > ids.shape[1]
    set_seed(0)
    return expected, models[1].generate(ids, max_new_tokens=NEW_TOKENS, **options)


@pytest.mark.parametrize("cache", CACHES)
def test_greedy_decoding_gives_the_same_tokens(decoder, cache, model_pair, token_ids):
    expected, actual = _generate(model_pair(decoder), token_ids(2, PROMPT), **GREEDY, **cache)
    assert torch.equal(actual, expected)


def test_sampling_with_a_seed_gives_the_same_tokens(decoder, model_pair, token_ids):
    expected, actual = _generate(model_pair(decoder), token_ids(2, PROMPT), do_sample=True, top_k=20)
    assert torch.equal(actual, expected)


def test_beam_search_gives_the_same_tokens(decoder, model_pair, token_ids):
    expected, actual = _generate(model_pair(decoder), token_ids(2, PROMPT), num_beams=3, **GREEDY)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2", "qwen3"])
@pytest.mark.parametrize("mode", ["assistant", "prompt lookup"])
def test_speculation_gives_the_same_tokens(name, mode, families, model_pair, token_ids):
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


@pytest.mark.parametrize("name", sampled(["llama", "mistral", "gemma3", "gpt_oss"], "gemma3".__eq__))
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
        {"num_beams": 2, "do_sample": True},
        {"do_sample": False, "output_scores": True, "return_dict_in_generate": True},
        {"do_sample": False, "cache_implementation": "dynamic_full"},
        {"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"do_sample": False, "guidance_scale": 1.5},
    ],
    ids=lambda options: ", ".join(f"{name}={value}" for name, value in options.items()),
)
def test_other_modes_give_the_same_tokens(name, options, families, model_pair, token_ids):
    """Requested scores are equal too."""
    results = []
    for model, run in zip(model_pair(families[name]), (_upstream, _ours), strict=True):
        set_seed(0)
        results.append(run(model, token_ids(2, PROMPT), pad_token_id=0, **options))
    expected, actual = results
    if "return_dict_in_generate" in options:
        torch.testing.assert_close(torch.stack(actual.scores), torch.stack(expected.scores), rtol=1e-4, atol=1e-4)
        expected, actual = expected.sequences, actual.sequences
    assert torch.equal(actual, expected)


def _ours(model, *arguments, **options):
    return model.generate(*arguments, max_new_tokens=NEW_TOKENS, **options)
