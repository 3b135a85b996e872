"""The attention function: its results in corner cases, and the calls that it rejects."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask
from transformers import BartConfig, BertConfig, GPT2Config, LlamaConfig
from transformers.masking_utils import bidirectional_mask_function
from transformers.models.bart.modeling_bart import BartAttention
from transformers.models.bert.modeling_bert import BertCrossAttention, BertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

import dma_hf
from dma_hf import attention as adapter
from dma_hf.attention import dma_attention_forward
from dma_hf.config import config_of
from dma_hf.masks import dma_mask

TOKENS = 9


class _Layer(nn.Module):
    """The attributes of an attention layer that the function reads."""

    def __init__(self, config=None, **attributes):
        super().__init__()
        self.config = LlamaConfig()
        self.config.dma_mxfp = config if config is None else config_of(config).to_section()
        self.is_causal = True
        self.num_key_value_groups = 2
        for name, value in attributes.items():
            setattr(self, name, value)
        self.eval()


@pytest.fixture
def layer(identity):
    return _Layer(identity)


def _states(q_len=TOKENS, kv_len=TOKENS, batch=2, head_dim=16, value_dim=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, 4, q_len, head_dim), (batch, 2, kv_len, head_dim), (batch, 2, kv_len, value_dim))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def _expected(query, key, value, **arguments):
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **arguments).transpose(1, 2)


def _same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


DISTANCE = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
FULL = {"mask_function": bidirectional_mask_function, "allow_is_causal_skip": False}
EVERYTHING = {"mask_function": lambda b, h, q, k: (k >= 0) & (q >= 0), "allow_is_causal_skip": False}
HARMLESS = {"position_ids": torch.arange(TOKENS), "use_cache": True, "output_attentions": False, "new_argument": None}

SEEN = {
    "is_causal overrides the layer": ({}, None, {"is_causal": False}, {}),
    "fewer queries are the last positions": ({"q_len": 3}, None, {}, {"attn_mask": (DISTANCE >= 0)[-3:]}),
    "a causal window": ({}, None, {"sliding_window": 3}, {"attn_mask": (DISTANCE >= 0) & (DISTANCE < 3)}),
    "a window without its end, as in FlashAttention": (
        {}, None, {"sliding_window": 3, "is_causal": False}, {"attn_mask": DISTANCE.abs() <= 2}
    ),
    "a mask overrides both": (
        {}, dma_mask(2, TOKENS, TOKENS, **EVERYTHING), {"is_causal": True, "sliding_window": 2}, {}
    ),
    "a mask of all keys, to which an encoder added one": ({}, dma_mask(2, TOKENS - 1, TOKENS - 1, **FULL), {}, {}),
    "values with another head_dim": ({"value_dim": 40}, None, {}, {"is_causal": True}),
    "a softcap of zero means none": ({}, None, {"softcap": 0.0}, {"is_causal": True}),
    "arguments that change nothing": ({}, None, HARMLESS, {"is_causal": True}),
}  # fmt: skip
"""Sizes of the states, mask and arguments of a call, and what SDPA gets instead."""


class TestResult:
    """The output of valid calls."""

    @pytest.mark.parametrize("case", SEEN)
    def test_a_call_equals_sdpa(self, case, layer):
        sizes, mask, arguments, expected = SEEN[case]
        _same(
            dma_attention_forward(layer, *_states(**sizes), mask, **arguments)[0],
            _expected(*_states(**sizes), **expected),
        )

    def test_queries_broadcast_over_the_batch(self, layer):
        """As the learned queries of a resampler do."""
        query, key, value = _states(q_len=3)
        out, _ = dma_attention_forward(layer, query[:1], key, value, None, is_causal=False)
        _same(out, _expected(query[:1].expand(2, -1, -1, -1), key, value))

    def test_output_is_causal_attention_in_the_models_layout(self, layer):
        out, weights = dma_attention_forward(layer, *_states(), None)
        assert weights is None
        assert out.shape == (2, TOKENS, 4, 16)
        assert out.is_contiguous()
        _same(out, _expected(*_states(), is_causal=True))

    def test_scaling_softcap_and_sinks_are_applied(self, layer):
        query, key, value = _states()
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
        out, _ = dma_attention_forward(layer, query, key, value, None, scaling=0.3, softcap=2.0, s_aux=sinks)
        scores = 2.0 * torch.tanh(query @ key.repeat_interleave(2, 1).mT * 0.3 / 2.0)
        scores = scores.masked_fill(~torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(), -torch.inf)
        scores = torch.cat((scores, sinks.view(1, 4, 1, 1).expand(2, 4, TOKENS, 1)), dim=-1)
        expected = scores.softmax(-1)[..., :-1] @ value.repeat_interleave(2, 1)
        _same(out, expected.transpose(1, 2))

    def test_fully_masked_rows_are_zero(self, layer):
        hidden = torch.ones(2, TOKENS, dtype=torch.bool)
        hidden[0] = False
        out, _ = dma_attention_forward(layer, *_states(), dma_mask(2, TOKENS, TOKENS, attention_mask=hidden))
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        _same(out[1], _expected(*_states(), is_causal=True)[1])
        dense = torch.zeros(2, 1, TOKENS, TOKENS)
        dense[0] = torch.finfo(torch.float32).min
        assert torch.equal(dma_attention_forward(layer, *_states(), dense)[0][0], torch.zeros_like(out[0]))

    @pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (0, 0), (3, 0)])
    def test_empty_inputs_have_zero_outputs(self, layer, q_len, kv_len):
        mask = dma_mask(2, q_len, kv_len, attention_mask=torch.ones(2, kv_len, dtype=torch.bool))
        for each in (mask, None):
            out, _ = dma_attention_forward(layer, *_states(q_len, kv_len), each)
            assert torch.equal(out, torch.zeros(2, q_len, 4, 16))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
    def test_the_output_has_the_dtype_of_the_inputs(self, layer, dtype):
        out, _ = dma_attention_forward(layer, *_states(dtype=dtype), None)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), _expected(*_states(), is_causal=True), rtol=0.03, atol=0.03)

    def test_meta_tensors_give_meta_outputs(self, layer):
        out, _ = dma_attention_forward(layer, *(tensor.to("meta") for tensor in _states()), None)
        assert out.is_meta
        assert out.shape == (2, TOKENS, 4, 16)

    @pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -torch.inf, -1e4])
    def test_additive_masks_equal_boolean_ones(self, layer, low):
        mask = torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool).tril(-2)
        mask[..., 0] = True
        out, _ = dma_attention_forward(layer, *_states(), torch.zeros(mask.shape).masked_fill(~mask, low))
        _same(out, _expected(*_states(), attn_mask=mask))


@pytest.fixture
def recipes(monkeypatch):
    """The recipes of calls to attention, which is replaced by a recorder."""
    asked = []

    def record(query, key, value, recipe, **arguments):
        asked.append(SimpleNamespace(recipe=recipe, **arguments))
        return query.new_zeros(*query.shape[:3], value.shape[-1])

    monkeypatch.setattr(adapter, "attention", record)
    return asked


def _bart(**flags):
    return BartAttention(64, 4, config=BartConfig(d_model=64), layer_idx=0, **flags).eval()


BERT = BertConfig(hidden_size=64, num_attention_heads=4)
GPT2 = GPT2Config(n_embd=64, n_head=4)

CROSS = {
    "bart": lambda: _bart(is_decoder=True),
    "bert": lambda: BertCrossAttention(BERT),
    "gpt2": lambda: GPT2Attention(GPT2, is_cross_attention=True, layer_idx=0),
}
SELF = {
    "bart encoder": lambda: _bart(),
    "bart decoder": lambda: _bart(is_decoder=True, is_causal=True),
    "bert": lambda: BertSelfAttention(BERT),
    "gpt2": lambda: GPT2Attention(GPT2, layer_idx=0),
    "llama": lambda: _Layer(),
}


class TestCrossAttention:
    """Two sequences share no positions, even at equal length, so every key is high."""

    @pytest.mark.parametrize("mask", ["none", "full", "padded", "4-D"])
    @pytest.mark.parametrize("kv_len", [TOKENS, TOKENS + 4])
    @pytest.mark.parametrize("name", CROSS)
    def test_cross_attention_is_recognized(self, name, kv_len, mask, recipes):
        hidden = torch.ones(2, kv_len, dtype=torch.bool)
        hidden[0, -2:] = False
        masks = {
            "none": None,
            "full": dma_mask(2, TOKENS, kv_len, **FULL),
            "padded": dma_mask(2, TOKENS, kv_len, attention_mask=hidden, **FULL),
            "4-D": hidden[:, None, None],
        }
        dma_attention_forward(CROSS[name]().eval(), *_states(kv_len=kv_len), masks[mask])
        call = recipes[-1]
        assert not call.is_causal
        assert call.recipe.diagonal_tiles * 128 > 1 << 24

    @pytest.mark.parametrize("name", SELF)
    def test_self_attention_is_not_mistaken_for_cross_attention(self, name, recipes):
        for mask in (None, torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool).tril(), dma_mask(2, TOKENS, TOKENS)):
            dma_attention_forward(SELF[name]().eval(), *_states(), mask)
            assert recipes[-1].recipe.diagonal_tiles == 1

    def test_non_causal_inputs_of_different_lengths_are_two_sequences(self, recipes):
        dma_attention_forward(_Layer(is_causal=False), *_states(kv_len=20), None)
        assert recipes[-1].recipe.diagonal_tiles > 1
        dma_attention_forward(_Layer(is_causal=True), *_states(kv_len=20), None)
        assert recipes[-1].recipe.diagonal_tiles == 1
        assert recipes[-1].q_offset == 20 - TOKENS

    def test_causal_queries_with_a_user_mask_are_the_last_positions(self, recipes):
        mask = torch.ones(2, 1, 3, 20, dtype=torch.bool)
        dma_attention_forward(_Layer(is_causal=True), *_states(3, 20), mask)
        assert (recipes[-1].q_offset, recipes[-1].is_causal) == (17, False)
        dma_attention_forward(_Layer(is_causal=False), *_states(3, 20), mask)
        assert recipes[-1].q_offset == 0


class TestIndices:
    """``indices``: the keys that a sparse attention indexer selected for each query."""

    @pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
    def test_unselected_keys_are_masked(self, layer, is_padded):
        indices = torch.rand(2, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)).argsort(-1)[..., :5].int()
        chosen = torch.zeros(2, TOKENS, TOKENS, dtype=torch.bool).scatter(-1, indices.long(), True)
        padding = torch.ones(2, TOKENS, dtype=torch.bool)
        if is_padded:
            padding[0, :3] = False
        mask = dma_mask(2, TOKENS, TOKENS, attention_mask=padding if is_padded else None)
        seen = chosen & padding[:, None] & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        out, _ = dma_attention_forward(layer, *_states(), mask, indices=indices)
        expected = _expected(*_states(), attn_mask=seen[:, None])
        some = seen.any(-1)
        _same(out[some], expected[some])
        assert not out[~some].any()

    def test_the_shape_of_indices_is_checked(self, layer):
        with pytest.raises(ValueError, match=r"indices must be \[2, 9, k\], got \[2, 3\]"):
            dma_attention_forward(layer, *_states(), None, indices=torch.zeros(2, 3, dtype=torch.int32))


class TestQuirks:
    """Special cases of single models."""

    def test_a_non_causal_mask_of_one_query_applies_to_all(self, identity):
        """BridgeTower passes a mask of one query for all queries."""
        padding = torch.ones(2, TOKENS, dtype=torch.bool)
        padding[0, -3:] = False
        mask = dma_mask(2, 1, TOKENS, attention_mask=padding, mask_function=bidirectional_mask_function)
        out, _ = dma_attention_forward(_Layer(identity, is_causal=False), *_states(), mask)
        _same(out, _expected(*_states(), attn_mask=padding[:, None, None].expand(-1, 1, TOKENS, -1)))

    def test_a_layer_that_is_wrongly_marked_causal_is_bidirectional(self, identity):
        class BridgeTowerSelfAttention(_Layer):
            pass

        out, _ = dma_attention_forward(BridgeTowerSelfAttention(identity), *_states(), None)
        _same(out, _expected(*_states()))


ERRORS = {
    "dropout": (
        {"dropout": 0.1},
        r"dropout: got dropout=0\.1, .* allow SDPA for such calls with on_unsupported='sdpa'",
    ),
    "position_bias": (
        {"position_bias": torch.zeros(1, 4, TOKENS, TOKENS)},
        r"position_bias: the model passed one of shape \[1, 4, 9, 9\]",
    ),
    "head_mask": ({"head_mask": torch.ones(4)}, r"the argument 'head_mask': got head_mask=Tensor\[4\]"),
    "unknown": ({"temperature": 0.5}, "the argument 'temperature': got temperature=0.5, which may change the result"),
    "cache": ({"cache": object()}, "the argument 'cache': got cache=<object object"),
    "packing": (
        {"cu_seq_lens_q": torch.tensor([0, 4, 9])},
        "cu_seq_lens_q: it lacks the end of a row, of which there are 2 with 9 tokens",
    ),
}
LATER_QUERY = dma_mask(2, 1, TOKENS, q_offset=TOKENS - 1)
BLOCK_MASK = create_block_mask(lambda b, h, q, k: q >= k, 2, None, TOKENS, TOKENS, device="cpu")
MASKS = {
    "two axes": (torch.ones(2, TOKENS), ValueError, r"broadcastable to \[2, 4, 9, 9\], got \[2, 9\]"),
    "too few keys": (torch.ones(2, 1, TOKENS, 8), ValueError, r"broadcastable to .*, got \[2, 1, 9, 8\]"),
    "integers": (torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.int64), TypeError, "boolean or floating"),
    "other keys": (dma_mask(2, TOKENS, TOKENS + 1), ValueError, "broadcastable to .*: the model made it for other"),
    "other rows": (dma_mask(3, TOKENS, TOKENS), ValueError, r"broadcastable to \[2, 4, 9, 9\], got \[3, 1, 9, 9\]"),
    "one causal query": (LATER_QUERY, ValueError, "broadcastable to .*: the model made it for other"),
    "of flex_attention": (BLOCK_MASK, TypeError, "a tensor, got BlockMask"),
}


class TestRejected:
    """A requested backend runs or raises an error."""

    @pytest.mark.parametrize("name", ERRORS)
    def test_unsupported_options_are_rejected(self, name, layer):
        arguments, message = ERRORS[name]
        with pytest.raises(ValueError, match="dma_mxfp attention does not support " + message):
            dma_attention_forward(layer, *_states(), None, **arguments)

    @pytest.mark.parametrize(("sizes", "name"), [({"head_dim": 260}, "query"), ({"value_dim": 260}, "value")])
    def test_head_dims_above_256_are_rejected(self, layer, sizes, name):
        with pytest.raises(ValueError, match=f"this head_dim: {name} has 260, expected 1 to 256"):
            dma_attention_forward(layer, *_states(**sizes), None)

    @pytest.mark.parametrize("case", MASKS)
    def test_invalid_masks_are_rejected(self, layer, case):
        mask, error, message = MASKS[case]
        with pytest.raises(error, match="attention_mask must be " + message):
            dma_attention_forward(layer, *_states(), mask)

    def test_attention_weights_are_not_returned(self, layer):
        with pytest.warns(UserWarning, match="no attention weights for output_attentions=True"):
            assert dma_attention_forward(layer, *_states(), None, output_attentions=True)[1] is None

    def test_an_additive_bias_and_mixed_dtypes_are_rejected(self, layer):
        query, key, value = _states()
        with pytest.raises(ValueError, match=r"an additive bias as attention_mask: torch.float32 \[2, 1, 9, 9\]"):
            dma_attention_forward(layer, query, key, value, torch.randn(2, 1, TOKENS, TOKENS))
        with pytest.raises(TypeError, match=r"value must have the dtype of query, torch\.float32, got torch\.bfloat16"):
            dma_attention_forward(layer, query, key, value.bfloat16(), None)

    def test_a_mask_that_is_trained_is_rejected(self, layer):
        """It is a bias, also while all of its values are 0."""
        mask = torch.zeros(2, 1, TOKENS, TOKENS, requires_grad=True)
        with torch.enable_grad(), pytest.raises(ValueError, match=r"an additive bias .* requires a gradient"):
            dma_attention_forward(layer, *_states(), mask)
        dma_attention_forward(layer, *_states(), mask)  # not trained here


class TestFallback:
    """``on_unsupported="sdpa"`` is an explicit choice, visible and counted."""

    @pytest.fixture
    def layer(self):
        return _Layer({"on_unsupported": "sdpa"})

    def test_fallback_computes_with_sdpa(self, layer):
        bias = torch.randn(1, 4, TOKENS, TOKENS)
        hidden = torch.ones(2, TOKENS, dtype=torch.bool)
        hidden[0, :3] = False
        causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        query, key, value = _states(head_dim=260)
        mask = dma_mask(2, TOKENS, TOKENS, attention_mask=hidden)
        with warnings.catch_warnings(record=True):
            biased, _ = dma_attention_forward(layer, *_states(), None, position_bias=bias)
            padded, _ = dma_attention_forward(layer, query, key, value, mask)
            additive, _ = dma_attention_forward(layer, *_states(), bias)
            late, _ = dma_attention_forward(layer, *_states(3), None, position_bias=bias[:, :, -3:])
        addend = bias.masked_fill(~causal, -torch.inf)
        _same(biased, _expected(*_states(), attn_mask=addend))
        _same(padded, _expected(query, key, value, attn_mask=hidden[:, None, None] & causal))
        _same(additive, _expected(*_states(), attn_mask=bias))
        _same(late, _expected(*_states(3), attn_mask=addend[:, :, -3:]))

    def test_a_mask_that_is_trained_gets_its_gradient(self, layer):
        mask = torch.zeros(2, 1, TOKENS, TOKENS, requires_grad=True)
        with torch.enable_grad(), pytest.warns(UserWarning, match="an additive bias"):
            dma_attention_forward(layer, *_states(), mask)[0].square().sum().backward()
        assert mask.grad.any()

    def test_fallback_warns_once_and_is_counted(self, layer):
        bias = torch.zeros(1, 4, TOKENS, TOKENS)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                dma_attention_forward(layer, *_states(), None, position_bias=bias)
            dma_attention_forward(layer, *_states(), None, dropout=0.5)
            dma_attention_forward(layer, *_states(), None)
        first, second = (str(warning.message) for warning in caught)
        assert "does not support position_bias" in first
        assert "dma_hf.stats(model).fallbacks counts them" in first
        assert "does not support dropout (got dropout=0.5, expected 0)" in second
        assert dma_hf.stats(layer).fallbacks == {"position_bias": 3, "dropout": 1}
        assert str(dma_hf.stats(layer)).endswith("3 x SDPA instead: position_bias\n  1 x SDPA instead: dropout")
        dma_hf.reset_stats(layer)
        assert dma_hf.stats(layer).fallbacks == {}
        with pytest.warns(UserWarning, match="does not support position_bias"):
            dma_attention_forward(layer, *_states(), None, position_bias=bias)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [ERRORS[name] for name in ("head_mask", "unknown", "cache", "packing")]
        + [({"dropout": 0.5, **option}, "dropout") for option in ({"softcap": 2.0}, {"s_aux": torch.zeros(4)})],
    )
    def test_what_sdpa_ignores_or_lacks_is_still_an_error(self, arguments, message, layer):
        with pytest.raises(ValueError, match="does not support " + message):
            dma_attention_forward(layer, *_states(), None, **arguments)
        assert dma_hf.stats(layer).fallbacks == {}

    def test_fallback_with_a_bias_masks_unselected_keys(self, layer):
        """The bias requires SDPA, which must not attend to keys that the indexer did not select."""
        bias = torch.randn(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1))
        indices = torch.arange(4).expand(2, TOKENS, 4)
        with pytest.warns(UserWarning, match="an additive bias"):
            out, _ = dma_attention_forward(layer, *_states(), bias, indices=indices)
        bias[..., 4:] = torch.finfo(torch.float32).min
        _same(out, _expected(*_states(), attn_mask=bias))


CASES = {
    "the same call": ({}, {}),
    "scale": ({}, {"scaling": 0.3}),
    "softcap": ({}, {"softcap": 2.0}),
    "window": ({}, {"sliding_window": 3}),
    "sink logits": ({}, {"s_aux": torch.tensor([3.0, -1.0, 0.0, 2.0])}),
    "no sink logits": ({}, {"s_aux": None}),
    "a harmless argument": ({}, {"use_cache": True}),
    "values with fewer channels": ({"value_dim": 8}, {}),
    "heads with more channels": ({"head_dim": 32}, {}),
    "another dtype": ({"dtype": torch.float64}, {}),
}
"""Changes of the states and of the arguments of a second layer's call."""


