"""Pairs of tiny random models of many architectures: Transformers' own attention and ``dma_mxfp``.

A test with the argument ``decoder`` or ``seq2seq`` runs once for each such family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import DECODERS, FAMILIES, IDENTITY, SEQ2SEQ, VOCABULARY, Family
from torch import Tensor
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

import dma_hf

KINDS = {"decoder": DECODERS, "seq2seq": SEQ2SEQ}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests of a kind of architecture over its families."""
    for kind, families in KINDS.items():
        if kind in metafunc.fixturenames:
            metafunc.parametrize(kind, [pytest.param(family, id=name) for name, family in families.items()])


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """Disable gradients; tests that need them enable them."""
    with torch.no_grad():
        yield


class Event:
    """Stands in for ``torch.Event``, which a CPU does not have."""

    def __init__(self, **options: Any) -> None:
        self.record = self.synchronize = lambda: None


@pytest.fixture
def events_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let code that records events on a GPU run on a CPU, where everything has happened already."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch, "Event", Event)


@pytest.fixture
def identity() -> dict[str, Any]:
    """A configuration without quantization, which computes ordinary attention."""
    return dict(IDENTITY)


@pytest.fixture
def model_pair() -> Callable[[Family], tuple[PreTrainedModel, PreTrainedModel]]:
    """Two models with the same weights: the reference implementation, and unquantized ``dma_mxfp``."""
    return lambda family: _pair_of(next(name for name, other in FAMILIES.items() if other is family))


@pytest.fixture
def families() -> dict[str, Family]:
    """All families by name."""
    return FAMILIES


@pytest.fixture
def llama() -> PreTrainedModel:
    """A decoder that runs ``dma_mxfp`` in two layers."""
    return FAMILIES["llama"].build("dma_mxfp")


@pytest.fixture
def llava() -> PreTrainedModel:
    """A model with a language model and a vision tower, which run SDPA. Token 96 stands for an image."""
    vision = {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "image_size": 32, "patch_size": 8, "projection_dim": 64}
    text = FAMILIES["llama"].sizes | {"model_type": "llama"}
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=96, image_seq_length=16)
    torch.manual_seed(0)
    return LlavaForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()


@cache
def _pair_of(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    family = FAMILIES[name]
    reference, model = family.build(family.reference), family.build("dma_mxfp")
    model.load_state_dict(reference.state_dict())
    dma_hf.configure(model, IDENTITY)
    return reference, model


@pytest.fixture
def token_ids() -> Callable[..., Tensor]:
    """Deterministic random token ids ``[batch, length]`` without special tokens."""

    def make(batch: int, length: int, seed: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, VOCABULARY, (batch, length), generator=generator)

    return make


@pytest.fixture
def assert_same() -> Callable[..., None]:
    """Compare logits ``[B, T, V]`` of real tokens within fp32 rounding, 1e-5 of the largest."""

    def check(actual: Tensor, expected: Tensor, real: Tensor | None = None, tolerance: float = 1e-5) -> None:
        assert actual.shape == expected.shape
        if real is not None:
            actual, expected = actual[real.bool()], expected[real.bool()]
        assert torch.isfinite(actual).all()
        error = (actual - expected).abs().max() / expected.abs().max()
        assert error <= tolerance, f"relative error {error:.2e}"

    return check
