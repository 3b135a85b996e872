"""The mask function: its masks equal upstream's, described by a few numbers."""

from __future__ import annotations

import operator
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig
from transformers import masking_utils as upstream

from dma_hf.masks import dma_mask
from dma_hf.masks.geometry import CompactMask, MaskGeometry
from dma_hf.support import has_built_in_attention

WINDOW = 6


def _mask_function(name):
    """Return a pattern and the arguments that upstream's ``create_*_mask`` functions pass with it."""
    zeros = torch.zeros(2, dtype=torch.int64)
    window = {"local_size": WINDOW, "config": LlamaConfig(sliding_window=WINDOW)}
    chunk = {"local_size": WINDOW, "config": LlamaConfig(attention_chunk_size=WINDOW)}
    both = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    prefix = upstream.or_masks(upstream.causal_mask_function, lambda b, h, q, k: k < 3)
    return {
        "causal": (upstream.causal_mask_function, {}),
        "sliding": (upstream.sliding_window_causal_mask_function(WINDOW), window),
        "chunked": (upstream.chunked_causal_mask_function(WINDOW, zeros), chunk),
        "full": (upstream.bidirectional_mask_function, both),
        "sliding full": (upstream.sliding_window_bidirectional_mask_function(WINDOW), window | both),
        "prefix": (prefix, {"allow_is_causal_skip": False}),
    }[name]


# q_length, kv_length, q_offset, kv_offset
GEOMETRIES = {
    "prefill": (11, 11, 0, 0),
    "decode": (1, 12, 11, 0),
    "chunk": (4, 15, 11, 0),
    "static cache": (4, 20, 9, 0),
    "sliding cache": (3, 8, 20, 15),
    "one": (1, 1, 0, 0),
    "no keys": (2, 0, 0, 0),
    "no queries": (0, 5, 5, 0),
}
# Rows of a padding mask: which of the tokens so far are masked.
PADDINGS = {
    "none": None,
    "nothing hidden": (slice(0), slice(0)),
    "left": (slice(0, 3), slice(0)),
    "left, dropped by the cache": (slice(0, 3), slice(0, 1)),
    "right": (slice(-2, None), slice(0)),
    "holes": (slice(2, 4), slice(0, 2)),
    "a whole row": (slice(None), slice(0)),
}


def test_a_step_over_a_static_cache_has_no_pattern():
    """Upstream's flag does not tell whether there is a pattern; a mask combined with a window is one."""
    function, arguments = _mask_function("sliding")
    sizes = {"batch_size": 2, "q_length": 1, "kv_length": 20, "q_offset": torch.tensor(9)}
    arguments = arguments | {"allow_is_causal_skip": False}
    geometry = dma_mask(**sizes, mask_function=function, **arguments).dma_geometry
    assert (geometry.is_causal, geometry.window, geometry.pattern) == (True, WINDOW, None)
    packed = upstream.and_masks(function, lambda b, h, q, k: k > 3)
    for other in (packed, upstream.sliding_window_causal_mask_function(WINDOW + 1)):
        assert dma_mask(**sizes, mask_function=other, **arguments).dma_geometry.pattern is not None


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("pattern", ["causal", "sliding", "chunked", "full", "sliding full", "prefix"])
def test_the_mask_equals_upstreams(pattern, geometry, padding):
    q_length, kv_length, q_offset, kv_offset = GEOMETRIES[geometry]
    function, arguments = _mask_function(pattern)
    sizes = {"batch_size": 2, "q_length": q_length, "kv_length": kv_length, "kv_offset": kv_offset}
    attention_mask = None
    if PADDINGS[padding] is not None:
        attention_mask = torch.ones(2, min(q_offset + q_length, kv_offset + kv_length), dtype=torch.bool)
        for row, hidden in zip(attention_mask, PADDINGS[padding], strict=True):
            row[hidden] = False
    expected = upstream.sdpa_mask(
        **sizes, q_offset=q_offset, mask_function=function, attention_mask=attention_mask, allow_is_causal_skip=False
    )
    for offset in (q_offset, torch.tensor(q_offset)):
        mask = dma_mask(**sizes, q_offset=offset, mask_function=function, attention_mask=attention_mask, **arguments)
        assert isinstance(mask, CompactMask)
        assert mask.shape == (2, 1, q_length, kv_length)
        assert torch.equal(mask.dense(), expected)


def _geometry(pattern="causal", **changes):
    function, arguments = _mask_function(pattern)
    sizes = {"batch_size": 2, "q_length": 10, "kv_length": 10, "mask_function": function}
    return dma_mask(**(sizes | arguments | changes)).dma_geometry


