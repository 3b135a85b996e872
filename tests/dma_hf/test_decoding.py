"""``generate`` decodes in CUDA graphs, with the tokens of eager steps.

On a CPU a stand-in for a graph runs the captured step again. What it shares with a graph: the step runs on tensors at
fixed addresses, the cache gives its length as a tensor, and the capture itself changes nothing.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from itertools import product
from types import MethodType, SimpleNamespace

import pytest
import torch
from sampling import sampled
from tiny_models import SIZES
from torch import nn
from torchao.quantization import Int8Tensor, PerRow
from transformers import (
    CompileConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaForCausalLM,
    MllamaForCausalLM,
    MllamaTextConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    set_seed,
)

import dma_hf
from dma_hf import DMACache, decoding, idle_caches, step_graph
from dma_hf.cache_layers import Capture, DMALayer
from dma_hf.integrations import wrapping as hooks
from dma_hf.integrations.internals import CACHE_ARGUMENT
from dma_hf.stats import recorded_uses

PROMPT, NEW = 240, 24  # steps that complete a tile


def record(step):
    """Stand in for :func:`dma_hf.step_graph.record`."""
    arguments = dict(zip(step.__code__.co_freevars, step.__closure__, strict=True))["arguments"].cell_contents
    cache = arguments[CACHE_ARGUMENT] = copy.copy(arguments[CACHE_ARGUMENT])  # a graph does not keep the cache alive
    layers = [layer for layer in cache.layers if isinstance(layer, DMALayer) and layer.is_initialized]
    capture, tables = cache.owner.capture, [layer.storage.page_table for layer in layers]
    before = [tensor.clone() for layer in layers for tensor in layer.storage.tensors().values()]
    output = step()
    capture.position.sub_(1)
    for tensor, old in zip((t for layer in layers for t in layer.storage.tensors().values()), before, strict=True):
        tensor.copy_(old)

    def replay():
        cache.owner.capture = Capture(capture.position, capture.room)
        counters = [(layer.storage.appended, layer.storage.rolled_back) for layer in layers]
        with recorded_uses():
            output.logits.copy_(step().logits)
        cache.owner.capture = None
        assert all(layer.storage.page_table is table for layer, table in zip(layers, tables, strict=True))
        for layer, (layer.storage.appended, layer.storage.rolled_back) in zip(layers, counters, strict=True):
            layer.pending = None

    return replay, output


@pytest.fixture(autouse=True)
def graphs_on_a_cpu(monkeypatch, events_on_a_cpu):
    if not torch.cuda.is_available():
        monkeypatch.setattr(step_graph, "record", record)
        monkeypatch.setattr(hooks, "_is_on_gpu", lambda model: True)


@pytest.fixture
def build(families):
    def make(name="llama", cache="int4"):
        model = families[name].build("dma_mxfp", **({"num_hidden_layers": 1} if name == "llama" else {}))
        model = model if name == "gpt_oss" else model.double()  # its experts take no fp64
        dma_hf.configure(model, "balanced", cache=cache)
        return model

    return make


def _tokens(model, ids, new=NEW, seed=0, **options):
    set_seed(seed)
    return model.generate(ids, max_new_tokens=new, pad_token_id=0, eos_token_id=None, **options)


def _replays(model):
    found = dma_hf.stats(model)
    dma_hf.reset_stats(model)
    assert not found.eager_decoding
    return found.replays


@pytest.mark.parametrize(
    ("name", "is_sampled"),
    sampled(
        product(("llama", "gemma3", "gpt_oss", "gemma4"), (False, True)),
        lambda name, is_sampled: is_sampled == (name == "llama"),
    ),
)
def test_tokens_are_those_of_eager_steps(name, is_sampled, build, token_ids):
    mode = {"do_sample": True, "top_k": 20} if is_sampled else {"do_sample": False}
    model = build(name)
    ids = token_ids(2, PROMPT)
    expected = _tokens(model, ids, disable_compile=True, **mode)
    dma_hf.reset_stats(model)
    assert torch.equal(_tokens(model, ids, **mode), expected)
    found = dma_hf.stats(model)
    assert found.calls == NEW * len(found.layers)
    assert f"{found.replays} decoding steps replayed a CUDA graph" in str(found)
    assert _replays(model) == NEW - 1 - decoding.EAGER_STEPS
    assert torch.equal(_tokens(model, ids, **mode), expected)  # over the storage of the first call
    assert _replays(model) == NEW - 1


def test_a_cache_of_fixed_size_beside_layers_that_grow_is_not_captured(token_ids):
    """Mllama's cross-attention to images."""
    text = SIZES | {"num_hidden_layers": 3, "cross_attention_layers": [1]}
    config = MllamaTextConfig(**text, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    model = MllamaForCausalLM._from_config(config, attn_implementation="dma_mxfp:balanced+int8").eval()
    cache = DMACache(model.config, max_cache_len=512)
    actual = _tokens(model, token_ids(1, PROMPT), do_sample=False, **{CACHE_ARGUMENT: cache})
    assert [*dma_hf.stats(model).eager_decoding] == ["the cache has layers that grow and layers of a fixed size"]
    assert torch.equal(actual, _tokens(model, token_ids(1, PROMPT), do_sample=False, disable_compile=True))


def test_arguments_of_generate_that_reach_the_model_change_nothing(build, token_ids):
    """Pipelines and the server pass the tokenizer."""
    model, ids = build(), token_ids(1, PROMPT)
    expected = _tokens(model, ids, do_sample=False)
    dma_hf.reset_stats(model)
    for tokenizer in (object(), object()):
        assert torch.equal(_tokens(model, ids, do_sample=False, tokenizer=tokenizer), expected)
        assert _replays(model) == NEW - 1


def test_padded_rows_and_an_early_end_give_the_same_tokens(build, token_ids):
    model = build()
    ids = token_ids(4, PROMPT)
    mask = torch.ones_like(ids)
    mask[0, :30], mask[2, :190] = 0, 0
    options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "max_new_tokens": 40}
    free = model.generate(ids, eos_token_id=None, disable_compile=True, **options)
    options["eos_token_id"] = [int(free[0, PROMPT + 10]), int(free[1, PROMPT + 30])]
    expected = model.generate(ids, disable_compile=True, **options)
    dma_hf.reset_stats(model)
    assert torch.equal(model.generate(ids, **options), expected)
    assert _replays(model) > 0


