"""A model with ``DMACache`` equals the oracle: one pass without a cache over the same quantized KV.

In fp64, so that the order of summation does not change quantization codes. Without sink tiles, so that the first tile
is low when the sequence reaches its third.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from cache_oracle import expected_logits
from sampling import sampled
from transformers import DynamicCache

import dma_hf
from dma_hf import DMACache
from dma_hf import attention as adapter
from dma_hf.masks import dma_mask
from dma_hf.masks.geometry import CompactMask

LENGTH = 300
STEPS = [(0, 170), (170, 250), *((i, i + 1) for i in range(250, 259)), (259, 275), (275, LENGTH)]
PADDING = 37
TOLERANCE = 1e-6  # pv = "fp8" rounds fp32 probabilities

MODELS = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 150}),
    "gemma3": ("gemma3", {"sliding_window": 100}),  # one layer per kind
}
INT4 = {"no band": {"diagonal_tiles": 0}, "exact start": {"diagonal_tiles": 0, "exact_until": 256}, "equalized": {}}
SETTINGS = [*dma_hf.PRESETS, "balanced+int8", "balanced+int4", "paper+int4", *INT4]
IN_CI = [("mistral", "balanced+int4"), ("mistral", "no band"), ("gemma3", "balanced+int8"), ("gemma3", "paper+int4")]
STATIC = [*product(("llama", "gemma3"), ("balanced+int8", "balanced+int4")), ("llama", "equalized")]


def _model(families, name, setting, **changes):
    family, sizes = MODELS[name]
    model = families[family].build("dma_mxfp", **sizes).double()
    changes = {"sink_tiles": 0, "exact_until": 0} | changes
    model.config.dma_equalized = setting == "equalized"
    if isinstance(setting, str) and setting in INT4:
        setting, changes = "balanced+int4", changes | INT4[setting]
    if isinstance(setting, str):
        setting, _, cache = setting.partition("+")
        changes["cache"] = cache or None
    dma_hf.configure(model, setting, **changes)
    return model


def _padded(ids):
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    return mask


def _decode(model, ids, cache, steps=STEPS, mask=None):
    outputs = []
    for start, end in steps:
        arguments = {}
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:end]
            arguments = {"attention_mask": mask[:, :end], "position_ids": positions}
        outputs.append(model(ids[:, start:end], past_key_values=cache, **arguments).logits)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize(
    ("name", "setting", "max_cache_len"),
    sampled(
        ((*case, None) for case in product(MODELS, SETTINGS)), lambda *case: case[0] == "llama" or case[:2] in IN_CI
    )
    + [(*case, LENGTH + 20) for case in STATIC],
)
def test_steps_of_a_padded_batch_equal_the_oracle(name, setting, max_cache_len, families, token_ids, assert_same):
    """Prompt, chunk, single tokens across a tile boundary, 16 tokens as in speculation, and another chunk."""
    model = _model(families, name, setting)
    ids = token_ids(2, LENGTH)
    mask = _padded(ids)
    expected = expected_logits(model, ids, STEPS, mask)
    cache = DMACache(model.config, max_cache_len=max_cache_len)
    assert_same(_decode(model, ids, cache, mask=mask), expected, mask, TOLERANCE)
    assert int(cache.get_seq_length()) == LENGTH
    cache.reset()
    other = token_ids(2, 140, seed=5)
    assert_same(model(other, past_key_values=cache).logits, model(other).logits, tolerance=TOLERANCE)


def test_quantization_changes_the_logits(families, token_ids, identity):
    """Otherwise a cache that keeps everything in 16 bits would pass the other tests."""
    ids = token_ids(1, LENGTH)
    for format, least in (("int8", 1e-6), ("int4", 1e-4)):
        model = _model(families, "llama", identity)
        quantized = _decode(model, ids, DMACache(model.config, cache=format))
        error = (quantized - model(ids).logits)[:, 256:].abs().max() / quantized.abs().max()
        assert least < error < 0.1


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mimo_v2_flash", "llama4", "gpt2"])
def test_softcap_sinks_value_dims_and_chunks_equal_the_oracle(name, families, token_ids, assert_same):
    """In fp32. Llama 4 has chunks, Gemma 2 a softcap, GPT-OSS sink logits, MiMo another value dim."""
    model = families[name].build("dma_mxfp")
    dma_hf.configure(model, "balanced", cache="int4", sink_tiles=0, exact_until=0)
    ids = token_ids(1, LENGTH)
    steps = [(0, 130), (130, 290), *((i, i + 1) for i in range(290, 300))]
    expected = expected_logits(model, ids, steps)
    actual = _decode(model, ids, DMACache(model.config), steps)
    assert_same(actual, expected, tolerance=1e-2)  # ties may round to another code in fp32


def test_a_row_may_start_in_a_later_chunk(families, token_ids, assert_same):
    """Its first chunk is fully masked, so the length of its padding is still unknown, also after an earlier prompt."""
    model = _model(families, "llama", "balanced+int8")
    ids = token_ids(2, 290)
    mask = torch.ones_like(ids)
    mask[0, :150] = 0
    steps = [(0, 100), (100, 140), (140, 280), *((i, i + 1) for i in range(280, 290))]
    cache = DMACache(model.config)
    model(ids[:, :50], past_key_values=cache)
    cache.reset()
    decoded = _decode(model, ids, cache, steps, mask)
    assert cache.layers[0].storage.lengths.tolist() == [140, 290]
    assert_same(decoded, expected_logits(model, ids, steps, mask), mask, TOLERANCE)


def test_a_later_mask_may_hide_more_keys(families, token_ids, assert_same, identity):
    """Stored keys keep their positions; with a band this wide only the mask changes the result."""
    model = _model(families, "llama", identity, diagonal_tiles=3)
    ids = token_ids(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, :50] = 0
    mask[1, 200:230] = 0
    outputs = []
    for cache in (DMACache(model.config), DynamicCache(config=model.config)):
        model(ids[:, :200], past_key_values=cache)
        steps = [(200, 201), (201, LENGTH)]
        outputs.append([model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits for a, b in steps])
    for actual, expected in zip(*outputs, strict=True):
        assert_same(actual, expected, tolerance=1e-9)


def test_a_layer_may_hide_more_keys_than_the_others_of_a_step(families, token_ids, assert_same, identity):
    """Layers share the check of the padding, and each has its own pattern."""
    model = _model(families, "llama", identity, diagonal_tiles=3)
    ids, mask = token_ids(2, 200), torch.ones(2, 200, dtype=torch.int64)
    mask[0, :50] = 0

    def hide(module, args, kwargs):
        """Hide the keys 60 to 79 from the second layer."""
        seen = kwargs["attention_mask"]
        pattern = torch.ones(1, 1, 1, seen.shape[3], dtype=torch.bool)
        pattern[..., 60:80] = False
        geometry = getattr(seen, "dma_geometry", None)
        hidden = seen & pattern if geometry is None else CompactMask.of(replace(geometry, pattern=pattern), seen.device)
        return args, kwargs | {"attention_mask": hidden}

    model.model.layers[1].self_attn.register_forward_pre_hook(hide, with_kwargs=True)
    steps, outputs = [(0, 190), *((i, i + 1) for i in range(190, 200))], []
    for attention in ("dma_mxfp", "sdpa"):
        model.set_attn_implementation(attention)
        cache = DMACache(model.config) if attention == "dma_mxfp" else DynamicCache(config=model.config)
        outputs.append(_decode(model, ids, cache, steps, mask))
    assert_same(*outputs, mask, tolerance=1e-9)


@pytest.mark.parametrize(
    ("first", "shown", "hidden"),
    [(120, 20, 0), (120, 50, 0), (120, 50, 3), (40, 50, 0)],
    ids=["in part", "all", "and hides others", "all of a row so far"],
)
@pytest.mark.parametrize("max_cache_len", [None, LENGTH], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_later_mask_that_shows_padding_is_refused(name, max_cache_len, first, shown, hidden, families, token_ids):
    """Padding is not stored, so it cannot be attended to later. All of it is still in the window."""
    model = _model(families, name, "balanced+int8")
    ids, mask = token_ids(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :50] = 0
    cache = DMACache(model.config, max_cache_len=max_cache_len)
    model(ids[:, :first], attention_mask=mask[:, :first], past_key_values=cache)
    mask[0, 50 - shown :] = 1
    mask[1, 100 : 100 + hidden] = 0
    with pytest.raises(ValueError, match="attention_mask shows padding that it hid before, which the cache does not"):
        model(ids[:, first : first + 1], attention_mask=mask[:, : first + 1], past_key_values=cache)


@pytest.mark.parametrize("select", [torch.tensor, tuple, list])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_can_be_repeated_reordered_and_selected(name, select, families, token_ids, assert_same):
    """With all of their stored state, padding included. Transformers' caches take any sequence of rows, too."""
    model = _model(families, name, "balanced+int4")
    ids = token_ids(2, 290)
    mask = _padded(ids)
    steps = [(0, 258), (258, 259), (259, 290)]
    cache = DMACache(model.config)
    _decode(model, ids, cache, steps[:1], mask)
    cache.batch_repeat_interleave(2)  # 0 0 1 1
    cache.reorder_cache(torch.tensor([2, 0, 3, 1]))  # 1 0 1 0
    cache.batch_select_indices(select([0, 1, 3]))  # 1 0 0
    rows = torch.tensor([1, 0, 0])
    assert cache.batch_size == 3
    decoded = _decode(model, ids[rows], cache, steps[1:], mask[rows])
    assert_same(decoded, expected_logits(model, ids, steps, mask)[rows, 258:], tolerance=TOLERANCE)


