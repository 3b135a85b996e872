"""``high_layers``: layers in which every tile is in high precision."""

from __future__ import annotations

import json

import pytest
import torch
from batched_parts import generate_batch
from transformers import ViTConfig, ViTModel

import dma_hf
from dma_hf import PRESETS, DMAConfig

LENGTH = 600  # low tiles from token 384 on
LAYERS = (0, 1)
HIGH_0 = {"low": "mxfp4", "shared_scale": "block", "exact_until": 0, "high_layers": (0,)}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_a_model_of_high_layers_alone_equals_ordinary_attention(name, families, token_ids, assert_same):
    reference, model = (families[name].build(each) for each in (families[name].reference, "dma_mxfp"))
    model.load_state_dict(reference.state_dict())
    dma_hf.configure(model, "fp4", exact_until=0, high_layers=range(model.config.num_hidden_layers))
    for cache in (True, False):
        assert_same(model(token_ids(2, LENGTH), use_cache=cache).logits, reference(token_ids(2, LENGTH)).logits)


DOCUMENTS = {"position_ids": torch.cat((torch.arange(100), torch.arange(500)))[None]}


@pytest.mark.parametrize("options", [{"use_cache": False}, {}, {"cache": "int8"}, DOCUMENTS], ids=str)
def test_only_the_listed_layers_are_high(options, llama, token_ids):
    """Layers repeat the calls of earlier layers with the same precision."""
    seen, ids = [], token_ids(1, LENGTH)
    for layer in llama.model.layers:
        layer.self_attn.register_forward_hook(lambda *call: seen.append(call[2][0].clone()))

    def outputs(**settings):
        dma_hf.configure(llama, HIGH_0 | settings, cache=options.get("cache"))
        past = {"cache": dma_hf.DMACache(llama.config)} if "cache" in options else {}
        llama(ids, **(options | past))
        return seen[-2:]

    both, first, last, neither = (outputs(high_layers=layers) for layers in (LAYERS, (0,), (1,), ()))
    assert torch.equal(first[0], both[0])
    assert torch.equal(last[0], neither[0])
    assert not torch.equal(both[0], neither[0])
    # Layer 1 reads the output of layer 0, so compare it where layer 0 is the same.
    assert not torch.equal(both[1], first[1])
    assert not torch.equal(last[1], neither[1])


@pytest.mark.parametrize("cache", [None, "int8"])
def test_continuous_batching_honours_high_layers(cache, families, token_ids):
    model = families["llama"].build("dma_mxfp")
    prompt = token_ids(1, LENGTH)[0].tolist()

    def logprobs(implementation, **settings):
        model.set_attn_implementation(implementation)
        if settings:
            dma_hf.configure(model, HIGH_0 | settings, cache=cache)
        options = {"page_size": 32, "num_blocks": 64, "use_cuda_graph": False, "max_batch_tokens": 1024}
        (output,) = generate_batch(model, [prompt], 1, return_logprobs=True, **options).values()
        return torch.tensor(output.logprobs)

    exact = logprobs("sdpa")
    torch.testing.assert_close(logprobs("dma_mxfp", high_layers=LAYERS), exact)
    assert (logprobs("dma_mxfp", high_layers=()) - exact).abs() > 1e-4


def test_fp4_without_its_high_layer_is_not_called_fp4(llama, token_ids):
    for setting, name in (({}, "fp4"), ({"high_layers": ()}, "custom")):
        dma_hf.configure(llama, "fp4", **setting)
        dma_hf.reset_stats(llama)
        llama(token_ids(1, 5))
        assert {use.recipe for use in dma_hf.stats(llama).uses} == {name}


@pytest.mark.parametrize("layers", [0, "0", ("0",), (-1,), (True,), (0.0,), None, {0: 1}])
def test_invalid_layers_are_refused(layers):
    with pytest.raises(ValueError, match="high_layers must list indices of layers, which count from 0; got "):
        DMAConfig(high_layers=layers)


def test_a_compiled_model_honours_high_layers_of_a_file(llama, token_ids):
    llama.config.dma_mxfp = json.loads(json.dumps(DMAConfig.from_dict(HIGH_0).to_dict()))
    ids = token_ids(1, LENGTH)
    compiled = torch.compile(llama, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, llama(ids, use_cache=False).logits)


def test_layers_are_sorted_and_listed_once():
    config = DMAConfig(high_layers=[2, 0, 2])
    assert config.high_layers == (0, 2)
    assert config.to_dict()["high_layers"] == [0, 2]


def test_layers_that_the_model_lacks_are_refused(llama):
    """A preset also suits layers without numbers."""
    with pytest.raises(ValueError, match="high_layers: LlamaForCausalLM has no layer 2, 7; its layers are 0 to 1"):
        dma_hf.configure(llama, "fp4", high_layers=(7, 0, 2))
    assert not hasattr(llama.config, "dma_mxfp")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ViTModel._from_config(ViTConfig(**sizes, image_size=32, patch_size=8), attn_implementation="dma_mxfp")
    assert dma_hf.configure(model, "fp4") == PRESETS["fp4"]
    with pytest.raises(ValueError, match="high_layers: ViTModel has no layer 0; its layers have no numbers"):
        dma_hf.configure(model, "balanced", high_layers=(0,))
