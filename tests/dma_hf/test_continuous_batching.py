"""``generate_batch`` computes every request as in isolation, whatever it is packed with."""

from __future__ import annotations

import gc

import pytest
import torch
from batched_parts import generate_batch, random_prompts

import dma_hf
from dma_hf.config import PAGED_NAME, settings_of
from dma_hf.integrations import internals, paged_attention

NEW_TOKENS = 4
LENGTHS = (5, 300, 17, 140)  # less than a tile, more than two


@pytest.fixture
def prompts():
    return random_prompts(LENGTHS)


def _generate_batch(model, prompts, persistent_manager=False, **options):
    """Return the tokens of continuous batching and their log-probabilities."""
    options |= {"page_size": 32, "num_blocks": 64, "return_logprobs": True, "use_cuda_graph": False}
    outputs = generate_batch(model, prompts, NEW_TOKENS, persistent_manager=persistent_manager, **options)
    return [(output.generated_tokens, output.logprobs) for output in outputs.values()]


def _check(model, prompts, **options):
    """Compare the log-probabilities of chosen tokens, which must be the best, with those of one forward pass."""
    for prompt, (tokens, logprobs) in zip(prompts, _generate_batch(model, prompts, **options), strict=True):
        logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
        expected = logits.log_softmax(-1)
        chosen = expected.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        assert len(tokens) == NEW_TOKENS
        assert (expected.amax(-1) - chosen).max() < 1e-3
        torch.testing.assert_close(torch.tensor(logprobs), chosen, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "batch_tokens"),
    [*((name, None) for name in ("llama", "mistral", "gemma2", "gemma3", "gpt_oss")), ("llama", 64), ("gemma3", 64)],
)
def test_requests_of_many_lengths_equal_isolated_ones(name, batch_tokens, families, prompts):
    """Long prompts exceed a batch of 64 tokens, so chunks of some run next to decode steps of others."""
    model = families[name].build("dma_mxfp")
    dma_hf.configure(model, "paper")
    options = {"max_batch_tokens": batch_tokens} if batch_tokens else {}
    _check(model, prompts, **options)
    assert model.config._attn_implementation == "dma_mxfp"


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma3", 2), ("diffllama", 1)])
def test_layers_of_a_kind_read_the_requests_of_a_step_once(name, kinds, families, prompts, monkeypatch):
    """Reading them waits for the device."""
    reads, passes = [], []
    read, note = paged_attention._read_requests, paged_attention._note_batch
    monkeypatch.setattr(paged_attention, "_read_requests", lambda *given: reads.append(given) or read(*given))
    monkeypatch.setattr(paged_attention, "_note_batch", lambda *given: passes.append(given) or note(*given))
    model = families[name].build("dma_mxfp")
    _generate_batch(model, prompts)
    assert model.config.num_hidden_layers > 1
    assert len(reads) == kinds * len(passes) > 0


@pytest.mark.parametrize(("decoding", "alone"), [(1, [(0, 3), (3, 4)]), (2, [(0, 3)])])
def test_padding_of_a_batch_is_no_request(decoding, alone):
    """A prompt of three tokens, requests with one new token, and two empty ones."""
    tokens = torch.tensor([0, 3, *range(4, 4 + decoding), 3 + decoding, 3 + decoding])
    keys = torch.tensor([0, 3, *range(13, 13 + 10 * decoding, 10), 3 + 10 * decoding, 3 + 10 * decoding])
    read = paged_attention._read_requests(tokens, keys, torch.tensor([0, 1, 2, *[9] * decoding, 0, 0]))
    slices = [new for new, *_ in read.groups if isinstance(new, slice)]
    assert [(new.start, new.stop) for new in slices] == alone
    assert len(read.groups) == 2
    assert read.keys == 3 + 10 * decoding


def test_requests_with_a_shared_prefix_equal_isolated_ones(llama, prompts):
    dma_hf.configure(llama, "paper")
    prompts = [prompts[1][:256] + prompt[:7] for prompt in prompts[:1] + prompts[2:]]
    _check(llama, prompts, max_batch_tokens=300, max_requests_per_batch=1)


@pytest.mark.parametrize("name", ["dma_mxfp", "dma_mxfp:paper", "dma_mxfp:balanced+int8"])
def test_a_loaded_model_needs_neither_configure_nor_a_context_manager(name, families, prompts):
    model = families["llama"].build(name)
    _check(model, prompts)
    assert model.config._attn_implementation == name
    uses = dma_hf.stats(model).uses
    assert any(use.cache == ("int8" if "+" in name else "pages") for use in uses)


@pytest.mark.parametrize("cache", [None, "int8"])
def test_a_language_model_within_another_model_is_batched(cache, llava, prompts):
    """The attention of the outer configuration does not matter."""
    llava.set_attn_implementation({"text_config": "dma_mxfp"})
    dma_hf.configure(llava, "balanced", cache=cache)
    _check(llava, [[token for token in prompt if token != 96] for prompt in prompts])


