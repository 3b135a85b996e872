"""``generate_batch`` computes every request as it would be alone, whatever it is packed with."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

import dma_hf
from dma_hf.config import PAGED_NAME, settings_of
from dma_hf.integrations.continuous_batching import has_sectors

BLOCK_SIZE = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"  # up to 5.17
NEW_TOKENS = 4
LENGTHS = (5, 300, 17, 140)  # less than a tile, more than two


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in LENGTHS]


def _batched(model, prompts, **options):
    """Return tokens and their log-probabilities, by continuous batching."""
    with dma_hf.continuous_batching(model):
        return _generate_batch(model, prompts, **options)


def _generate_batch(model, prompts, num_blocks=64, persistent_manager=False, **options):
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, bos_token_id=1)
    options |= {BLOCK_SIZE: 32, "num_blocks": num_blocks, "return_logprobs": True, "use_cuda_graph": False}
    batching = ContinuousBatchingConfig(**options)
    outputs = model.generate_batch(
        prompts,
        generation_config=settings,
        continuous_batching_config=batching,
        persistent_manager=persistent_manager,
    )
    assert [output.error for output in outputs.values()] == [None] * len(prompts)
    return [(output.generated_tokens, output.logprobs) for output in outputs.values()]


def _alone(model, prompt, tokens):
    """Return the log-probabilities of the tokens, by one forward pass, and how far each is below the best."""
    logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return chosen, logprobs.amax(-1) - chosen


def _check(model, prompts, results):
    for prompt, (tokens, logprobs) in zip(prompts, results, strict=True):
        expected, below_best = _alone(model, prompt, tokens)
        assert len(tokens) == NEW_TOKENS
        assert below_best.max() < 1e-3
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss"])
def test_requests_of_many_lengths(name, families, prompts):
    model = families[name].build(dma_hf.NAME)
    dma_hf.configure(model, "paper")
    _check(model, prompts, _batched(model, prompts))
    assert model.config._attn_implementation == dma_hf.NAME


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_prompts_in_chunks(name, families, prompts):
    """A batch of 64 tokens holds no long prompt whole: chunks of some are decoded beside others."""
    model = families[name].build(dma_hf.NAME)
    dma_hf.configure(model, "paper")
    _check(model, prompts, _batched(model, prompts, max_batch_tokens=64))


def test_a_shared_prefix(families, prompts):
    model = families["llama"].build(dma_hf.NAME)
    dma_hf.configure(model, "paper")
    prefix = prompts[1][:256]
    prompts = [prefix + prompt[:7] for prompt in prompts[:1] + prompts[2:]]
    _check(model, prompts, _batched(model, prompts, max_batch_tokens=300, max_requests_per_batch=1))


def test_the_name_is_put_back_after_an_error(families):
    model = families["llama"].build(dma_hf.NAME)

    def fail():
        assert model.config._attn_implementation == PAGED_NAME
        dma_hf.configure(model, "paper")  # as outside
        raise KeyError

    with pytest.raises(KeyError), dma_hf.continuous_batching(model):
        fail()
    assert model.config._attn_implementation == dma_hf.NAME


def test_a_preset_in_the_name_counts(families, prompts):
    model = families["llama"].build(f"{dma_hf.NAME}:paper")
    _check(model, prompts[:1], _batched(model, prompts[:1]))
    with dma_hf.continuous_batching(model):
        assert model.config._attn_implementation == f"{PAGED_NAME}:paper"
        assert settings_of(model.config).recipe == dma_hf.PRESETS["paper"].recipe
    assert model.config._attn_implementation == f"{dma_hf.NAME}:paper"


def test_refusals(families, token_ids):
    with (
        pytest.raises(ValueError, match="runs attention 'sdpa'; continuous_batching is for models with attn_impl"),
        dma_hf.continuous_batching(families["llama"].build("sdpa")),
    ):
        pass
    model = families["llama"].build(dma_hf.NAME)
    with (
        dma_hf.continuous_batching(model),
        pytest.raises(RuntimeError, match=r"is for generate_batch only; call generate and forward outside of"),
    ):
        model(token_ids(1, 5))


def test_packed_pages_need_sectors(families, prompts, monkeypatch):
    monkeypatch.setattr("dma_hf.integrations.continuous_batching.has_sectors", lambda: False)
    model = families["llama"].build(dma_hf.NAME)
    dma_hf.configure(model, "balanced+int4")
    message = r"packed pages \(cache='int4'\) need Transformers 5\.18 or later, got 5\."
    with pytest.raises(RuntimeError, match=message), dma_hf.continuous_batching(model):
        pass
    with pytest.raises(RuntimeError, match=message):
        model.generate_batch(prompts)
    dma_hf.configure(model, cache=None)
    message = r"generate_batch needs `with dma_hf\.continuous_ba"
    with pytest.raises(RuntimeError, match=message):
        model.generate_batch(prompts)


@pytest.mark.skipif(not has_sectors(), reason="before Transformers 5.18")
def test_a_configured_model_needs_no_context(families, prompts):
    model = families["llama"].build(dma_hf.NAME)
    dma_hf.configure(model, "paper")
    _check(model, prompts, _generate_batch(model, prompts))
    assert model.config._attn_implementation == dma_hf.NAME


@pytest.mark.skipif(not has_sectors(), reason="before Transformers 5.18")
@pytest.mark.parametrize("is_kept", [False, True], ids=["", "persistent"])
def test_a_thread_that_dies_raises(families, prompts, is_kept):
    """What the backend refuses ends the generation thread."""
    model = families["llama"].build(dma_hf.NAME)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"head_mask": torch.ones(4)}), with_kwargs=True
        )
    with (
        pytest.raises(RuntimeError, match=r"thread has died: ValueError: .* does not support the argument 'head_mask'"),
        dma_hf.continuous_batching(model),
    ):
        _generate_batch(model, prompts[:1], persistent_manager=is_kept)
    assert model.config._attn_implementation == dma_hf.NAME
    assert getattr(model, "_cached_continuous_batching_manager", None) is None


@pytest.mark.skipif(not has_sectors(), reason="before Transformers 5.18")
def test_a_thread_that_never_starts_raises(families, prompts, monkeypatch):
    """As on Transformers 5.24, whose thread got an argument that was not known."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    model = families["llama"].build(dma_hf.NAME)
    dma_hf.configure(model, "paper")
    monkeypatch.setattr(ContinuousBatchingManager, "_run_generation_loop", lambda self, *, unknown: None)
    monkeypatch.setattr("dma_hf.integrations.manager.check_interfaces", lambda: None)
    with pytest.raises(RuntimeError, match=r"thread has died: TypeError: .*unexpected keyword argument|missing"):
        _generate_batch(model, prompts[:1])