def test_turns_of_a_chat_replay_one_graph(build, token_ids):
    model = build()
    cache, eager = DMACache(model.config), DMACache(model.config)
    ids = other = token_ids(1, 100)
    for turn in range(3):
        options = {"attention_mask": torch.ones_like(ids)}  # a token may be that of padding
        ids = torch.cat((_tokens(model, ids, 20, **options, **{CACHE_ARGUMENT: cache}), token_ids(1, 30, turn)), -1)
        graph = decoding._graphs[cache.layers[0]]
        output = _tokens(model, other, 20, disable_compile=True, **options, **{CACHE_ARGUMENT: eager})
        other = torch.cat((output, token_ids(1, 30, turn)), -1)
        assert torch.equal(ids, other)
        assert int(graph.capture.position) == cache.get_seq_length() == eager.get_seq_length()
        assert cache.layers[0].storage.appended == eager.layers[0].storage.appended
    assert dma_hf.stats(model).replays == 16 + 19 + 19


@pytest.fixture
def captured(monkeypatch):
    """The arguments of each capture."""
    calls, capture = [], decoding._captured
    monkeypatch.setattr(decoding, "_captured", lambda *arguments: calls.append(arguments) or capture(*arguments))
    return calls


def test_a_cache_that_grows_is_captured_again(build, token_ids, captured, monkeypatch):
    monkeypatch.setattr("dma_hf.cache_layers.ROOM_AHEAD", 40)
    model = build()
    expected = _tokens(model, token_ids(1, PROMPT), 150, disable_compile=True)
    assert torch.equal(_tokens(model, token_ids(1, PROMPT), 150), expected)
    assert len(captured) > 1