@pytest.mark.parametrize(("first", "second"), [("dma_mxfp", "sdpa"), ("sdpa", "dma_mxfp")])
def test_a_kept_manager_of_another_attention_is_rejected(first, second, families, prompts):
    """It prepares the inputs for the first attention; the second would mix the requests."""
    model = families["llama"].build(first)
    _generate_batch(model, prompts[:1], persistent_manager=True)
    model.set_attn_implementation(second)
    message = f"the kept manager is for (dma_mxfp with cache=None|another attention), but the model runs '{second}'"
    with pytest.raises(RuntimeError, match=message):
        _generate_batch(model, prompts[:1])
    model.destroy_cached_continuous_batching_manager()
    _check(model, prompts)


@pytest.mark.parametrize("is_kept", [False, True], ids=["", "persistent"])
def test_an_error_in_the_generation_thread_is_raised(llama, prompts, is_kept):
    """A rejected call ends the thread."""
    for layer in llama.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"head_mask": torch.ones(4)}), with_kwargs=True
        )
    with pytest.raises(RuntimeError, match=r"has died: ValueError: .* does not support the argument 'head_mask'"):
        _generate_batch(llama, prompts[:1], persistent_manager=is_kept)
    assert llama.config._attn_implementation == "dma_mxfp"
    assert getattr(llama, "_cached_continuous_batching_manager", None) is None


@pytest.mark.parametrize("cache", [None, "int4"])
@pytest.mark.parametrize("is_kept", [False, True], ids=["", "persistent"])
def test_an_empty_prompt_is_refused(cache, is_kept, llama, prompts):
    dma_hf.configure(llama, cache=cache)
    for given in ([[]], [prompts[0], []]):
        with pytest.raises(ValueError, match="input_ids must have at least one token"):
            _generate_batch(llama, given, persistent_manager=is_kept)
    assert len(_generate_batch(llama, prompts[:1], persistent_manager=is_kept)) == 1
    llama.destroy_cached_continuous_batching_manager()


def test_an_untested_version_is_rejected_before_anything_runs(llama, prompts, monkeypatch):
    monkeypatch.setattr(internals.transformers, "__version__", "5.99.0")
    message = r"Transformers 5\.99\.0 is installed, where continuous batching has not been tested; dma-hf supports "
    with pytest.raises(dma_hf.UnsupportedTransformersError, match=message):
        _generate_batch(llama, prompts[:1])
    assert llama.config._attn_implementation == "dma_mxfp"


class TestName:
    """A model has the name of batching while it has a manager."""

    def test_a_preset_in_the_name_applies(self, families):
        model = families["llama"].build("dma_mxfp:paper")
        manager = model.init_continuous_batching()
        assert model.config._attn_implementation == f"{PAGED_NAME}:paper"
        assert settings_of(model.config).recipe == dma_hf.PRESETS["paper"].recipe
        manager.destroy()
        assert model.config._attn_implementation == "dma_mxfp:paper"

    def test_managers_may_overlap(self, llama, token_ids):
        """The first one made is dropped first; the last one restores the name. Until then other calls are refused."""
        first, second = llama.init_continuous_batching(), llama.init_continuous_batching()
        first.destroy()
        assert llama.config._attn_implementation == PAGED_NAME
        with pytest.raises(
            RuntimeError, match="is for generate_batch only; call generate and forward after the manager"
        ):
            llama(token_ids(1, 5))
        second.destroy()
        assert llama.config._attn_implementation == "dma_mxfp"

    def test_a_name_set_while_batching_is_kept(self, llama):
        manager = llama.init_continuous_batching()
        llama.set_attn_implementation("sdpa")
        manager.destroy()
        assert llama.config._attn_implementation == "sdpa"

    def test_a_manager_that_cannot_be_made_leaves_the_model_usable(self, llama, monkeypatch):
        """Also while something still holds the error, and with it the manager."""
        names = []

        def fail(config):
            names.append(llama.config._attn_implementation)
            raise ValueError("no such processor")

        monkeypatch.setattr(llama, "_get_logits_processor", fail)
        with pytest.raises(ValueError, match="no such processor") as held:
            llama.init_continuous_batching()
        assert names == [PAGED_NAME]
        assert llama.config._attn_implementation == "dma_mxfp", held

    def test_a_manager_that_is_never_started_leaves_the_model_usable(self, llama):
        manager = llama.init_continuous_batching()
        del manager
        gc.collect()
        assert llama.config._attn_implementation == "dma_mxfp"


def test_positions_of_a_batch_begin_at_the_first_key_of_each_request():
    """A prompt of 5 tokens, a step over 9 keys, and one at position 30 whose window holds 11 keys."""
    starts = torch.tensor([0, 5, 6, 7]), torch.tensor([0, 5, 14, 25])
    requests = paged_attention._read_requests(*starts, torch.tensor([[0, 1, 2, 3, 4, 8, 30]]))
    prompt, (rows, keys, decoding) = requests.groups
    assert prompt == (slice(0, 5), slice(0, 5), {"q_offset": 0, "kv_offset": 0})
    assert {name: value.tolist() for name, value in decoding.items()} == {
        "q_offset": [8, 30], "kv_offset": [0, 20], "kv_range": [[0, 9], [0, 11]],
    }  # fmt: skip
    assert rows.tolist() == [[5], [6]]
    assert keys.tolist() == [[*range(5, 14), 14, 15], [*range(14, 25)]]