@pytest.mark.parametrize("hidden", [0, 5])
def test_a_compiled_step_whose_mask_has_changed_is_an_error(hidden, families, token_ids):
    """The mask comes from outside, as from ``generate``, and the graph cannot branch."""
    model = _model(families, "llama", "balanced+int8").float()
    ids = token_ids(2, 21)
    cache = DMACache(model.config, max_cache_len=64)
    model(ids[:, :20], past_key_values=cache)
    seen = torch.ones_like(ids)
    seen[1, :hidden] = 0
    mask = dma_mask(2, 1, 64, q_offset=torch.tensor(20), attention_mask=seen)
    torch._dynamo.reset()
    graphs = []
    step = torch.compile(model.forward, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    error = pytest.raises(RuntimeError, match="attention_mask hides keys that were visible")
    with error if hidden else nullcontext():
        step(ids[:, 20:], attention_mask=mask, past_key_values=cache)
    assert graphs[0].code.count("torch._assert_async(") == 2  # capacity and mask, in one of the layers
    torch._dynamo.reset()


@pytest.mark.parametrize("cache", [None, "int8"])
def test_layers_that_repeat_a_call_attend_with_their_own_sink_logits(cache, families, token_ids, monkeypatch):
    kinds = ["sliding_attention", "full_attention"] * 2
    model = families["gpt_oss"].build("dma_mxfp", num_hidden_layers=len(kinds), layer_types=kinds)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    settings = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    dma_hf.configure(model, cache=cache)
    ids, repeat, repeated = token_ids(1, 150), adapter.repeat, []

    def spy(*arguments):
        out = repeat(*arguments)
        repeated.append(out is not None)
        return out

    monkeypatch.setattr(adapter, "repeat", spy)
    actual = model.generate(ids, **settings)
    assert any(repeated)
    monkeypatch.setattr(adapter, "is_repeatable", lambda mask: False)
    expected = model.generate(ids, **settings)
    assert all(map(torch.equal, actual.logits, expected.logits))