def test_a_reordered_cache_is_captured_again(build, token_ids, captured):
    """Its storage is another one, and a graph would read that of before."""
    model = build()
    cache = DMACache(model.config)
    ids = _tokens(model, token_ids(2, 100), 12, **{CACHE_ARGUMENT: cache})  # within the first tile, so nothing grows
    cache.reorder_cache(torch.tensor([1, 0]))
    ids = torch.cat((ids.flip(0), token_ids(2, 3)), -1)
    _tokens(model, ids, 12, attention_mask=torch.ones_like(ids), **{CACHE_ARGUMENT: cache})
    assert len(captured) == 2


@pytest.mark.parametrize("change", ["weights", "adapter", "settings", "batch"])
def test_a_changed_model_is_captured_again(change, build, token_ids):
    model = build()
    ids = token_ids(1, PROMPT)
    _tokens(model, ids, 20)
    layer = model.model.layers[0].self_attn
    if change == "weights":
        layer.o_proj.weight = nn.Parameter(layer.o_proj.weight * 1.5)
    elif change == "adapter":
        layer.o_proj = Adapter(layer.o_proj)
        _tokens(model, ids, 20)
        layer.o_proj.scale = {"default": 3.0}
    elif change == "settings":
        dma_hf.configure(model, "fp4", cache="int8")
    else:
        ids = token_ids(3, PROMPT)
    dma_hf.reset_stats(model)
    actual = _tokens(model, ids, 20)
    assert _replays(model) == 19 - decoding.EAGER_STEPS
    assert torch.equal(actual, _tokens(model, ids, 20, disable_compile=True))


def _add_vector(layer, size):
    """Let a layer add a vector that is a plain attribute."""
    layer.vector = torch.full((64,), size)
    layer.forward = MethodType(lambda self, x: type(self).forward(self, x) + self.vector, layer)


def _quantize(layer, scale):
    """Give a layer a weight of torchao, a tensor subclass without an address."""
    weight = scale * torch.eye(64)
    layer.weight = nn.Parameter(Int8Tensor.from_hp(weight, PerRow()), requires_grad=False)


# What happens before the first call, and before the second one.
REPLACED = {
    "strides": (lambda layer: None, lambda layer: setattr(layer.weight, "data", layer.weight.data.t())),
    "function": (lambda layer: None, lambda layer: setattr(layer, "forward", lambda x: x * 3)),
    "method": (lambda layer: _add_vector(layer, 1.0), lambda layer: delattr(layer, "forward")),
    "vector": (lambda layer: _add_vector(layer, 1.0), lambda layer: setattr(layer, "vector", layer.vector * 3)),
    "torchao": (lambda layer: _quantize(layer, 1.0), lambda layer: _quantize(layer, -3.0)),
}


@pytest.mark.parametrize("part", REPLACED)
def test_a_model_with_a_replaced_part_is_captured_again(part, build, token_ids):
    model, ids = build().float(), token_ids(1, PROMPT)
    layer = model.model.layers[0].self_attn.o_proj
    prepare, replace = REPLACED[part]
    prepare(layer)
    for _ in range(2):
        _tokens(model, ids, 20)
    assert _replays(model) == 2 * 19 - decoding.EAGER_STEPS
    replace(layer)
    actual = _tokens(model, ids, 20)
    assert _replays(model) == 19 - decoding.EAGER_STEPS
    assert torch.equal(actual, _tokens(model, ids, 20, disable_compile=True))