@pytest.mark.skipif(not has_sectors(), reason="before Transformers 5.18")
def test_an_unknown_interface_is_refused_before_anything_runs(families, prompts, monkeypatch):
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    from dma_hf.integrations import manager

    model = families["llama"].build(dma_hf.NAME)
    dma_hf.configure(model, "paper")
    functions = (ContinuousBatchingManager.warmup, "device"), *manager._PARAMETERS
    monkeypatch.setattr(manager, "_PARAMETERS", functions)
    manager.check_interfaces.cache_clear()
    message = (
        rf"Transformers {re.escape(transformers.__version__)} is installed, where ContinuousBatchingManager\.warmup "
        r"takes \(\), not \(device\); dma-hf supports transformers>=5\.17,<5\.25: pip install"
    )
    with pytest.raises(dma_hf.UnsupportedTransformersError, match=message):
        _generate_batch(model, prompts[:1])
    assert model.config._attn_implementation == dma_hf.NAME


def test_contexts_may_overlap(families):
    """The first to be entered is left first; the name is put back by the last."""
    model = families["llama"].build(dma_hf.NAME)
    first, second = dma_hf.continuous_batching(model), dma_hf.continuous_batching(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.config._attn_implementation == PAGED_NAME
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == dma_hf.NAME


def test_a_name_that_is_set_while_batching_stays(families):
    model = families["llama"].build(dma_hf.NAME)
    with dma_hf.continuous_batching(model):
        model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"
