"""``generate`` gives the same tokens as Transformers' own attention, with every cache."""

from __future__ import annotations

import pytest
import torch
import transformers
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
