"""``generate`` gives the same tokens as Transformers' own attention, in every mode and with every cache."""

from __future__ import annotations

import pytest
import torch
import transformers
from sampling import sampled
from transformers import set_seed

NEW_TOKENS = 14
PROMPT = 31  # longer than the window, so that sliding caches drop keys immediately

STATIC = {"cache_implementation": "static", "disable_compile": True}
CACHES = [
    pytest.param({}, id="dynamic"),
    pytest.param(STATIC, id="static"),
    pytest.param({"use_cache": False}, id="no-cache", marks=pytest.mark.exhaustive),
]


def _generate(model, ids, **options):
    set_seed(0)
    return model.generate(ids, max_new_tokens=NEW_TOKENS, **{"pad_token_id": 0, "do_sample": False} | options)


def _upstream(model, ids, **options):
    """Return the tokens of Transformers' own attention; skip if it fails."""
    try:
        return _generate(model, ids, **options)
    except (RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"Transformers {transformers.__version__} cannot: {error}")


@pytest.mark.parametrize("options", [*CACHES, pytest.param({"num_beams": 3}, id="beams")])
def test_a_left_padded_batch_gives_the_same_tokens(decoder, options, model_pair, token_ids):
    ids = token_ids(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    reference, model = model_pair(decoder)
    expected = _upstream(reference, ids, attention_mask=mask, **options)
    assert expected.shape[1] > ids.shape[1]
    assert torch.equal(_generate(model, ids, attention_mask=mask, **options), expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2", "qwen3"])
@pytest.mark.parametrize("mode", ["assistant", "prompt lookup"])
def test_speculation_gives_the_same_tokens(name, mode, families, model_pair, token_ids):
    family = families[name]
    reference, model = model_pair(family)
    ids = token_ids(1, PROMPT)
    if mode == "assistant":
        _upstream(reference, ids, assistant_model=family.build(family.reference, seed=3))
        options = {"assistant_model": family.build("dma_mxfp", seed=3)}
    else:
        options = {"prompt_lookup_num_tokens": 3}
    assert torch.equal(_generate(model, ids, **options), _upstream(reference, ids))


@pytest.mark.parametrize("name", sampled(["llama", "mistral", "gemma3", "gpt_oss"], "gemma3".__eq__))
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 2, "do_sample": True},
        {"cache_implementation": "dynamic_full"},
        {"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"guidance_scale": 1.5},
    ],
    ids=lambda options: ", ".join(f"{name}={value}" for name, value in options.items()),
)
def test_other_modes_give_the_same_tokens(name, options, families, model_pair, token_ids):
    """With equal scores."""
    reference, model = model_pair(families[name])
    options |= {"output_scores": True, "return_dict_in_generate": True}
    expected, actual = (
        _upstream(reference, token_ids(2, PROMPT), **options),
        _generate(model, token_ids(2, PROMPT), **options),
    )
    torch.testing.assert_close(torch.stack(actual.scores), torch.stack(expected.scores), rtol=1e-4, atol=1e-4)
    assert torch.equal(actual.sequences, expected.sequences)
