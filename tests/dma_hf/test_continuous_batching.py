"""``generate_batch`` computes every request as it would be alone, whatever it is packed with."""

from __future__ import annotations

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import dma_hf
from dma_hf.batching import _has_sectors
from dma_hf.settings import PAGED_NAME, settings_of

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


def _generate_batch(model, prompts, num_blocks=64, **options):
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, bos_token_id=1)
    options |= {BLOCK_SIZE: 32, "num_blocks": num_blocks, "return_logprobs": True, "use_cuda_graph": False}
    batching = ContinuousBatchingConfig(**options)
    outputs = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=batching)
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
        pytest.raises(RuntimeError, match=r"is for generate_batch; call generate and forward outside of"),
    ):
        model(token_ids(1, 5))


def test_packed_pages_need_sectors(families, prompts, monkeypatch):
    monkeypatch.setattr("dma_hf.batching._has_sectors", lambda: False)
    model = families["llama"].build(dma_hf.NAME)
    dma_hf.configure(model, "kv4")
    message = r"packed pages \(cache='int4'\) need Transformers 5\.23 or newer, and this is 5\."
    with pytest.raises(RuntimeError, match=message), dma_hf.continuous_batching(model):
        pass
    with pytest.raises(RuntimeError, match=message):
        model.generate_batch(prompts)
    dma_hf.configure(model, cache=None)
    message = (
        r"on Transformers before 5\.23 \(this is 5\.[\d.]+\) generate_batch is called within dma_hf\.continuous_ba"
    )
    with pytest.raises(RuntimeError, match=message):
        model.generate_batch(prompts)


@pytest.mark.skipif(not _has_sectors(), reason="before Transformers 5.23")
def test_a_configured_model_needs_no_context(families, prompts):
    model = families["llama"].build(dma_hf.NAME)
    dma_hf.configure(model, "paper")
    _check(model, prompts, _generate_batch(model, prompts))
    assert model.config._attn_implementation == dma_hf.NAME


def test_what_the_backend_refuses_fails_the_requests(families, prompts):
    model = families["llama"].build(dma_hf.NAME)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"head_mask": torch.ones(4)}), with_kwargs=True
        )
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, bos_token_id=1)
    batching = ContinuousBatchingConfig(num_blocks=64)
    with dma_hf.continuous_batching(model):
        outputs = model.generate_batch(prompts[:1], generation_config=settings, continuous_batching_config=batching)
    assert all("does not support the argument 'head_mask'" in str(output.error) for output in outputs.values())
