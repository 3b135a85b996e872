"""``torch.compile`` compiles whole forward passes, and ``torch.export`` exports them."""

from __future__ import annotations

import pytest
import torch
from sampling import sampled
from tiny_models import IDENTITY
from transformers import CompileConfig, T5Config, T5Model

import dma_hf

LENGTH = 40


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


OTHERS = {"bert": {}, "bart": {"decoder_input_ids": torch.arange(3, 20).expand(2, -1), "use_cache": False}}


@pytest.mark.parametrize(
    "name", sampled(["llama", "gemma3", "gpt_oss", "bert", "bart"], ("gemma3", "bart").__contains__)
)
def test_a_forward_pass_compiles_to_one_graph(name, families, token_ids, assert_same):
    """Also for a padded batch: the graph does not depend on mask values."""
    model = families[name].build("dma_mxfp")
    dma_hf.configure(model, "balanced", sink_tiles=0, exact_until=0)
    ids = token_ids(2, LENGTH)
    mask = torch.ones_like(ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    options = OTHERS.get(name, {"use_cache": False})
    for padding in (0, 11):
        mask[0, :padding] = 0
        logits = compiled(ids, attention_mask=mask, **options).logits
        seen = None if name == "bart" else mask
        assert_same(logits, model(ids, attention_mask=mask, **options).logits, seen)


def test_layers_compile_to_one_graph_after_one_that_is_not_compiled(families, token_ids, assert_same):
    """They do not repeat its call, because a compiler must see theirs as one operation."""
    model = families["llama"].build("dma_mxfp")
    ids = token_ids(1, 400)
    expected = model(ids, use_cache=False).logits
    model.model.layers[1].compile(fullgraph=True, backend="aot_eager")
    assert_same(model(ids, use_cache=False).logits, expected)


def test_changing_the_settings_recompiles(families, token_ids):
    model = families["llama"].build("dma_mxfp")
    ids = token_ids(1, 400)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for preset in ("balanced", "paper"):
        dma_hf.configure(model, preset, exact_until=0)  # a compiled model passes a mask, which ignores it
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("name", sampled(["llama", "gemma3", "gpt_oss"], "gemma3".__eq__))
def test_generate_compiles_as_often_as_with_sdpa(name, families, model_pair, token_ids):
    """With a static cache, masks are created outside the compiled step and passed in."""
    ids = token_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    settings = CompileConfig(fullgraph=True, dynamic=None, backend="eager")
    settings._compile_all_devices = True  # otherwise generate does not compile on a CPU
    graphs = []
    for model in model_pair(families[name]):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        tokens = model.generate(ids, cache_implementation="static", compile_config=settings, **options)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert torch.equal(tokens, model.generate(ids, **options))
    assert 1 <= graphs[1] <= graphs[0]


def test_the_fallback_compiles(token_ids):
    config = T5Config(vocab_size=97, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    model = T5Model._from_config(config, attn_implementation="dma_mxfp").eval()
    dma_hf.configure(model, on_unsupported="sdpa")
    arguments = {"decoder_input_ids": token_ids(2, 9), "use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.warns(UserWarning, match="does not support position_bias"):
        states = compiled(token_ids(2, 12), **arguments).last_hidden_state
    torch.testing.assert_close(states, model(token_ids(2, 12), **arguments).last_hidden_state)


def test_compiled_gradients_equal_eager(families, token_ids):
    model = families["llama"].build("dma_mxfp").train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = token_ids(2, 8)
    gradients = []
    for run in (model, compiled):
        with torch.enable_grad():
            loss = run(ids, labels=ids, use_cache=False).loss
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for actual, expected in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", sampled(["llama", "gemma3", "bert"], "llama".__eq__))
def test_other_lengths_do_not_recompile(name, families, token_ids, assert_same):
    """The second length makes it symbolic."""
    options = {} if name == "bert" else {"use_cache": False}
    model = families[name].build("dma_mxfp")
    dma_hf.configure(model, IDENTITY)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for length in (300, 40, 129, 257, 64):
        ids = token_ids(2, length)
        logits = compiled(ids, **options).logits
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert_same(logits, model(ids, **options).logits)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", sampled([False, True], lambda strict: not strict), ids=["export", "strict export"])
def test_an_exported_model_equals_eager(strict, families, token_ids, assert_same):
    """With other lengths and other padding than those with which it was exported."""
    model = families["llama"].build("dma_mxfp")

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, mask):
            return self.model(ids, attention_mask=mask, use_cache=False).logits

    length = {1: torch.export.Dim("length", min=2, max=1000)}
    example = token_ids(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.int64)
    exported = torch.export.export(
        Logits(), example, strict=strict, dynamic_shapes={"ids": length, "mask": length}
    ).module()
    for tokens, padding in ((LENGTH, 0), (LENGTH, 9), (7, 0), (300, 9)):
        ids, mask = token_ids(2, tokens), torch.ones(2, tokens, dtype=torch.int64)
        mask[0, :padding] = 0
        assert_same(exported(ids, mask), model(ids, attention_mask=mask, use_cache=False).logits, mask)
