"""``DMACache`` honors the contract of Transformers' caches and rejects invalid calls."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from dma_kernels.cache.storage import LayerStorage
from transformers import DynamicCache, LlamaConfig

import dma_hf
from dma_hf import DMACache
from dma_hf import attention as adapter
from dma_hf.cache_layers import DMAStaticLayer
from dma_hf.cached_states import CachedStates
from dma_hf.masks.geometry import MaskGeometry

WINDOW = 100
LENGTH = 290


@pytest.fixture
def build(families):
    def make(name="llama", implementation="dma_mxfp", cache="int4", **changes):
        window = {"sliding_window": WINDOW} if name in ("mistral", "gemma3") else {}
        model = families[name].build(implementation, **window)
        if implementation == "dma_mxfp":
            dma_hf.configure(model, "balanced", cache=cache, **({"sink_tiles": 0, "exact_until": 0} | changes))
        return model

    return make


def _state(cache):
    """Return copies of all tensors and counts of a cache, after a prompt that it stores later."""
    for layer in cache.layers:
        layer.flush()
    layers = [(layer.tokens, layer.storage) for layer in cache.layers]
    return [(int(tokens), {n: t.clone() for n, t in storage.tensors().items()}) for tokens, storage in layers]


def _assert_unchanged(cache, before):
    for (tokens, tensors), (tokens_before, tensors_before) in zip(_state(cache), before, strict=True):
        assert tokens == tokens_before
        for name, tensor in tensors.items():
            assert torch.equal(tensor, tensors_before[name]), name


def _new(batch=1, heads=2, length=5, dim=16, dtype=torch.float32):
    return torch.ones(batch, heads, length, dim, dtype=dtype)


def test_layers_follow_changes_of_the_configuration(build):
    config = copy.deepcopy(build("gemma3").config)
    before = [layer.window for layer in DMACache(config).layers]
    assert before == [layer.window for layer in DMACache(config).layers]
    config.sliding_window += 1
    assert [layer.window for layer in DMACache(config).layers] == [window and window + 1 for window in before]
    config.layer_types[:] = ["full_attention"] * len(before)
    first, second = DMACache(config), DMACache(config)
    assert not any(layer.window for layer in first.layers)
    assert not {id(layer) for layer in first.layers} & {id(layer) for layer in second.layers}


@pytest.mark.parametrize("name", ["keys", "values"])
def test_states_of_a_layer_cannot_be_replaced(name, build, token_ids):
    """Libraries that compress a cache assign to them."""
    model = build()
    cache = DMACache(model.config)
    model(token_ids(1, LENGTH), past_key_values=cache)
    before, states = _state(cache), getattr(cache.layers[0], name)
    with pytest.raises(AttributeError, match=r"stores packed keys and values, .*; set cache=None for Transformers'"):
        setattr(cache.layers[0], name, states[:, :, 9:])
    _assert_unchanged(cache, before)


class TestBookkeeping:
    def test_mask_sizes_equal_those_of_a_dynamic_cache(self, build, token_ids):
        """Masks are created from them before the layers see the tokens."""
        model = build("gemma3")
        ids = token_ids(2, LENGTH)
        caches = DMACache(model.config), DynamicCache(config=model.config)
        assert len(caches[0]) == len(caches[1])
        assert caches[0].is_sliding == caches[1].is_sliding
        for start, end in [(0, 0), (0, 80), (80, 120), (120, 121), (121, LENGTH)]:
            for cache in caches if end else ():
                model(ids[:, start:end], past_key_values=cache)
            for index in range(len(caches[1])):
                ours, theirs = caches
                assert ours.get_seq_length(index) == theirs.get_seq_length(index) == end
                assert ours.get_max_length(index) == theirs.get_max_length(index)
                for queries in (1, 7):
                    assert ours.get_mask_sizes(queries, index) == theirs.get_mask_sizes(queries, index)
            assert caches[0].is_croppable
            assert not caches[0].is_compileable

    def test_mask_sizes_of_a_static_cache_are_fixed(self, build, token_ids):
        model = build("gemma3")
        cache = DMACache(model.config, max_cache_len=200)
        assert cache.is_compileable
        assert [type(layer) for layer in cache.layers] == [DMAStaticLayer] * 2
        model(token_ids(1, 150), past_key_values=cache)
        assert (int(cache.get_seq_length()), cache.get_max_length()) == (150, 200)
        assert cache.get_mask_sizes(1, 0) == cache.get_mask_sizes(9, 1) == (200, 0)

    def test_a_new_cache_takes_any_prompt(self, build, token_ids):
        """Also one that was initialized early, or was reset after a prompt of another batch size."""
        model = build()
        ids, cache = token_ids(3, LENGTH), DMACache(model.config)
        assert (cache.is_initialized, cache.batch_size) == (False, -1)
        cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
        assert (cache.is_initialized, cache.batch_size, cache.get_seq_length()) == (True, 2, 0)
        for rows in (2, 3):
            logits = model(ids[:rows], past_key_values=cache).logits
            torch.testing.assert_close(logits, model(ids[:rows]).logits)
            cache.reset()
            assert cache.get_seq_length() == 0

    def test_a_cache_dropped_within_a_step_is_freed_at_once(self, build):
        cache = DMACache(build().config)
        states = cache.update(*[torch.randn(1, 2, 200, 16)] * 2, 0)
        storage = weakref.ref(cache.layers[0].storage)
        gc.disable()
        try:
            del cache
            assert storage() is not None  # the states remain readable
            del states
            assert storage() is None
        finally:
            gc.enable()

    def test_a_window_bounds_memory(self, build, token_ids):
        model = build("mistral")
        cache = DMACache(model.config)
        sizes = []
        for _ in range(4):
            model(token_ids(1, 400), past_key_values=cache)
            sizes.append(cache.nbytes)
        assert sizes[1] == sizes[2] == sizes[3]
        assert cache.layers[0].storage.max_pages == 4

    @pytest.mark.parametrize("tokens", [1024, 1025])
    def test_only_a_short_prompt_is_stored_after_its_forward_pass(self, tokens, build, token_ids):
        """Its first token waits less. The 16-bit keys of a long prompt are freed layer by layer."""
        model = build()
        cache = DMACache(model.config)
        model(token_ids(2, tokens), past_key_values=cache)
        stored = 0 if tokens == 1024 else tokens
        assert [layer.storage.lengths.tolist() for layer in cache.layers] == [[stored] * 2] * 2
        size = cache.nbytes
        cache.state_dict()  # has all tokens
        assert size == cache.nbytes

    @pytest.mark.parametrize(("format", "tokens"), [("int8", 1100), ("int4", 750)])
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_memory_is_saved_from_the_documented_length_on(self, format, tokens, head_dim):
        """See README and docs/guides/cache.md. For shorter prompts, four tiles of 16-bit KV cost more."""
        sizes = {"hidden_size": 2 * head_dim, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
        config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=head_dim)

        def share(length):
            cache = DMACache(config, cache=format)
            states = torch.zeros(1, 1, length, head_dim, dtype=torch.bfloat16)
            cache.update(states, states.clone(), 0)
            return cache.nbytes / (2 * states.nbytes)

        assert share(tokens) < 1 < share(tokens - 128)

    def test_an_offloaded_layer_can_be_prefetched(self, build, token_ids, monkeypatch):
        """Offloading waits for the attention; here both devices are the CPU."""
        model = build()
        cache = DMACache(model.config)
        ids = token_ids(1, 20)
        moved = []
        original = LayerStorage.mapped
        monkeypatch.setattr(LayerStorage, "mapped", lambda self, f: moved.append(self) or original(self, f))
        layer = cache.layers[0]
        keys, _ = layer.update(_new(), _new())
        layer.offload()
        assert not moved
        assert torch.equal(keys.sum(), _new().sum())  # reading them stores them
        assert len(moved) >= 1
        layer.prefetch()
        cache.reset()
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids).logits)


class TestPackedStates:
    """The states that ``update`` returns to a layer with ``dma_mxfp``."""

    @pytest.fixture
    def states(self, build):
        layer = DMACache(build().config).layers[0]
        generator = torch.Generator().manual_seed(0)
        raw = torch.randn(2, 1, 2, 400, 16, generator=generator).unbind()
        return layer, raw, layer.update(*raw)

    def test_packed_states_are_computed_on_access(self, states):
        layer, (key, _), (keys, values) = states
        assert isinstance(keys, CachedStates)
        assert keys.shape == key.shape
        assert (keys.dtype, keys.device) == (key.dtype, key.device)
        with torch._C.DisableTorchFunctionSubclass():
            assert keys.untyped_storage().nbytes() == 4
        assert keys.contiguous() is keys
        assert values.to("cpu") is values
        assert layer.get_seq_length() == 400
        assert layer.storage.lengths.tolist() == [0]
        layer.update(key[:, :, :3], key[:, :, :3])  # stores states that nothing has read
        assert layer.storage.lengths.tolist() == [400]
        layer.flush()
        assert layer.get_seq_length() == layer.storage.lengths.item() == 403

    def test_packed_states_are_ordinary_tensors_to_other_code(self, states):
        layer, (key, value), (keys, values) = states
        assert torch.equal(keys + 0, key)  # new states are returned unchanged
        assert torch.equal(values[:, :1], value[:, :1])
        assert torch.equal(torch.cat((values, keys), -1), torch.cat((value, key), -1))
        assert layer.storage.lengths.tolist() == [400]
        later = layer.update(key[:, :, :1], value[:, :, :1])
        error = (later[0][:, :, :400] - key).abs().max() / key.abs().max()
        assert 0 < error < 0.2
        assert torch.equal(later[0][:, :, -200:-1], key[:, :, -199:])


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_with_sdpa_the_cache_returns_dequantized_keys_and_values(static, build, token_ids, assert_same, identity):
    """Exact ones in a band as wide as the text."""
    model = build("gemma3", "sdpa")
    model.config.dma_mxfp = identity | {"diagonal_tiles": 3}
    ids = token_ids(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DMACache(model.config, max_cache_len=LENGTH if static else None)
    decoded = []
    for start, end in [(0, 150), (150, 280), *((i, i + 1) for i in range(280, LENGTH))]:
        arguments = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        decoded.append(model(ids[:, start:end], past_key_values=cache, **arguments).logits)
    expected = model(ids, attention_mask=mask, position_ids=positions).logits
    assert_same(torch.cat(decoded, 1), expected, mask)


class TestReuse:
    @pytest.fixture
    def prompt(self, build, token_ids):
        model = build("gemma3")
        ids = token_ids(1, LENGTH)
        cache = DMACache(model.config)
        model(ids[:, :270], past_key_values=cache)
        expected = model(ids[:, 270:], past_key_values=copy.deepcopy(cache)).logits
        return model, ids[:, 270:], cache, expected

    @pytest.mark.parametrize("rows", [1, 3])
    @pytest.mark.parametrize("max_cache_len", [None, LENGTH], ids=["dynamic", "static"])
    def test_a_state_dict_restores_the_cache(self, max_cache_len, rows, prompt, token_ids):
        """Also over more rows. A static one in place: a compiled step expects the tensors at the same addresses."""
        model, rest, _, expected = prompt
        saved, loaded = (DMACache(model.config, max_cache_len=max_cache_len) for _ in range(2))
        model(token_ids(1, LENGTH)[:, :270], past_key_values=saved)
        model(token_ids(rows, 20), past_key_values=loaded)
        tensors = [tensor for layer in loaded.layers for tensor in layer.storage.tensors().values()]
        loaded.load_state_dict(saved.state_dict())
        if max_cache_len is not None and rows == 1:
            now = [tensor for layer in loaded.layers for tensor in layer.storage.tensors().values()]
            assert [tensor.data_ptr() for tensor in now] == [tensor.data_ptr() for tensor in tensors]
        torch.testing.assert_close(model(rest, past_key_values=loaded).logits, expected)

    @pytest.mark.parametrize("max_cache_len", [None, LENGTH], ids=["dynamic", "static"])
    def test_loading_its_own_state_dict_changes_nothing(self, max_cache_len, build, token_ids):
        """The state dict shares the cache's tensors."""
        model = build()
        cache = DMACache(model.config, max_cache_len=max_cache_len)
        model(token_ids(1, 270), past_key_values=cache)
        before = _state(cache)
        cache.load_state_dict(cache.state_dict())
        _assert_unchanged(cache, before)

    @pytest.mark.parametrize("max_cache_len", [None, LENGTH], ids=["dynamic", "static"])
    def test_every_layer_may_have_its_own_format(self, max_cache_len, build, token_ids, tmp_path):
        model, ids = build(), token_ids(1, LENGTH)
        formats = ["int8", "int4"]
        mixed, *uniform = (DMACache(model.config, each, max_cache_len=max_cache_len) for each in (formats, *formats))
        assert mixed.format == ("int8", "int4")
        logits = []
        for cache in (mixed, *uniform):
            model(ids[:, :280], past_key_values=cache)
            logits.append(model(ids[:, 280:], past_key_values=cache).logits)
        assert uniform[1].nbytes < mixed.nbytes < uniform[0].nbytes
        for index, cache in enumerate(uniform):
            assert mixed.layers[index].storage.format == formats[index]
            assert torch.equal(mixed.layers[index].storage.kv_pages[0], cache.layers[index].storage.kv_pages[0])
            assert not torch.equal(logits[0], logits[1 + index])
        torch.save(mixed.state_dict(), tmp_path / "mixed.pt")
        loaded = DMACache(model.config, formats, max_cache_len=max_cache_len)
        loaded.load_state_dict(torch.load(tmp_path / "mixed.pt", weights_only=True))
        loaded.crop(-10)
        torch.testing.assert_close(model(ids[:, 280:], past_key_values=loaded).logits, logits[0])
        with pytest.raises(ValueError, match=r"state must have .*'int8'.*, got .*\['int8', 'int4'\]"):
            uniform[0].load_state_dict(mixed.state_dict())

    def test_what_is_no_state_of_such_a_cache_is_rejected(self, prompt):
        model, _, cache, _ = prompt
        with pytest.raises(ValueError, match=r"state must have .*'int8'.*, got .*'int4'"):
            DMACache(model.config, "int8").load_state_dict(cache.state_dict())
        with pytest.raises(ValueError, match=r"layers with \(window, max_cache_len\) .*, got .*100, None"):
            DMACache(model.config, max_cache_len=300).load_state_dict(cache.state_dict())
        with pytest.raises(TypeError, match=r"state must be what state_dict\(\) returned, got DMACache"):
            DMACache(model.config).load_state_dict(cache)

    @pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
    @pytest.mark.parametrize(("prompt", "length"), [(100, 900), (400, 500), (380, 401), (571, 700)])
    def test_cropping_equals_never_appending(self, prompt, length, static, build, token_ids):
        """To a prompt within the sinks, and to one with its residual KV still stored, in a padded batch."""
        model = build("llama", sink_tiles=1).double()
        ids, other, mask = token_ids(2, 900), token_ids(2, 900, seed=4), torch.ones(2, 900, dtype=torch.int64)
        mask[1, :37] = 0
        caches = [DMACache(model.config, max_cache_len=950 if static else None) for _ in range(2)]

        def run(tokens, start, end, cache):
            return model(tokens[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits

        for cache in caches:
            run(ids, 0, prompt, cache)
        run(other, prompt, length, caches[0])
        caches[0].crop(prompt - length)
        assert caches[0].get_seq_length() == prompt
        for start, end in ((prompt, prompt + 1), (prompt + 1, prompt + 200)):
            actual, expected = (run(ids, start, end, cache) for cache in caches)
            assert (actual - expected).abs().max() <= 1e-9 * expected.abs().max()

    def test_a_cache_cropped_to_no_tokens_forgets_the_padding(self, build, token_ids):
        """And takes another prompt as an empty cache does."""
        model = build("llama")
        caches = DMACache(model.config), DMACache(model.config)
        mask = (torch.arange(20) >= torch.tensor([[0], [5]])).int()
        model(token_ids(2, 20), past_key_values=caches[0], attention_mask=mask)
        caches[0].crop(-20)
        actual, expected = (model(token_ids(2, 30, seed=4), past_key_values=cache).logits for cache in caches)
        assert torch.equal(actual, expected)
        assert all(tensors["lengths"].tolist() == [30, 30] for _, tensors in _state(caches[0]))

    @pytest.mark.parametrize(
        ("name", "message"),
        [("llama", "at most 129 of [0-9]+ can be removed"), ("gemma3", "but the 16-bit keys")],
        ids=["quantized", "dropped by a window"],
    )
    def test_cropping_to_tokens_that_are_not_held_in_16_bits_is_rejected(self, name, message, build, token_ids):
        model = build(name, cache="int8")
        cache = DMACache(model.config)
        model(token_ids(1, 1000), past_key_values=cache)
        before = _state(cache)
        with pytest.raises(RuntimeError, match=f"crop removes 700 tokens, .*{message}"):
            cache.crop(-700)
        _assert_unchanged(cache, before)


class TestErrors:
    """Each error is clear and leaves the cache unchanged."""

    @pytest.fixture(params=[None, 400], ids=["dynamic", "static"])
    def filled(self, request, build, token_ids):
        model = build()
        cache = DMACache(model.config, max_cache_len=request.param)
        model(token_ids(2, 280), past_key_values=cache)
        return model, cache

    @pytest.mark.parametrize(
        ("key", "error", "message"),
        [
            (_new(batch=3), ValueError, r"key must be \[2, 2, tokens, 16\] as in the cache, got \[3, 2, 5, 16\]"),
            (_new(batch=2, heads=4), ValueError, r"key must be \[2, 2, tokens, 16\]"),
            (_new(batch=2, dtype=torch.float64), TypeError, "key must have the dtype of the cache, torch.float32"),
            (_new(batch=2).to("meta"), ValueError, "key must be on the device of the cache, cpu, got meta"),
        ],
        ids=["batch", "heads", "dtype", "device"],
    )
    def test_states_of_another_shape_or_dtype_are_rejected(self, filled, key, error, message):
        _, cache = filled
        before = _state(cache)
        with pytest.raises(error, match=message):
            cache.update(key, key, 0)
        _assert_unchanged(cache, before)

    def test_an_unsupported_call_leaves_the_cache_unchanged(self, filled, token_ids):
        model, cache = filled
        before = _state(cache)
        with pytest.raises(ValueError, match="does not support the argument 'temperature'"):
            model(token_ids(2, 5), past_key_values=cache, temperature=0.5)
        _assert_unchanged(cache, before)

    def test_cropping_past_the_start_is_rejected(self, build, token_ids):
        model = build("gemma3")
        cache = DMACache(model.config)
        model(token_ids(2, 20), past_key_values=cache)
        before = _state(cache)
        for count, error, message in (
            (-21, ValueError, r"crop\(-21\) removes 21 tokens, but the cache has 20"),
            (5, ValueError, "tokens_to_remove must be 0 or negative, got 5"),
            (-1.5, TypeError, "'float' object cannot be interpreted as an integer"),
        ):
            with pytest.raises(error, match=message):
                cache.crop(count)
        _assert_unchanged(cache, before)
        with pytest.raises(ValueError, match="the cache has 2 layers, but the model updates layer 2"):
            cache.update(_new(), _new(), 2)

    def test_overflowing_a_static_cache_is_an_error(self, build, token_ids):
        model = build()
        cache = DMACache(model.config, max_cache_len=50)
        model(token_ids(1, 48), past_key_values=cache)
        before = _state(cache)
        with pytest.raises(ValueError, match="room for 50 tokens, so 3 more do not fit after 48; make it larger"):
            model(token_ids(1, 3), past_key_values=cache)
        _assert_unchanged(cache, before)
        assert torch.isfinite(model(token_ids(1, 2), past_key_values=cache).logits).all()

    def test_layers_with_shared_keys_agree_in_a_long_chunk(self, build):
        """The residual KV no longer holds them when the second layer reads."""
        layer = DMACache(build().config).layers[0]
        raw = torch.randn(1, 2, 200, 16)
        layer.update(raw, raw)
        keys, values = layer.update(raw, raw)
        geometry = MaskGeometry(1, 200, 400, is_causal=True, q_offset=200)
        recipe = dma_hf.PRESETS["balanced"].recipe
        options = {"scale": None, "softcap": None, "sinks": None, "backend": "auto"}
        adapter.attend(layer, keys.dma_update[1], raw, geometry, recipe, **options)
        with pytest.raises(ValueError, match="got 200 queries for keys that another layer has stored"):
            adapter.attend(layer, values.dma_update[1], raw, geometry, recipe, **options)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"config": None}, TypeError, r"config must be a model's configuration \(model.config\), got NoneType"),
            ({"max_cache_len": 0}, ValueError, "max_cache_len must be an integer of at least 1, got 0"),
            ({"max_cache_len": True}, ValueError, "max_cache_len must be an integer of at least 1, got True"),
            ({"cache": ""}, ValueError, "unknown cache format ''; expected one of int8, int4"),
            ({"cache": ["int4", "int3"]}, ValueError, "unknown cache format 'int3'"),
            ({"cache": ["int4"]}, ValueError, "one for each of the model's 2 layers; got 1"),
        ],
    )
    def test_invalid_arguments_are_rejected(self, build, arguments, error, message):
        with pytest.raises(error, match=message):
            DMACache(**({"config": build().config} | arguments))


@pytest.mark.parametrize("padded", ["no", "none hidden", "left", "right"])
def test_an_unpadded_prompt_in_a_static_cache_has_no_key_range(padded, build, token_ids, assert_same, monkeypatch):
    """A range of visible keys slows the kernels, so only a padded prompt has one."""
    ranges = []
    attention = adapter.attention

    def note(*arguments, **options):
        ranges.append(options["kv_range"])
        return attention(*arguments, **options)

    monkeypatch.setattr(adapter, "attention", note)
    model = build("gemma3")
    ids = token_ids(2, 150)
    mask = None if padded == "no" else torch.ones_like(ids)
    if padded in ("left", "right"):
        mask[1, slice(0, 30) if padded == "left" else slice(120, 150)] = 0
    static = model(ids, attention_mask=mask, past_key_values=DMACache(model.config, max_cache_len=400)).logits
    assert len(ranges) == 2
    assert all((each is None) == (padded in ("no", "none hidden")) for each in ranges)
    dynamic = model(ids, attention_mask=mask, past_key_values=DMACache(model.config)).logits
    seen = torch.ones_like(ids).bool() if mask is None else mask.bool()
    assert_same(static[seen], dynamic[seen])
