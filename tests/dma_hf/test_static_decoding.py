"""``generate`` decodes over caches of a fixed size in CUDA graphs of the compiled model.

The tokens are those of eager steps.

A stand-in for a graph runs the captured step again. One for ``torch.compile`` has a backend without a compiler.
``tests/gpu/test_whole_models.py`` has both.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig, StaticCache, set_seed
from transformers.cache_utils import StaticLayer

import dma_hf
from dma_hf import decoding, step_graph
from dma_hf.cache_layers import DMAStaticLayer
from dma_hf.integrations import wrapping as hooks
from dma_hf.integrations.internals import CACHE_ARGUMENT

PROMPT, NEW = 40, 16
FIRST = decoding.EAGER_STEPS + 1  # tokens before the first replay


def _tensors(layer):
    if isinstance(layer, DMAStaticLayer):
        return [layer.tokens, *layer.storage.tensors().values()]
    return [layer.cumulative_length, layer.keys, layer.values]


def _counters(layer):
    return [layer.tokens, layer.storage.lengths] if isinstance(layer, DMAStaticLayer) else [layer.cumulative_length]


def record(step):
    """Stand in for :func:`dma_hf.step_graph.record`: a capture changes nothing, and a replay overwrites the output."""
    arguments = dict(zip(step.__code__.co_freevars, step.__closure__, strict=True))["arguments"].cell_contents
    cache = arguments[CACHE_ARGUMENT] = copy.copy(arguments[CACHE_ARGUMENT])  # a graph keeps neither the cache alive
    cache.layers = [copy.copy(layer) for layer in cache.layers]  # nor reads what replaces its tensors
    tensors = [tensor for layer in cache.layers for tensor in _tensors(layer)]
    before = [tensor.clone() for tensor in tensors]
    for layer in cache.layers:  # a capture computes nothing, but the stand-in runs the last step again
        torch._foreach_sub_(_counters(layer), 1)
    output = step()
    torch._foreach_copy_(tensors, before)
    return lambda: output.logits.copy_(step().logits), output


class Compiler:
    """Stands in for ``torch.compile``, and compiles nothing unless asked to.

    Attributes:
        modes: The modes of its calls.
        graphs: A backend that counts compilations, if it compiles.
    """

    def __init__(self):
        self.modes, self.graphs, self.original = [], None, torch.compile

    def __call__(self, function, mode, **options):
        self.modes.append(mode)
        return function if self.graphs is None else self.original(function, backend=self.graphs)


@pytest.fixture(autouse=True)
def compiler(monkeypatch, events_on_a_cpu):
    """Make ``generate`` compile on a CPU, as it does on CUDA."""
    compiler = Compiler()
    monkeypatch.setattr(step_graph, "record", record)
    monkeypatch.setattr(hooks, "_is_on_gpu", lambda model: True)
    monkeypatch.setattr(torch, "compile", compiler)
    torch._dynamo.reset()
    return compiler


@pytest.fixture
def build(families, monkeypatch):
    def make(name="llama"):
        model = families[name].build("dma_mxfp").double()
        dma_hf.configure(model, "balanced")
        monkeypatch.setattr(
            type(model), "_valid_auto_compile_criteria",
            lambda self, kwargs, config: not config.disable_compile and kwargs[CACHE_ARGUMENT].is_compileable,
        )  # fmt: skip
        return model

    return make


def _tokens(model, ids, new=NEW, **options):
    set_seed(0)
    options = {"pad_token_id": 0, "eos_token_id": None, "cache_implementation": "static"} | options
    return model.generate(ids, max_new_tokens=new, **options)


def _replays(model):
    found = dma_hf.stats(model)
    dma_hf.reset_stats(model)
    assert not found.eager_decoding
    return found.replays


@pytest.mark.parametrize("cache", [None, "int8"])
def test_later_calls_replay_the_graph_of_the_first(cache, build, token_ids):
    """Also with other prompts, and with padding, which makes other masks."""
    model = build()
    options = {"do_sample": False}
    if cache:
        dma_hf.configure(model, "balanced", cache=cache)
        options |= {"cache_implementation": None, "compile_config": CompileConfig()}
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    padded = mask.clone()
    padded[1, :9] = 0
    calls = []
    for seed, visible in enumerate((mask, mask, padded, padded)):
        ids = token_ids(2, PROMPT - seed % 2, seed)
        calls.append({"ids": ids, "attention_mask": visible[:, -ids.shape[1] :]})
    plain = options | {"disable_compile": True, "compile_config": None}
    expected = [_tokens(model, **call, **plain) for call in calls]
    dma_hf.reset_stats(model)
    for number, (call, tokens) in enumerate(zip(calls, expected, strict=True)):
        assert torch.equal(_tokens(model, **call, **options), tokens)
        assert _replays(model) == NEW - (1 if number % 2 else FIRST)


def test_a_cache_of_the_caller_keeps_its_graph(build, token_ids):
    model = build()
    prompts = [token_ids(1, PROMPT, seed) for seed in range(2)]
    expected = [_tokens(model, ids, do_sample=False, disable_compile=True) for ids in prompts]
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + NEW)
    options = {"cache_implementation": None, "do_sample": False, CACHE_ARGUMENT: cache}
    for ids, tokens, replays in zip(prompts, expected, (NEW - FIRST, NEW - 1), strict=True):
        cache.reset()
        assert torch.equal(_tokens(model, ids, **options), tokens)
        assert _replays(model) == replays


def test_a_graph_is_not_replayed_over_other_values(build, token_ids):
    """Here a logits processor edits the cache during the call."""
    model = build()

    def say(**options):
        cache = StaticCache(config=model.config, max_cache_len=PROMPT + NEW)

        def edit(ids, scores):
            if ids.shape[1] == PROMPT + 8:
                cache.layers[0].values = 100 * cache.layers[0].values
            return scores

        options |= {"cache_implementation": None, "logits_processor": [edit], CACHE_ARGUMENT: cache}
        return _tokens(model, token_ids(1, PROMPT), do_sample=False, **options)

    expected = say(disable_compile=True)
    dma_hf.reset_stats(model)
    assert torch.equal(say(), expected)
    assert _replays(model) == 9 - FIRST


@pytest.mark.parametrize("change", ["weights", "batch", "a returned cache", "settings", "holes"])
def test_a_graph_of_another_state_is_not_replayed(change, build, token_ids):
    model = build()
    ids = token_ids(1, PROMPT)
    _tokens(model, ids, do_sample=False)
    dma_hf.reset_stats(model)
    options = {"do_sample": False}
    if change == "weights":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
    elif change == "batch":
        ids = token_ids(3, PROMPT, 1)
    elif change == "a returned cache":
        options |= {"return_dict_in_generate": True, "output_logits": True}
    elif change == "settings":
        dma_hf.configure(model, "paper")
    else:
        options["attention_mask"] = torch.ones_like(ids).index_fill(1, torch.arange(5, 30), 0)
    ours = _tokens(model, ids, **options)
    assert _replays(model) == NEW - FIRST
    expected = _tokens(model, ids, disable_compile=True, **options)
    if change == "a returned cache":
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(expected.logits), rtol=0, atol=1e-9)
        assert int(ours[CACHE_ARGUMENT].get_seq_length()) == PROMPT + NEW - 1
        ours, expected = ours.sequences, expected.sequences
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_steps_are_compiled_once_without_graphs_of_the_compiler(name, build, token_ids, compiler):
    """Layers with sliding windows are left to Transformers."""
    compiler.graphs = CompileCounterWithBackend("eager") if name == "llama" else None
    model = build(name)
    expected = _tokens(model, token_ids(1, PROMPT), disable_compile=True, do_sample=False)
    for seed in (0, 1):
        actual = _tokens(model, token_ids(1, PROMPT, seed), do_sample=False)
    assert torch.equal(actual, expected)
    assert (_replays(model) > 0) == (name == "llama")
    assert compiler.modes == ["default" if name == "llama" else "reduce-overhead"]
    assert name != "llama" or compiler.graphs.frame_count == 1


def test_a_step_that_cannot_be_captured_is_counted(build, token_ids, monkeypatch):
    model = build()
    expected = _tokens(model, token_ids(1, PROMPT), do_sample=False, disable_compile=True)
    dma_hf.reset_stats(model)

    def fail(step):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(step_graph, "record", fail)
    assert torch.equal(_tokens(model, token_ids(1, PROMPT), do_sample=False), expected)
    (reason,) = dma_hf.stats(model).eager_decoding
    assert reason == "the step cannot be captured: operation not permitted when stream is capturing"


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "default"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compile_config_makes_graphs_over_a_packed_cache(name, mode, build, token_ids, compiler):
    """Unless it names a mode without graphs. Packed layers with sliding windows count on the device, too."""
    compiler.graphs = CompileCounterWithBackend("eager") if mode == "reduce-overhead" else None
    model = build(name)
    dma_hf.configure(model, "balanced", cache="int8")
    options = {"cache_implementation": None, "do_sample": False}
    expected = _tokens(model, token_ids(2, PROMPT), disable_compile=True, **options)
    dma_hf.reset_stats(model)
    config = CompileConfig(mode=mode)
    assert torch.equal(_tokens(model, token_ids(2, PROMPT), compile_config=config, **options), expected)
    assert _replays(model) == (0 if mode == "default" else NEW - FIRST)
    assert compiler.modes == ["max-autotune-no-cudagraphs" if mode == "max-autotune" else "default"]


@pytest.mark.parametrize("change", ["tensors", "number"])
def test_a_layer_that_changes_other_state_is_not_captured(change, build, token_ids, monkeypatch):
    model, update = build(), StaticLayer.update
    expected = _tokens(model, token_ids(1, PROMPT), do_sample=False, disable_compile=True)

    @functools.wraps(update)
    def changing(self, *arguments, **options):
        states = update(self, *arguments, **options)
        if change == "tensors":
            self.keys = self.keys.clone()
        else:
            self.calls = getattr(self, "calls", 0) + 1
        return states

    monkeypatch.setattr(StaticLayer, "update", changing)
    monkeypatch.setattr(step_graph, "record", None)
    assert torch.equal(_tokens(model, token_ids(1, PROMPT), do_sample=False), expected)
    assert _replays(model) == 0
