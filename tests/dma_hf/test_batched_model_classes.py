"""``generate_batch`` of models that treat keys and values in their own way equals SDPA, or is refused by name."""

from __future__ import annotations

from itertools import product

import pytest
import transformers
from batched_parts import assert_as_alone, generate_batch, note_parts, random_prompts
from hf_outcomes import randomise
from sampling import sampled
from tiny_models import IDENTITY
from transformers import ContinuousBatchingConfig, GenerationConfig

import dma_hf

NEW_TOKENS = 6
LENGTHS = (5, 300, 17, 140)  # which fit in a batch of 512; SDPA's mask for the default of 8192 takes 1.6 GB
NAMES = ("gpt_bigcode", "persimmon", "cohere_compass", "diffllama", "jetmoe", "gemma3n", "gemma4", "moshi")


@pytest.fixture
def build(families):
    """Return a function that builds a model whose scores are not all almost zero, as with Transformers' own weights."""

    def make(name, implementation):
        if not hasattr(transformers, families[name].model):
            pytest.skip(f"Transformers {transformers.__version__} has no {families[name].model}")
        model = families[name].build(implementation).double()
        randomise(model)
        return model

    return make


def _results(model, prompts, **options):
    outputs = generate_batch(
        model, prompts, NEW_TOKENS, num_blocks=64, return_logprobs=True, use_cuda_graph=False, **options
    )
    return [(output.generated_tokens, output.logprobs) for output in outputs.values()]


@pytest.fixture
def prompts():
    return random_prompts(LENGTHS)


@pytest.mark.parametrize(
    ("name", "batch_tokens"),
    sampled(product(NAMES, (512, 64)), lambda name, tokens: (tokens == 512) == (NAMES.index(name) % 2 == 0)),
)
def test_batches_over_16_bit_pages_equal_sdpa(name, batch_tokens, build, prompts):
    expected = _results(build(name, "sdpa"), prompts, max_batch_tokens=batch_tokens)
    model = build(name, "dma_mxfp")
    dma_hf.configure(model, IDENTITY)
    for (tokens, logprobs), wanted in zip(
        _results(model, prompts, max_batch_tokens=batch_tokens), expected, strict=True
    ):
        assert tokens == wanted[0]
        assert logprobs == pytest.approx(wanted[1], abs=1e-5)


@pytest.mark.parametrize("name", ["gpt_bigcode", "persimmon", "cohere_compass", "moshi"])
def test_layers_that_do_not_describe_the_batch_are_batched_over_packed_pages(name, build, prompts, monkeypatch):
    model = build(name, "dma_mxfp")
    dma_hf.configure(model, "balanced", cache="int8")
    parts = note_parts(monkeypatch)
    outputs = generate_batch(model, prompts, NEW_TOKENS, num_blocks=64, max_batch_tokens=100)
    assert_as_alone(model, outputs, parts)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("diffllama", "diffllama cannot use a packed cache, because it attends twice in a layer"),
        ("gemma3n", "packed pages do not support layers that share keys and values, as gemma3n_text has"),
    ],
)
def test_models_that_change_or_share_cached_states_are_refused_by_name(name, message, build, prompts):
    model = build(name, "dma_mxfp:balanced+int8")
    with pytest.raises(ValueError, match=rf"{message}.*dma_hf\.configure\(model, cache=None\)"):
        _results(model, prompts)
    assert model.config._attn_implementation == "dma_mxfp:balanced+int8"


@pytest.mark.parametrize("name", ["jetmoe", "gemma3n"])
def test_packed_pages_of_an_unknown_class_that_changes_cached_states_raise(name, build, prompts, monkeypatch):
    monkeypatch.setattr("dma_hf.integrations.manager.check_layers", lambda config: None)
    model = build(name, "dma_mxfp:balanced+int8")
    with pytest.raises(RuntimeError, match="died: ValueError: packed pages need attention to keys and values as the c"):
        _results(model, prompts)


@pytest.mark.parametrize("cache", [None, "int8"])
def test_a_mask_of_the_models_own_is_refused(cache, build, prompts):
    """Batches need none, and it may hold a bias (Doge)."""
    model = build("doge", "dma_mxfp")
    dma_hf.configure(model, IDENTITY, cache=cache)
    with pytest.raises(RuntimeError, match="an attention_mask of its own in generate_batch: DogeAttention passed one"):
        _results(model, prompts)


@pytest.mark.parametrize("cache", [None, "int8"])
def test_changing_the_attention_of_a_batched_model_raises(cache, families, prompts):
    """The batches of a manager are prepared for its own attention."""
    model = families["llama"].build("dma_mxfp")
    dma_hf.configure(model, cache=cache)
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=64, use_cuda_graph=False)
    manager = model.init_continuous_batching(settings, continuous_batching_config=batching)
    manager.start()
    manager.add_request(prompts[0])
    assert manager.get_result(timeout=60).error is None
    model.set_attn_implementation("sdpa")
    manager.add_request(prompts[1])
    assert "was changed to 'sdpa'" in manager.get_result(timeout=60).error
    manager.stop(block=True, timeout=5)
    with pytest.raises(
        RuntimeError, match="died: RuntimeError: the attention of LlamaForCausalLM was changed to 'sdpa'"
    ):
        manager.destroy()
