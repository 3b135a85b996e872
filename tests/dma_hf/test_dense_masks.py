"""A 4-D mask gives the same result as the equivalent 2-D mask, and is read once."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import create_causal_mask

import dma_hf
from dma_hf import DMACache
from dma_hf.integrations.internals import CACHE_ARGUMENT
from dma_hf.masks import layer_geometry

LENGTH = 420


def _masks(dtype=torch.float64):
    """Return the 2-D mask of a left-padded batch, and the equivalent causal 4-D mask."""
    padding = torch.ones(2, LENGTH, dtype=torch.int64)
    padding[1, :150] = 0
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & padding[:, None, None].bool()
    if dtype is torch.bool:
        return padding, seen
    return padding, torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


@pytest.fixture
def llama(families):
    model = families["llama"].build("dma_mxfp").double()
    dma_hf.configure(model, "fp4", exact_until=0)
    return model


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=["boolean", "additive"])
@pytest.mark.parametrize("format", [None, "int4"])
def test_a_4d_mask_of_left_padding_equals_the_2d_mask(format, dtype, llama, token_ids, assert_same):
    """In one pass, and with a cache in prefill and decode steps."""
    ids, (padding, mask) = token_ids(2, LENGTH), _masks(dtype)
    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    steps = [(0, LENGTH)] if format is None else [(0, 400), *((i, i + 1) for i in range(400, LENGTH))]
    outputs = []
    for given in (padding, mask):
        cache = {} if format is None else {CACHE_ARGUMENT: DMACache(llama.config, format)}
        parts = []
        for start, end in steps:
            part = given[:, :end] if given.ndim == 2 else given[:, :, start:end, :end]
            arguments = {"attention_mask": part, "position_ids": positions[:, start:end], **cache}
            parts.append(llama(ids[:, start:end], use_cache=format is not None, **arguments).logits)
        outputs.append(torch.cat(parts, 1))
    assert_same(outputs[1], outputs[0], padding, 1e-9)


@pytest.mark.parametrize("shown", [False, True])
def test_a_4d_mask_may_follow_a_2d_mask(shown, llama, token_ids, assert_same):
    """As in tree decoding. Padding that it shows is refused, because the cache does not hold it."""
    ids, (padding, mask) = token_ids(2, LENGTH), _masks()
    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    cache = DMACache(llama.config, "int4")

    def forward(start, end, attention_mask):
        arguments = {"attention_mask": attention_mask, "position_ids": positions[:, start:end]}
        return llama(ids[:, start:end], **arguments, **{CACHE_ARGUMENT: cache}).logits

    forward(0, 400, padding[:, :400])
    expected = forward(400, LENGTH, padding)
    cache.crop(400 - LENGTH)
    mask = mask[:, :, 400:]
    if shown:
        with pytest.raises(ValueError, match="attention_mask shows padding that it hid before"):
            forward(400, LENGTH, torch.where(torch.arange(LENGTH) == 149, 0, mask))
    assert_same(forward(400, LENGTH, mask), expected, tolerance=1e-9)


def test_padding_of_a_4d_mask_cannot_be_shown_later(llama, token_ids):
    ids, (_, mask) = token_ids(2, LENGTH), _masks()
    cache = DMACache(llama.config, "int4")
    llama(ids[:, :400], attention_mask=mask[:, :, :400, :400], **{CACHE_ARGUMENT: cache})
    with pytest.raises(ValueError, match="attention_mask shows padding that it hid before"):
        llama(ids[:, 400:], **{CACHE_ARGUMENT: cache})


@pytest.mark.parametrize("high_layers", [(), (1,)])
def test_a_mask_of_an_earlier_pass_keeps_no_settings(high_layers, families, token_ids):
    """Transformers' own mask, which the caller makes once."""
    model, ids = families["llama"].build("dma_mxfp", num_hidden_layers=4), token_ids(1, LENGTH)
    mask = create_causal_mask(model.config, model.get_input_embeddings()(ids), None, None)
    for preset in ("balanced", "paper"):
        dma_hf.configure(model, preset, high_layers=high_layers)
        expected = model(ids, use_cache=False).logits
        assert torch.equal(model(ids, attention_mask=mask, use_cache=False).logits, expected)


def test_a_mask_is_read_once_for_all_layers(llama, token_ids, monkeypatch):
    """It is read again after a change, also through ``.data`` or NumPy, which does not count as one of the tensor."""
    reads, read = [], layer_geometry._read_mask
    monkeypatch.setattr(layer_geometry, "_read_mask", lambda mask: reads.append(mask) or read(mask))
    ids, mask, lowest = token_ids(2, LENGTH), _masks()[1], torch.finfo(torch.float64).min
    outputs = [llama(ids, attention_mask=mask).logits]
    for write in (
        lambda: mask[0, :, :, 3].fill_(lowest),
        lambda: mask.numpy()[:, :, 200:, :150].fill(lowest),
        lambda: mask.data[:, :, 300:, 160].fill_(lowest),
    ):
        write()
        outputs.append(llama(ids, attention_mask=mask).logits)
        assert len(reads) == len(outputs)
        assert not torch.equal(*outputs[-2:])
        assert torch.equal(outputs[-1], llama(ids, attention_mask=mask.clone()).logits)
        reads.pop()
