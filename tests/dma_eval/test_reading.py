"""What a backend with a cache reads is what the cache stores, and the same as one pass at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_oracle import expected_logits
from dma_eval.errors import UserError
from dma_eval.load import reading
from dma_eval.load.backends import activate, parse_backends
from dma_eval.load.reading import continued, log_likelihood, read
from dma_kernels.cache.storage import LayerStorage
from transformers import MambaConfig, MambaForCausalLM

import dma_hf.attention

LENGTH = 450


@pytest.fixture
def double(loaded):
    """In fp64, where no rounding error carries a number across the border between two codes."""
    return replace(loaded, model=loaded.model.double())


@pytest.fixture
def ids(loaded, prose):
    return loaded.tokenize(prose).ids[: 2 * LENGTH].view(2, LENGTH)


def backend(name):
    return parse_backends([name])[0]


def logits(loaded, name, ids, **options):
    chosen = backend(name)
    activate(loaded.model, chosen)
    return read(loaded.model, chosen, ids, **options)


@pytest.mark.parametrize("cache", ["int8", "int4"])
class TestThroughACache:
    def test_is_what_the_cache_holds(self, double, ids, cache):
        cached = logits(double, f"dma_mxfp:balanced+{cache}", ids)
        steps = [(start, min(start + 128, LENGTH)) for start in range(0, LENGTH, 128)]
        expected = expected_logits(double.model, ids, steps)
        assert (cached - expected).abs().max() < 1e-6 * expected.abs().max()
        exact = logits(double, "sdpa", ids)
        assert (cached - exact).abs().max() > 1e-4 * exact.abs().max()  # what is compared is quantized

    def test_padding_on_the_left(self, double, ids, cache):
        """Also where a row's first chunk is nothing but padding."""
        alone = logits(double, f"dma_mxfp:balanced+{cache}", ids[:1, 200:], last=9)
        mask = torch.ones_like(ids)
        mask[0, :200] = 0
        together = logits(double, f"dma_mxfp:balanced+{cache}", ids, mask=mask, last=9)
        assert (together[:1] - alone).abs().max() < 1e-6 * alone.abs().max()

    def test_reads_what_is_stored(self, loaded, ids, cache, monkeypatch):
        """Were stored tiles not read, spoiling them would change nothing."""
        honest = logits(loaded, f"dma_mxfp:balanced+{cache}", ids)
        append = LayerStorage.append

        def spoil(storage, *arguments):
            append(storage, *arguments)
            storage.kv_pages.zero_()

        monkeypatch.setattr(LayerStorage, "append", spoil)
        spoiled = logits(loaded, f"dma_mxfp:balanced+{cache}", ids)
        first = 384  # queries in tile 3 are the first to see a packed tile, between the sink and the band
        changed = ((spoiled - honest).abs() > 1e-3).any(-1).any(0).nonzero()
        assert int(changed[0]) == first
        assert not torch.isclose(spoiled[:, first:], honest[:, first:], rtol=1e-3).all(-1).any()


@pytest.mark.parametrize("name", ["sdpa", "dma_mxfp:balanced", "dma_mxfp:balanced+int4"])
@pytest.mark.parametrize("last", [1, 66, 67, 200])
def test_last_logits(loaded, ids, name, last):
    """The last chunk holds 66 tokens."""
    torch.testing.assert_close(logits(loaded, name, ids, last=last), logits(loaded, name, ids)[:, -last:])


@pytest.fixture
def lengths_read(loaded):
    """The length of each pass of the model."""
    lengths = []
    loaded.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return lengths


@pytest.mark.parametrize(
    ("name", "lengths"), [("dma_mxfp:balanced", [LENGTH]), ("dma_mxfp:balanced+int4", [128, 128, 128, 66])]
)
def test_passes(loaded, ids, lengths_read, name, lengths):
    """One pass, or one for each tile."""
    logits(loaded, name, ids)
    assert lengths_read == lengths


def test_model_without_attention():
    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1)
    with pytest.raises(UserError, match="MambaForCausalLM"):
        activate(MambaForCausalLM(config), backend("dma_mxfp:balanced+int4"))


def test_generation_uses_the_cache(loaded, ids, monkeypatch):
    stored = []
    append = LayerStorage.append

    def noted(storage, key, value):
        stored.append(key.shape[2])
        append(storage, key, value)

    monkeypatch.setattr(LayerStorage, "append", noted)
    activate(loaded.model, backend("dma_mxfp:balanced+int4"))
    continued(loaded.model, backend("dma_mxfp:balanced+int4"), ids[:1], 3)
    assert stored.count(LENGTH) == 2  # once for each layer
    stored.clear()
    for name in ("sdpa", "sim_sage", "dma_mxfp:balanced"):  # a backend's cache is not that of those after it
        activate(loaded.model, backend(name))
        continued(loaded.model, backend(name), ids[:1, :300], 2)
    assert stored == []


def test_not_finite_through_a_cache(compared, monkeypatch):
    """Stopped, with the layer named; the others have their results."""
    attend = dma_hf.attention.cached_attention
    monkeypatch.setattr(
        dma_hf.attention, "cached_attention", lambda *args, **options: attend(*args, **options) * torch.nan
    )
    names = ("sdpa", "dma_mxfp:balanced", "dma_mxfp:balanced+int4")
    sdpa, at_once, cached = compared(*names, context=256, max_windows=1).backends
    assert (sdpa.failure, at_once.failure) == (None, None)
    assert "first at position 128 of a window; they begin in the output of model.layers.0.self_attn" in cached.failure


@pytest.mark.parametrize("last", [None, 30])
def test_sdpa_without_a_fused_kernel_reads_in_pieces(double, ids, lengths_read, monkeypatch, last):
    """So that it does not hold the scores of all pairs of tokens."""
    expected = logits(double, "sdpa", ids, last=last)
    lengths_read.clear()
    monkeypatch.setattr(reading, "UNFUSED_STEP", 200)
    monkeypatch.setattr(reading, "sdpa_is_unfused", lambda model, backend: backend.implementation == "sdpa")
    found = logits(double, "sdpa", ids, last=last)
    assert lengths_read == [200, 200, 50]
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()


@pytest.mark.parametrize(("tokens", "is_greedy"), [([0, 2], True), ([0, 1], False), ([1, 2], False), ([2], True)])
def test_a_continuation_is_greedy_if_all_of_its_tokens_are(tokens, is_greedy):
    log_probs = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]).log()
    likelihood = sum(float(row[token]) for row, token in zip(log_probs[-len(tokens) :], tokens, strict=True))
    assert log_likelihood(log_probs, tokens) == (pytest.approx(likelihood), is_greedy)
