"""Speculation over a ``DMACache`` gives the tokens of greedy decoding in every format.

In fp64, so that the order of summation does not change the best token.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from dma_kernels.cache.formats import CACHE_FORMATS
from sampling import sampled

import dma_hf
from dma_hf import DMACache
from dma_hf.integrations.internals import CACHE_ARGUMENT

PROMPTS = (633, 700)
NEW_TOKENS = 10
MODELS = {"qwen2": {}, "mistral": {"sliding_window": 150}, "gemma3": {"sliding_window": 200}}
WAYS = ("assistant", "prompt lookup")
IN_CI = [("qwen2", "assistant", "int8"), ("mistral", "prompt lookup", "int4"), ("gemma3", "assistant", "int4")]


def _model(families, name, seed=0):
    model = families[name].build("dma_mxfp", seed=seed, **MODELS[name]).double()
    dma_hf.configure(model, "fp4")
    return model


def _prompt(token_ids, length):
    """Return a repetitive prompt, for prompt lookup."""
    return token_ids(1, 70).repeat(1, length // 70 + 1)[:, :length]


@pytest.mark.parametrize(
    ("name", "way", "format"),
    sampled(product(MODELS, WAYS, CACHE_FORMATS), lambda *case: case in IN_CI),
)
def test_speculation_equals_greedy_decoding(name, way, format, families, token_ids, assert_same):
    model = _model(families, name)
    speculation = {"prompt_lookup_num_tokens": 5}
    if way == "assistant":  # the same model, so candidates are accepted
        speculation = {"assistant_model": _model(families, name)}
    for length in PROMPTS:
        ids = _prompt(token_ids, length)
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        expected, actual = (
            model.generate(ids, **{CACHE_ARGUMENT: DMACache(model.config, format)}, **options, **way_options)
            for way_options in ({}, speculation)
        )
        assert torch.equal(actual.sequences, expected.sequences), length
        assert_same(torch.stack(actual.logits), torch.stack(expected.logits), tolerance=1e-9)


def test_a_reset_cache_computes_the_next_prompt_as_a_prompt(families, token_ids):
    """Speculation that ends with its first step leaves nothing behind."""
    model = _model(families, "qwen2")
    ids, cache = _prompt(token_ids, 400), DMACache(model.config)
    options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "prompt_lookup_num_tokens": 3}
    model.generate(ids[:, :100], **{CACHE_ARGUMENT: cache}, **options)
    cache.reset()
    expected = model(ids, **{CACHE_ARGUMENT: DMACache(model.config)}).logits
    assert torch.equal(model(ids, **{CACHE_ARGUMENT: cache}).logits, expected)


@pytest.mark.parametrize("name", ["prompt_lookup_num_tokens", "num_assistant_tokens", "assistant_early_exit"])
def test_more_candidates_than_the_cache_can_remove_are_refused(name, families, token_ids):
    """At the start, and not in the middle of an answer."""
    model, assistant = _model(families, "qwen2"), _model(families, "qwen2")

    def say(count):
        options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, CACHE_ARGUMENT: DMACache(model.config)}
        if name == "num_assistant_tokens":
            options["assistant_model"] = assistant
            assistant.generation_config.num_assistant_tokens = count
        elif name == "assistant_early_exit":  # the model assists itself
            options[name] = 1
            model.generation_config.num_assistant_tokens = count
        else:
            options[name] = count
        model.generate(token_ids(1, 20), **options)

    say(128)
    limited = "prompt_lookup_num_tokens" if name == "prompt_lookup_num_tokens" else "num_assistant_tokens"
    with pytest.raises(
        ValueError, match=f"{limited} must be at most 128 with a DMACache, which cannot remove more tokens; got 129"
    ):
        say(129)
