"""The demo model's folder and excerpt."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def assets() -> Path:
    return Path(str(resources.files("dma_eval"))) / "assets"


@pytest.fixture(scope="module")
def folder(assets: Path) -> Path:
    return assets / "demo_model"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def excerpt(assets: Path) -> str:
    return (assets / "heldout.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tokens(tokenizer: PreTrainedTokenizerFast, excerpt: str) -> Tensor:
    return torch.tensor(tokenizer(excerpt, verbose=False).input_ids)


class TestFolder:
    def test_the_card_shows_the_figures_of_the_log(self, folder: Path) -> None:
        log = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
        card, measured = (folder / "README.md").read_text(encoding="utf-8"), log["measured"]
        for row, name, form in (
            ("perplexity per token", "perplexity", ".2f"),
            ("the same, second half of each window", "perplexity_second_half", ".2f"),
            ("copying a passage", "copy_accuracy", ".1%"),
        ):
            assert f"| {row} | {measured[name]:{form}} | {measured[f'{name}_local']:{form}} |" in card


class TestExcerpt:
    def test_perplexity(self, model: LlamaForCausalLM, tokens: Tensor) -> None:
        """Measured 39.9; the best that token frequencies alone can do is several hundred, an untrained model 4,096."""
        window = tokens[None, :2048]
        with torch.inference_mode():
            assert model(window, labels=window, use_cache=False).loss.exp() < 50

    def test_far_keys_matter(self, model: LlamaForCausalLM, tokens: Tensor) -> None:
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
