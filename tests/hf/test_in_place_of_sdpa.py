"""Transformers' own tests of SDPA, run on ``dma_mxfp`` registered under the name ``sdpa``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from sampling import sampled
from tiny_models import FAMILIES, IDENTITY
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dma_hf import config as settings
from dma_hf.attention import dma_attention_forward
from dma_hf.config import config_of
from dma_hf.masks import dma_mask

BATCH, LENGTH, WINDOW = 7, 9, 2  # many rows, few tokens, and a shorter window
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
NAMES = ("llama", "mistral", "qwen3", "gemma3", "bert", "modernbert", "bart")


@contextmanager
def in_place_of_sdpa() -> Iterator[None]:
    """Register the functions as ``sdpa``, without quantization unless a model configures it."""
    functions = ALL_ATTENTION_FUNCTIONS["sdpa"], ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    default = settings._DEFAULT
    AttentionInterface.register("sdpa", dma_attention_forward)
    AttentionMaskInterface.register("sdpa", dma_mask)
    settings._DEFAULT = settings.Settings.of(config_of(IDENTITY))
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", functions[0])
        AttentionMaskInterface.register("sdpa", functions[1])
        settings._DEFAULT = default


def _inputs(name, side):
    generator = torch.Generator().manual_seed(0)
    inputs = {"input_ids": torch.randint(3, 97, (BATCH, LENGTH), generator=generator)}
    mask = torch.ones_like(inputs["input_ids"])
    if side == "left":
        mask[-1, :WINDOW] = 0
    elif side == "right":
        mask[-1, -WINDOW:] = 0
    if name == "bart":
        inputs |= {"decoder_input_ids": inputs["input_ids"].flip(0), "decoder_attention_mask": mask}
    return inputs | {"attention_mask": None if side == "none" else mask}


@pytest.mark.parametrize(
    ("name", "dtype", "side"),
    sampled(
        product(NAMES, TOLERANCE, ("left", "right", "none")),
        lambda name, dtype, side: dtype == torch.float32 or side == "left",
    ),
)
def test_dma_mxfp_matches_eager_attention(name, dtype, side):
    family, inputs = FAMILIES[name], _inputs(name, side)
    changes = {"sliding_window": WINDOW} if "sliding_window" in family.sizes else {}
    eager = family.build("eager", **changes).to(dtype)
    model = family.build("sdpa", **changes).to(dtype)
    with in_place_of_sdpa(), torch.no_grad():
        actual = model(**inputs).logits.float()
    with torch.no_grad():
        expected = eager(**inputs).logits.float()
    seen = inputs.get("decoder_attention_mask", inputs["attention_mask"])
    if seen is not None:
        actual, expected = actual[seen.bool()], expected[seen.bool()]
    assert (actual - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_equal_sdpa(name):
    family, inputs = FAMILIES[name], _inputs(name, "none")
    without = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    without |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    model = family.build("sdpa").train()
    for config in {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }.values():
        for option, value in without.items():
            if hasattr(config, option):
                setattr(config, option, value)
    for module in model.modules():
        for option in ("p", "dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, option, None), float):
                setattr(module, option, 0.0)
    labels = inputs["input_ids"]
    expected = model(**inputs, labels=labels).loss
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(expected, parameters, allow_unused=True)
    with in_place_of_sdpa():
        loss = model(**inputs, labels=labels).loss
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in gradients if gradient is not None)
    for actual, gradient in zip(found, gradients, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-3, atol=1e-5 * largest)
