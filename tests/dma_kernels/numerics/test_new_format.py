"""A format needs only what ``docs/extending.md`` says: an element, its codec and a block format."""

from __future__ import annotations

import pytest
import torch
from dma_kernels import BLOCK_FORMATS, BlockFormat, Recipe, attention
from dma_kernels.numerics import quantize as quantization
from dma_kernels.numerics import recipe as recipes
from dma_kernels.numerics.formats import ElementFormat, ScaleFormat
from dma_kernels.testing import random_qkv

INT4 = ElementFormat("INT4", emax=2, max_value=7.0, bits=4)
TOY = BlockFormat("mxint4", INT4, 16, ScaleFormat.E8M0)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add 4-bit integers, one per byte, in blocks of 16."""
    codec = (lambda x: x.round().clamp(-7, 7).nan_to_num().to(torch.int8), torch.Tensor.float)
    monkeypatch.setitem(quantization._ELEMENT_CODECS, INT4, codec)
    monkeypatch.setitem(BLOCK_FORMATS, TOY.name, TOY)
    monkeypatch.setattr(recipes, "FORMAT_NAMES", (*recipes.FORMAT_NAMES, TOY.name))


@pytest.mark.usefixtures("toy")
def test_attention_runs_a_new_format() -> None:
    query, key, value = random_qkv(q_len=400, kv_len=400)
    exact = attention(query, key, value, Recipe(low="bf16"))
    low = attention(query, key, value, Recipe(low="mxint4", rotate=True))
    # All earlier tiles are high, and are computed in another block of products.
    torch.testing.assert_close(low[:, :, :256], exact[:, :, :256], rtol=1e-4, atol=1e-5)
    error = (low - exact)[:, :, 256:].norm() / exact[:, :, 256:].norm()
    assert 0.001 < error < 0.3