def test_plain_masks_have_no_pattern():
    for pattern in ("causal", "full"):
        plain = _geometry(pattern)
        assert (plain.is_causal, plain.window, plain.q_offset, plain.kv_offset) == (pattern == "causal", None, 0, 0)
        assert plain.pattern is plain.kv_range is None
    assert _geometry("sliding").window == WINDOW
    assert _geometry("sliding", kv_length=WINDOW, q_length=WINDOW).window is None
    assert _geometry("sliding full").window == WINDOW
    assert _geometry("chunked", kv_length=WINDOW, q_length=WINDOW).pattern is None
    hidden_left = torch.tensor([[0] * 3 + [1] * 7, [1] * 10]).bool()
    for pattern in ("causal", "sliding", "full", "sliding full"):
        padded = _geometry(pattern, attention_mask=hidden_left)
        assert padded.pattern is None
        assert padded.kv_range.tolist() == [[3, 10], [0, 10]]
        assert padded.q_offset.tolist() == padded.kv_offset.tolist() == [-3, 0]


def test_irregular_masks_have_a_pattern():
    assert _geometry("prefix").pattern.shape == (2, 1, 10, 10)
    assert _geometry("chunked").pattern.shape == (2, 1, 10, 10)
    holes = torch.ones(2, 10, dtype=torch.bool)
    holes[0, 4] = False
    assert _geometry(attention_mask=holes).pattern.shape == (2, 1, 1, 10)
    ambiguous = LlamaConfig(sliding_window=WINDOW, attention_chunk_size=WINDOW)
    assert _geometry("sliding", config=ambiguous).pattern is not None
    assert _geometry("sliding", config=None).pattern is not None


def test_positions_are_relative_to_the_first_real_key_of_the_row():
    """Also after a sliding cache has dropped that key."""
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, :4] = False
    geometry = _geometry("sliding", q_length=1, q_offset=29, kv_offset=20, attention_mask=mask)
    assert geometry.q_offset.tolist() == [25, 29]
    assert geometry.kv_offset.tolist() == [16, 20]
    assert geometry.kv_range.tolist() == [[0, 10], [0, 10]]
    mask[1, :4] = False
    same = _geometry("sliding", q_length=1, q_offset=29, kv_offset=20, attention_mask=mask)
    assert (same.q_offset, same.kv_offset) == (25, 16)


def test_a_prompt_in_a_static_cache_is_unpadded_if_no_key_is_masked():
    geometry = _geometry(q_length=3, kv_length=40, q_offset=torch.tensor(7))
    assert geometry.kv_range.tolist() == [[0, 10], [0, 10]]  # keys that are not written yet are masked
    assert geometry.is_unpadded
    assert geometry.q_offset == 7
    mask = torch.ones(2, 10, dtype=torch.bool)
    assert _geometry(kv_length=40, attention_mask=mask).is_unpadded
    assert not _geometry(kv_length=40, attention_mask=mask[:, :9]).is_unpadded  # missing columns are masked
    for column in (0, 4, 9):
        hidden = mask.clone()
        hidden[1, column] = False
        assert not _geometry(kv_length=40, attention_mask=hidden).is_unpadded


@pytest.mark.parametrize(
    ("pattern", "changes", "expected"),
    [("full", {}, True), ("full", {"q_length": 9}, False), ("full", {"q_offset": 5}, False), ("causal", {}, False)],
)
def test_different_lengths_without_offset_are_two_sequences(pattern, changes, expected):
    assert _geometry(pattern, **({"q_length": 4, "kv_length": 9} | changes)).two_sequences is expected


