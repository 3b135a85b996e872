"""The demo model on its excerpt."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ASSETS = Path(str(resources.files("dma_eval"))) / "assets"


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(ASSETS / "demo_model", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokens():
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "demo_model")
    text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")
    return torch.tensor(tokenizer(text, verbose=False).input_ids)


def test_its_perplexity_is_that_of_a_trained_model(model, tokens):
    """Measured 39.9; the best that token frequencies alone can do is several hundred, an untrained model 4,096."""
    window = tokens[None, :2048]
    with torch.inference_mode():
        assert model(window, labels=window, use_cache=False).loss.exp() < 50


def test_far_keys_matter(model, tokens):
    """A passage of 256 tokens is copied from more than 1,024 tokens back, and not when those keys are hidden."""
    window = tokens[None, 9000 : 9000 + 2048].clone()
    window[:, -256:] = window[:, 300:556]
    query, key = torch.arange(2048)[:, None], torch.arange(2048)
    near = (key <= query) & ((query - key < 256) | (key < 128))
    right = {}
    for name, mask in {"full": None, "local": near[None, None]}.items():
        with torch.inference_mode():
            logits = model(window, attention_mask=mask, use_cache=False).logits
        right[name] = (logits[:, -241:-1].argmax(-1) == window[:, -240:]).float().mean().item()
    assert right["full"] > 0.75, right
    assert right["local"] < 0.45, right