class TestRepeatedCalls:
    """A layer repeats the call of the first layer with the same mask, unless its own call differs."""

    @pytest.mark.parametrize("case", CASES)
    def test_a_call_is_repeated_unless_it_differs(self, case, layer):
        """With another mask no call can be repeated. The configuration is the identity."""
        others, changes = CASES[case]
        base = {"scaling": 0.25, "softcap": 5.0, "s_aux": torch.tensor([1.0, 2.0, -2.0, 0.5])}
        second = _Layer({}, layer_idx=1)
        second.config = layer.config
        shared = dma_mask(2, TOKENS, TOKENS)
        dma_attention_forward(layer, *_states(), shared, **base)
        expected = dma_attention_forward(second, *_states(**others), dma_mask(2, TOKENS, TOKENS), **base | changes)[0]
        _same(dma_attention_forward(second, *_states(**others), shared, **base | changes)[0], expected)

    @pytest.mark.parametrize("has_own", [False, True], ids=["same configuration", "another configuration"])
    def test_a_layer_of_another_model_repeats_nothing(self, has_own, layer, monkeypatch):
        prepared, mask, second = [], dma_mask(2, TOKENS, TOKENS), _Layer({}, layer_idx=1)
        if not has_own:
            second.config = layer.config
        dma_attention_forward(layer, *_states(), mask)
        monkeypatch.setattr(adapter, "prompt", lambda *given, **options: prepared.append(given))
        dma_attention_forward(second, *_states(), mask)
        assert len(prepared) == has_own

    def test_a_call_that_would_be_refused_is_refused(self, layer):
        mask, second = dma_mask(2, TOKENS, TOKENS), _Layer({}, layer_idx=1)
        second.config = layer.config
        dma_attention_forward(layer, *_states(), mask)
        with pytest.raises(ValueError, match="position_bias"):
            dma_attention_forward(second, *_states(), mask, position_bias=torch.zeros(1))
        with pytest.raises(ValueError, match="attention_mask"):
            dma_attention_forward(second, *_states(kv_len=TOKENS + 1), mask)
        dma_attention_forward(layer, *_states(), mask, s_aux=torch.zeros(4))
        with pytest.raises(ValueError, match="sinks"):
            dma_attention_forward(second, *_states(), mask, s_aux=torch.zeros(3))

    def test_the_first_layer_begins_anew_with_other_settings(self, layer):
        states, mask = _states(q_len=300, kv_len=300), dma_mask(2, 300, 300)
        exact = dma_attention_forward(layer, *states, mask)[0]
        layer.config.dma_mxfp = config_of("paper").to_section()
        other = dma_attention_forward(layer, *states, mask)[0]
        assert not torch.allclose(other, exact)
        _same(other, dma_attention_forward(layer, *states, dma_mask(2, 300, 300))[0])
