"""``generate`` gives the same tokens with ``DMACache`` and with Transformers' cache.

The oracle is ``dma_mxfp`` with Transformers' cache, which quantizes the whole sequence again in every step. The prompts
end shortly before a tile boundary; after it the first tile is low.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hf_outcomes import randomise
from sampling import sampled
from tiny_models import SIZES
from transformers import (
    AttentionInterface,
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    StaticCache,
    set_seed,
)
from transformers.generation import BaseStreamer

import dma_hf
from dma_hf import DMACache, attention
from dma_hf.attention import dma_attention_forward
from dma_hf.cache_layers import DMALayer
from dma_hf.integrations.internals import CACHE_ARGUMENT

NEW_TOKENS = 10
PROMPT = 250
MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "several samples": {"do_sample": True, "num_return_sequences": 2},
    "chunked prefill": {"do_sample": False, "prefill_chunk_size": 60},
}


@pytest.fixture
def build(families, identity):
    def make(name, seed=0, **changes):
        """A model without quantization, with a band so wide that its cache quantizes nothing either."""
        window = {"sliding_window": 100} if name in ("mistral", "gemma3") else {}
        model = families[name].build("dma_mxfp", seed=seed, **window, **changes).double()
        dma_hf.configure(model, identity, diagonal_tiles=3)
        return model

    return make


def _generate(model, ids, **options):
    set_seed(0)
    return model.generate(ids, max_new_tokens=NEW_TOKENS, pad_token_id=0, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_mode_gives_the_same_tokens(name, mode, build, token_ids):
    model = build(name)
    ids = token_ids(2, PROMPT)
    options = MODES[mode]
    if mode != "chunked prefill":
        mask = torch.ones_like(ids)
        mask[0, :9] = 0
        options = options | {"attention_mask": mask}
    expected = _generate(model, ids, **options)
    cache = DMACache(model.config)
    assert torch.equal(_generate(model, ids, past_key_values=cache, **options), expected)
    assert cache.get_seq_length() == PROMPT + NEW_TOKENS - 1


def test_layers_of_a_step_look_at_its_padding_once(families, token_ids, monkeypatch):
    """Looking waits for the device."""
    looks, has_all_keys = [], attention._has_all_keys
    monkeypatch.setattr(attention, "_has_all_keys", lambda *given: looks.append(given) or has_all_keys(*given))
    model = families["llama"].build("dma_mxfp", num_hidden_layers=4)
    dma_hf.configure(model, cache="int8")
    ids = token_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    _generate(model, ids, attention_mask=mask)
    assert len(looks) == NEW_TOKENS - 1


@pytest.mark.parametrize("name", sampled(["llama", "gemma3"], lambda name: name == "gemma3"))
def test_a_static_cache_compiles_to_one_graph(name, build, token_ids):
    model = build(name)
    ids = token_ids(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    settings = CompileConfig(fullgraph=True, dynamic=None, backend="aot_eager")
    settings._compile_all_devices = True  # otherwise generate does not compile on a CPU
    expected = _generate(model, ids, do_sample=False, attention_mask=mask)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    cache = DMACache(model.config, max_cache_len=PROMPT + NEW_TOKENS)
    options = {"attention_mask": mask, "do_sample": False, "compile_config": settings, "past_key_values": cache}
    assert torch.equal(_generate(model, ids, **options), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "length"), [("llama", 30), *product(("gemma3n", "gemma4"), (30, 300))])
def test_a_second_turn_continues_with_the_cache_of_the_first(name, length, build, token_ids):
    """Of any length, also where layers share keys, which takes prompts only in one call or in chunks."""
    model = build(name)
    randomise(model)
    cache, more = DMACache(model.config), token_ids(1, length, seed=2)
    first = _generate(model, token_ids(1, PROMPT), do_sample=False, past_key_values=cache)
    second = torch.cat((first, more), 1)
    options = {"do_sample": False, "attention_mask": torch.ones_like(second)}  # an answer may have the token of padding
    expected = _generate(model, second, **options)
    assert torch.equal(_generate(model, second, past_key_values=cache, **options), expected)


def test_layers_with_shared_keys_get_chunks_of_a_padded_prompt(build, token_ids):
    """For all but the last chunk Gemma 4 computes them for a single query, whose mask is a slice."""
    model, ids = build("gemma4"), token_ids(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    options = {"attention_mask": mask, "do_sample": False}
    expected = _generate(model, ids, **options)
    cache = DMACache(model.config)
    assert torch.equal(_generate(model, ids, past_key_values=cache, prefill_chunk_size=60, **options), expected)


@pytest.mark.parametrize("stored_later", [300, 400])
def test_the_last_query_of_a_prompt_is_at_its_own_position(stored_later, build, token_ids, assert_same, monkeypatch):
    """Gemma 4 computes layers with shared keys for it alone. Over new keys it is exact, like a short call."""
    monkeypatch.setattr("dma_hf.cache_layers.STORED_LATER", stored_later)
    model = build("gemma4")
    dma_hf.configure(model, "balanced", exact_until=0, diagonal_tiles=0)
    tokens = 400
    ids = token_ids(1, tokens)
    expected = model(ids, logits_to_keep=1).logits
    for options in ({}, {"max_cache_len": tokens + 8}):
        cache = DMACache(model.config, "int4", **options)
        assert_same(model(ids, logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits, expected, tolerance=1e-9)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_prompt_prefilled_in_inference_mode_continues_outside_it(static, build, token_ids):
    """As with Transformers' dynamic cache; both for the first tensors and for their replacements."""
    model = build("llama")
    ids = token_ids(2, 600)
    cache = DMACache(model.config, max_cache_len=700 if static else None)
    with torch.inference_mode():
        model(ids[:, :100], past_key_values=cache)
        model(ids[:, 100:500], past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.load_state_dict(cache.state_dict())
    swapped = torch.cat((ids.flip(0)[:, :500], ids[:, 500:]), 1)
    expected = _generate(model, swapped, do_sample=False)
    assert torch.equal(_generate(model, swapped, do_sample=False, past_key_values=cache), expected)


def _cache_of(model, ids, **options):
    """Return the cache of a call of ``generate``."""
    result = model.generate(ids, max_new_tokens=2, pad_token_id=0, return_dict_in_generate=True, **options)
    return result.get(CACHE_ARGUMENT)


class TestDefault:
    """``configure(model, cache=...)``."""

    def test_generate_uses_the_configured_cache(self, build, token_ids):
        """The section stays in the configuration, but does not apply to SDPA."""
        model, ids = build("llama"), token_ids(1, 20)
        assert type(_cache_of(model, ids)) is DynamicCache
        dma_hf.configure(model, cache="int8")
        for name, kind in (("dma_mxfp", DMACache), ("sdpa", DynamicCache), ("dma_mxfp", DMACache)):
            model.set_attn_implementation(name)
            assert type(_cache_of(model, ids)) is kind
        own = DynamicCache(config=model.config)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*another cache")
            assert _cache_of(model, ids, **{CACHE_ARGUMENT: own}) is own
        dma_hf.configure(model, cache=None)
        assert type(_cache_of(model, ids)) is DynamicCache

    @pytest.mark.parametrize(
        ("own", "given", "expected"),
        [
            ({"cache_implementation": "hybrid"}, {}, DMACache),  # as in Gemma's configurations on the Hub
            ({"cache_implementation": "static"}, {}, StaticCache),
            ({"cache_implementation": "static"}, {"cache_implementation": "dynamic"}, DynamicCache),
            ({"use_cache": False}, {}, type(None)),
            ({"use_cache": False}, {"use_cache": True}, DMACache),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("as_config", [False, True], ids=["options", "configuration"])
    def test_a_call_and_the_models_generation_config_override_it(
        self, own, given, expected, as_config, build, token_ids
    ):
        """Without a warning of another cache. A generation configuration of the call overrides the model's."""
        model = build("llama")
        dma_hf.configure(model, cache="int8")
        for name, value in own.items():
            setattr(model.generation_config, name, value)
        if as_config:
            given = {"generation_config": GenerationConfig(**given)}
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*another cache")
            assert type(_cache_of(model, token_ids(1, 20), **given)) is expected

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(ForkingPickler.dumps(model))])
    def test_a_copied_model_has_the_configured_cache(self, copied, build, token_ids):
        """Also one that is passed to a spawned process."""
        model = build("llama")
        dma_hf.configure(model, cache="int8")
        assert type(_cache_of(copied(model), token_ids(1, 20))) is DMACache

    @pytest.mark.parametrize("in_call", [True, False])
    def test_a_cache_excludes_use_cache_false(self, in_call, build, token_ids):
        """Every step would read all tokens again, although the cache has them."""
        model, options = build("llama"), {"use_cache": False} if in_call else {}
        model.generation_config.use_cache = in_call
        options |= {CACHE_ARGUMENT: DMACache(model.config)}
        with pytest.raises(ValueError, match="got a DMACache, but use_cache is False; leave one of them out"):
            _generate(model, token_ids(1, 20), **options)

    @pytest.mark.parametrize("name", ["dma_mxfp", "dma_mxfp:fp4+int8"])
    def test_a_loaded_model_has_the_cache_that_it_was_saved_with(self, name, build, token_ids, tmp_path):
        """A cache in the implementation's name overrides it."""
        model = build("llama")
        dma_hf.configure(model, "balanced", cache="int4")
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path, attn_implementation=name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache = _cache_of(loaded, token_ids(1, 20))
        assert cache.format == ("int8" if "+" in name else "int4")

    def test_forward_with_another_cache_warns(self, build, token_ids):
        model = build("llama")
        dma_hf.configure(model, cache="int4")
        cache, ids = DynamicCache(config=model.config), token_ids(1, 20)
        model(ids, **{CACHE_ARGUMENT: cache})
        with pytest.warns(UserWarning, match="says cache='int4', but the keys of a .* came from another cache"):
            model(ids[:, :1], **{CACHE_ARGUMENT: cache})

    def test_calls_in_threads_may_ask_for_different_caches_without_a_warning(self, build, token_ids):
        model, ids = build("llama"), token_ids(1, 20)
        dma_hf.configure(model, cache="int4")

        class OtherCall(BaseStreamer):
            def put(self, tokens):
                with ThreadPoolExecutor(1) as pool:
                    assert type(pool.submit(_cache_of, model, ids).result()) is DMACache

            def end(self):
                pass

        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*another cache")
            _cache_of(model, ids, cache_implementation="dynamic", streamer=OtherCall())

    @pytest.mark.parametrize("name", ["llama", "bart"])
    def test_generate_reads_the_packed_keys_of_a_cache_made_with_another_configuration(self, name, build, token_ids):
        """Such as one from ``AutoConfig``, which does not know the attention of the model."""
        model, ids = build(name), token_ids(1, 20)
        expected = _generate(model, ids, do_sample=False)
        cache = DMACache(type(model.config).from_dict(model.config.to_dict()), "int8")
        dma_hf.reset_stats(model)
        assert torch.equal(_generate(model, ids, do_sample=False, **{CACHE_ARGUMENT: cache}), expected)
        layers = {name: layer.uses for name, layer in dma_hf.stats(model).layers.items() if "encoder." not in name}
        caches = {use.cache for name, uses in layers.items() if name.endswith("self_attn") for use in uses}
        assert caches == {"int8"}

    def test_the_last_query_of_a_prompt_is_no_decoding_step(self, build, token_ids):
        """Gemma 4 computes layers with shared keys for it alone."""
        model = build("gemma4")
        dma_hf.configure(model, cache="int4")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(token_ids(1, 20), use_cache=False, logits_to_keep=1)

    def test_guidance_keeps_transformers_cache_for_its_own_branch(self, build, token_ids):
        """Transformers calls ``forward`` for it, without a cache."""
        model, ids, options = build("llama"), token_ids(1, 20), {"guidance_scale": 1.5, "do_sample": False}
        expected = _generate(model, ids, **options)
        dma_hf.configure(model, cache="int8")
        with pytest.warns(UserWarning, match="the keys of a decoding step came from another cache"):
            assert torch.equal(_generate(model, ids, **options), expected)

    def test_a_function_registered_over_dma_mxfp_keeps_the_cache(self, build, token_ids):
        """For profiling, for example."""
        calls = []

        def profiled(*arguments, **options):
            calls.append(options)
            return dma_attention_forward(*arguments, **options)

        model = build("llama")
        dma_hf.configure(model, cache="int8")
        AttentionInterface.register("dma_mxfp", profiled)
        try:
            cache = _cache_of(model, token_ids(1, 20))
        finally:
            AttentionInterface.register("dma_mxfp", dma_attention_forward)
        assert type(cache) is DMACache
        assert calls

    def test_encoder_decoders_cache_only_self_attention(self, families, token_ids, identity):
        """Cross-attention keeps Transformers' cache."""
        model = families["bart"].build("dma_mxfp")
        dma_hf.configure(model, identity)
        options = {"do_sample": False, "return_dict_in_generate": True, "num_beams": 2}
        expected = _generate(model, token_ids(2, 30), **options)
        dma_hf.configure(model, cache="int8")
        actual = _generate(model, token_ids(2, 30), **options)
        assert torch.equal(actual.sequences, expected.sequences)
        assert all(isinstance(layer, DMALayer) for layer in actual.past_key_values.self_attention_cache.layers)

    @pytest.mark.parametrize("implementation", ["dma_mxfp", "sdpa"])
    @pytest.mark.parametrize("name", ["bart", "whisper"])
    def test_an_encoder_decoder_takes_a_cache_for_its_self_attention(
        self, name, implementation, families, token_ids, identity
    ):
        """A second call continues it, and computes the keys of the encoder again."""
        model = families[name].build(implementation)
        if implementation == "dma_mxfp":
            dma_hf.configure(model, identity)
        inputs = {"input_ids": token_ids(2, 30)} if name == "bart" else {"input_features": torch.ones(2, 20, 300)}
        options = {"do_sample": False, "min_new_tokens": 5, "max_new_tokens": 5}
        ids, cache = token_ids(2, 20), DMACache(model.config, "int8")
        for start in (15, 20):
            prompt = {**inputs, "decoder_input_ids": ids[:, :start]}
            expected = model.generate(**prompt, **options)
            assert torch.equal(model.generate(**prompt, **options, **{CACHE_ARGUMENT: cache}), expected)
            cache.crop(start - cache.get_seq_length())
        if (name, implementation) == ("bart", "dma_mxfp"):
            with pytest.raises(ValueError, match=r"EncoderDecoderCache\(DMACache\(model.config\), DynamicCache\("):
                model(**prompt, **{CACHE_ARGUMENT: DMACache(model.config)})

    def test_an_assistant_with_other_layers_rolls_back_tokens(self, build, token_ids):
        """Transformers' cache records the state that such layers discard, and so must ours."""
        torch.manual_seed(0)
        sizes = {"layer_types": ["conv", "full_attention"], "block_ff_dim": 64}
        assistant = Lfm2ForCausalLM._from_config(Lfm2Config(**(SIZES | sizes)), attn_implementation="dma_mxfp").eval()
        dma_hf.configure(assistant, cache="int8")
        model, ids = build("llama"), token_ids(1, 50)
        expected = _generate(model, ids, do_sample=False)
        assert torch.equal(_generate(model, ids, do_sample=False, assistant_model=assistant), expected)