@pytest.mark.parametrize("shape", [(3, 10), (2, 10, 10)])
def test_an_invalid_padding_mask_is_rejected(shape):
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, kv_len\] \(padding\) or 4-D, got \["):
        _geometry(attention_mask=torch.ones(shape, dtype=torch.bool))


def test_a_model_is_checked_after_loading(monkeypatch):
    """A custom model's configuration may be seen before its code is loaded."""
    config = BloomConfig()
    modeling = sys.modules[BloomForCausalLM.__module__]
    monkeypatch.delitem(sys.modules, modeling.__name__)
    assert not has_built_in_attention(config)
    monkeypatch.setitem(sys.modules, modeling.__name__, modeling)
    assert has_built_in_attention(config)


def _compact(q_length=5, kv_length=5, **changes):
    return CompactMask.of(MaskGeometry(2, q_length, kv_length, is_causal=True, **changes), "cpu")


class TestCompactMask:
    """It acts as a boolean tensor, and stays compact until its values are read."""

    def test_compact_mask_stores_one_byte(self):
        mask = _compact(q_length=1 << 20, kv_length=1 << 20)
        assert mask.shape == (2, 1, 1 << 20, 1 << 20)
        assert (mask.dtype, mask.device.type, mask.ndim, len(mask)) == (torch.bool, "cpu", 4, 2)
        assert (mask.size(2), mask.dim(), mask.requires_grad) == (1 << 20, 4, False)
        with torch._C.DisableTorchFunctionSubclass():
            assert mask.untyped_storage().nbytes() == 1
        for same in (mask.contiguous(), mask.detach(), mask[...], mask[:, :, :, : 1 << 20], mask[:], mask.to("cpu")):
            assert same is mask
        moved = _compact(kv_range=torch.zeros(2, 2)).to("meta", non_blocking=True)
        assert isinstance(moved, CompactMask)
        assert moved.device.type == moved.dma_geometry.kv_range.device.type == "meta"
        assert not isinstance(_compact().to("cpu", torch.int32), CompactMask)

    @pytest.mark.parametrize("index", [np.s_[..., -2:, :], np.s_[:, :, 1:3], np.s_[:, :, 2:, :, ...]])
    def test_the_mask_of_some_queries_is_compact(self, index):
        """Gemma 4 computes layers with shared keys for the last queries only."""
        seen = torch.rand(2, 1, 5, 7) < 0.7
        for changes in ({}, {"window": 2}, {"pattern": seen}, {"kv_range": torch.tensor([[0, 7], [2, 6]])}):
            offsets = {"q_offset": torch.tensor([2, 0]), "kv_offset": torch.tensor([0, -2])}
            mask = _compact(kv_length=7, **offsets, **changes)
            some = mask[index]
            assert isinstance(some, CompactMask)
            assert torch.equal(some.dense(), mask.dense()[index])
        assert not isinstance(_compact(documents=torch.tensor([0, 5, 7, 10]))[:, :, 2:], CompactMask)

    def test_operations_see_the_mask_values(self):
        mask, dense = _compact(), torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
        assert torch.equal(mask, dense)
        assert torch.equal(mask[:, :, 1:, :3], dense[:, :, 1:, :3])
        assert torch.equal(mask[:, :, ::2], dense[:, :, ::2])
        assert torch.equal(mask[:, :, 5:], dense[:, :, 5:])
        assert torch.equal(~mask, ~dense)
        assert torch.equal(mask & dense[:1], dense)
        assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(dense, 0.0, -1.0))
        assert torch.equal(torch.cat([mask, mask], dim=-1), torch.cat([dense, dense], dim=-1))
        assert torch.equal(mask.float(), dense.float())
        assert mask.tolist() == dense.tolist()
        assert repr(mask) == repr(dense)
        x = torch.randn(2, 1, 5, 8)
        assert torch.equal(
            F.scaled_dot_product_attention(x, x, x, mask), F.scaled_dot_product_attention(x, x, x, dense)
        )

    def test_writing_it_or_adding_it_to_scores_is_an_error(self):
        mask = _compact()
        writes = [lambda: mask.__setitem__(0, False), lambda: mask.fill_(False), lambda: mask.logical_not_()]
        writes += [lambda: mask.logical_xor_(mask.dense()), lambda: operator.iand(mask, ~mask.dense())]
        for write in writes:
            with pytest.raises(RuntimeError, match="the attention mask of dma_mxfp is read-only; change a copy"):
                write()
        assert torch.equal(mask.dense(), torch.ones(2, 1, 5, 5, dtype=torch.bool).tril())
        with pytest.raises(ValueError, match="a boolean attention mask was added to floating-point scores"):
            torch.randn(2, 1, 5, 5) + mask


def test_masks_support_meta_tensors():
    mask = dma_mask(2, 4, 4, attention_mask=torch.ones(2, 4, dtype=torch.bool, device="meta"), device="meta")
    assert mask.dense().is_meta
    assert mask.shape == (2, 1, 4, 4)


def test_models_that_add_the_mask_to_their_scores_get_an_eager_mask():
    """Gemma 4's audio tower always computes eager attention."""
    config = LlamaConfig()
    config.model_type = "gemma4_audio"
    arguments = {"attention_mask": torch.tensor([[True] * 4, [False] + [True] * 3]), "device": "cpu"}
    arguments |= {"mask_function": upstream.bidirectional_mask_function, "dtype": torch.bfloat16}
    mask = dma_mask(2, 4, 4, config=config, allow_is_bidirectional_skip=True, **arguments)
    assert mask.dtype == torch.bfloat16
    assert torch.equal(mask, upstream.eager_mask(2, 4, 4, **arguments))