@torch.no_grad()
def test_positions_of_images_are_arguments_of_a_step(token_ids):
    """Qwen keeps their offsets in an attribute, which each prompt replaces."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = sizes | {"vocab_size": 97, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 32}
    config = Qwen2_5_VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision)
    model = Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="dma_mxfp").double().eval()
    dma_hf.configure(model, "balanced", cache="int4")
    kept = []
    for _ in range(3):
        tokens = _tokens(model, token_ids(1, PROMPT), do_sample=False)
        kept.append(model.model.rope_deltas)
    assert _replays(model) == 3 * (NEW - 1) - decoding.EAGER_STEPS
    assert torch.equal(tokens, _tokens(model, token_ids(1, PROMPT), do_sample=False, disable_compile=True))


class Adapter(nn.Module):
    """A layer with a scale that calls may change."""

    def __init__(self, base):
        super().__init__()
        self.base, self.scale = base, {"default": 1.0}

    def forward(self, x):
        return self.base(x) * self.scale["default"]


HOLES = torch.ones(1, PROMPT, dtype=torch.long).index_fill(1, torch.arange(50, 60), 0)
REASONS = {
    "beam search": ({"num_beams": 2, "do_sample": False}, "the generation mode is beam_search"),
    "lookup": ({"prompt_lookup_num_tokens": 3, "do_sample": False}, "the generation mode is assisted_generation"),
    "compile off": ({"disable_compile": True}, "disable_compile is set"),
    "states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "the call returns attentions"),
    "holes": ({"attention_mask": HOLES}, "the attention mask hides keys other than padding on the left"),
    "hook": ({}, "model.layers.0 has a forward hook"),
    "hook of all": ({}, "all modules have a forward hook"),
    "training": ({}, "the model is in training mode"),
}


@pytest.mark.parametrize("case", REASONS)
def test_stats_say_why_steps_are_eager(case, build, token_ids, request):
    model = build().train(case == "training")
    if case == "hook of all":  # as torch.utils.flop_counter has
        request.addfinalizer(nn.modules.module.register_module_forward_pre_hook(lambda *_: None).remove)
    if case == "hook":
        model.model.layers[0].register_forward_hook(lambda *_: None)
    options, reason = REASONS[case]
    _tokens(model, token_ids(1, PROMPT), 8, **options)
    found = dma_hf.stats(model)
    assert found.replays == 0
    assert [count for text, count in found.eager_decoding.items() if reason in text] == [1]
    assert f"1 x generate without CUDA graphs: {reason}" in str(found)


def test_stats_say_that_a_given_cache_that_grows_is_not_compiled(build, token_ids):
    model = build()
    options = {CACHE_ARGUMENT: DMACache(model.config), "compile_config": CompileConfig()}
    _tokens(model, token_ids(1, PROMPT), 8, **options)
    assert list(dma_hf.stats(model).eager_decoding.items()) == [
        ("compile_config needs a cache of fixed size, but the given one grows", 1)
    ]


def test_stats_say_that_steps_take_embeddings(build, token_ids):
    model, prepare = build(), LlamaForCausalLM.prepare_inputs_for_generation

    def embed(*arguments, **options):
        inputs = prepare(model, *arguments, **options)
        return inputs | {"inputs_embeds": model.get_input_embeddings()(inputs.pop("input_ids"))}

    model.prepare_inputs_for_generation = embed
    _tokens(model, token_ids(1, PROMPT), 8)
    assert list(dma_hf.stats(model).eager_decoding.items()) == [("a step has embeddings in place of tokens", 1)]


def test_a_model_that_needs_the_length_on_the_host_runs_eagerly(build, token_ids, monkeypatch):
    model = build()
    ids = token_ids(1, PROMPT)
    expected = _tokens(model, ids, 12)
    idle_caches.release(model)
    dma_hf.reset_stats(model)

    def fail(step):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(step_graph, "record", fail)
    assert torch.equal(_tokens(model, ids, 12), expected)
    assert list(dma_hf.stats(model).eager_decoding) == [
        "the step cannot be captured: operation not permitted when stream is capturing"
    ]


def test_prompts_of_different_lengths_share_a_compiled_step(build, token_ids):
    model = build()
    compiled = []

    def backend(graph, inputs, **options):
        compiled.append(graph)
        return graph

    config = CompileConfig(backend=backend)
    config._compile_all_devices = True
    torch.compiler.reset()
    _tokens(model, token_ids(1, PROMPT), 6, compile_config=config)
    first = len(compiled)
    assert first > 0
    for length, count in ((PROMPT + 70, 6), (PROMPT, 30)):
        _tokens(model, token_ids(1, length), count, compile_config=config)
    assert len(compiled) == first


def test_copies_of_a_cache_have_no_graph(build, token_ids):
    model = build()
    ids = token_ids(1, 100)
    cache = DMACache(model.config)
    ids = _tokens(model, ids, 20, **{CACHE_ARGUMENT: cache})
    assert cache.layers[0] in decoding._graphs
    saved = io.BytesIO()
    torch.save(cache, saved)
    saved.seek(0)
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), torch.load(saved, weights_only=False)]
    more = torch.cat((ids, token_ids(1, 3)), -1)
    expected = _tokens(model, more, 20, **{CACHE_ARGUMENT: cache})
    for each in copies:
        assert each.layers[0] not in decoding._graphs
        assert torch.equal(_tokens(model, more, 20, **{CACHE_ARGUMENT: each}), expected)


def test_an_idle_cache_makes_room_for_the_tokens_of_the_next_call(build, token_ids, captured):
    model = build()
    for new in (NEW, 400):
        captured.clear()
        _tokens(model, token_ids(1, PROMPT), new)
    assert len(captured) == 1  # it has grown once


@pytest.mark.parametrize("event", ["the model is dropped", "configure", "another device", "a returned cache"])
def test_an_idle_cache_is_freed(event, build, token_ids, monkeypatch):
    if not torch.cuda.is_available():  # the stand-in keeps the model alive
        monkeypatch.setattr(step_graph, "record", lambda step: (lambda: None, record(step)[1]))
    model = build()
    _tokens(model, token_ids(1, PROMPT), 12)
    layers = idle_caches._idle[model][1]
    storage = weakref.ref(layers[0].storage)
    if event == "the model is dropped":
        del model
    elif event == "configure":
        dma_hf.configure(model, cache="int8")
    elif event == "another device":  # or another dtype
        layers[0].device = torch.device("meta")
        _tokens(model, token_ids(1, PROMPT), 12)
    else:
        first = _tokens(model, token_ids(1, PROMPT), 12, return_dict_in_generate=True)[CACHE_ARGUMENT]
        assert model not in idle_caches._idle
        keys = first.layers[0].keys.clone()
        _tokens(model, token_ids(1, PROMPT, seed=2), 12)
        assert torch.equal(first.layers[0].keys, keys)
    del layers
    gc.collect()
    assert storage() is None


@torch.no_grad()
def test_recurrent_states_of_one_call_do_not_reach_the_next(token_ids):
    config = Lfm2Config(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    model = Lfm2ForCausalLM._from_config(config, attn_implementation="dma_mxfp").double().eval()
    dma_hf.configure(model, "balanced", cache="int8")
    scores = []
    processors = [lambda ids, logits: scores.append(logits) or logits]
    for seed in (0, 1, 0):
        _tokens(model, token_ids(1, PROMPT, seed), 1, logits_processor=processors)
    assert torch.equal(scores[0], scores[2])


@pytest.mark.parametrize("is_returned", [False, True])
def test_the_host_reads_one_step_late_whether_all_rows_have_ended(is_returned, build, token_ids):
    """Unless the call returns its cache. Streamers get the same tokens, and the first one at once."""
    model = build()
    ids = token_ids(1, PROMPT)
    end = _tokens(model, ids, disable_compile=True)[0, PROMPT + 15]
    streamed, steps = [], []
    seen = []
    streamer = SimpleNamespace(
        put=lambda tokens: (streamed.extend(tokens.flatten().tolist()), seen.append(len(steps))), end=lambda: None
    )
    ours = model.generate(
        ids, max_new_tokens=NEW, pad_token_id=0, eos_token_id=int(end), streamer=streamer,
        logits_processor=[lambda ids, logits: steps.append(1) or logits], return_dict_in_generate=is_returned,
    )  # fmt: skip
    ours = ours.sequences if is_returned else ours
    assert ours[0, -1] == end
    assert streamed == ours[0].tolist()
    assert len(steps) == ours.shape[1] - PROMPT + (not is_returned)
    assert seen == [0, 1, *range(2 + (not is_returned), len(steps) + 1)]
