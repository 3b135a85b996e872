"""``equalize`` on every causal language model of the installed Transformers: bit-identical, or rejected by name."""

from __future__ import annotations

import re

import pytest
import torch
from dma_eval.equalization import equalize
from hf_architectures import architectures
from hf_outcomes import find_pair
from hf_page import PAGE, sample
from hf_shrink import CannotShrink
from sampling import sampled

DECODERS = [each for each in architectures() if each.kind == "decoder" and each.model_type != "reformer"]
"""Decoders, except one whose test configuration has fewer positions than this test needs."""
QUERIES_AND_KEYS = re.compile(r"(^|[._])(q|k|qkv|query|key|wqkv|c_attn|kv)", re.IGNORECASE)
REFUSALS = re.compile(
    "has no rotary embedding|not what linear layers or norms of its own|layers share its weights"
    "|changed in an unexpected way"
    "|computes no attention through Transformers' attention interface"
)


def _unbalance(model):
    """Give query and key channels very different magnitudes. Weights are exact in BF16, ``1 + w`` often too."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if QUERIES_AND_KEYS.search(name) and parameter.dim() <= 2:
            if parameter.dim() == 1:
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
            factors = torch.exp2(torch.randint(-3, 4, parameter.shape[:1], generator=generator).float())
            parameter.mul_(factors.view(-1, *[1] * (parameter.dim() - 1))).copy_(parameter.bfloat16())


@pytest.mark.parametrize("architecture", sampled(DECODERS, sample(PAGE.read_text())), ids=lambda each: each.model_type)
@torch.no_grad()
def test_logits_are_bit_identical_or_the_model_is_rejected(architecture):
    try:
        pair, inputs = find_pair(architecture, architecture.model_class)
    except (ImportError, AttributeError, CannotShrink) as error:
        pytest.skip(str(error))
    model = pair.reference
    _unbalance(model)
    tokens = torch.randint(5, 90, (2, 600), generator=torch.Generator().manual_seed(3))
    expected = inputs.output(model(input_ids=tokens[:, :60])).clone()
    refusal = ""
    try:
        equalize(model, tokens)
    except ValueError as error:
        refusal = str(error)
    assert torch.equal(inputs.output(model(input_ids=tokens[:, :60])), expected)
    if refusal:
        assert REFUSALS.search(refusal)
        pytest.skip(refusal)
