"""The study of skipped products: its attention, and the rule of today as one of its rules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from dma_kernels import Recipe, attention
from script_files import load_script
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, LlamaConfig

study = load_script("study_product_skipping")
SCALE = 0.3


def inputs(batch=1, length=1024):
    """Return queries of 4 heads, and keys and values of 2, with stretches of small keys."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(batch, heads, length, 16, generator=generator) for heads in (4, 2, 2))
    key *= torch.tensor([1.0, 0.1, 0.5, 0.02]).repeat_interleave(256)[:length, None]
    return query, key, value


def run(attended, query, key, value):
    out, _ = attended(SimpleNamespace(layer_idx=0), query, key, value, None, scaling=SCALE)
    return out.transpose(1, 2)


def test_todays_rule_gives_the_result_and_the_counts_of_the_reference():
    query, key, value = inputs(batch=2)
    counts = torch.zeros(4, 2, dtype=torch.int64)
    recipe = Recipe(low="bf16", skip_threshold=1.0)
    expected = attention(query, key, value, recipe, scale=SCALE, tile_counts=counts)
    attended = study.Attention(1 << 18)
    attended.begin([study.Rule.parse("all:1")], skips=True)
    torch.testing.assert_close(run(attended, query, key, value), expected)
    low, skipped, computed = attended.counts[0].tolist()
    assert (skipped, low) == tuple(counts.sum(0).tolist())
    assert 0 < skipped < low == computed


def test_without_a_rule_attention_is_exact_also_after_other_keys():
    query, key, value = inputs()
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE, enable_gqa=True)
    for first in (0, 448):
        out = run(study.Attention(1 << 18), query[:, :, first:], key, value)
        torch.testing.assert_close(out, expected[:, :, first:])


def first_chunk(rules):
    query, key, _ = inputs()
    return next(study.chunks_of(query, key, SCALE, rules, 1 << 30))


@pytest.mark.parametrize("name", ["even64", "norm64", "far64", "spread64~1", "pivot16", "axes1"])
def test_an_estimate_from_all_queries_or_all_channels_is_exact(name):
    rule = study.Rule.parse(f"{name}:1")
    chunk = first_chunk([rule])
    found, expected = (chunk.gap(each)[:, chunk.is_low] for each in (rule, study.TODAY))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["even8", "spread8", "pivot4", "axes4"])
def test_the_whole_slack_makes_an_estimate_an_upper_bound(name):
    whole, half = (study.Rule.parse(f"{name}~{slack}:1") for slack in (1, 0.5))
    chunk = first_chunk([whole])
    exact, bound, estimate = (chunk.gap(each)[:, chunk.is_low] for each in (study.TODAY, whole, half))
    assert (bound >= exact - 1e-4).all()
    assert (estimate < bound).any()


def test_an_unknown_rule_is_refused():
    with pytest.raises(study.typer.BadParameter, match="expected ESTIMATE"):
        study.Rule.parse("most8:1")


@pytest.mark.parametrize("kind", ["needle", "kv"])
def test_questions_fill_the_block_after_the_text_and_their_answers_are_in_it(kind):
    def tokenizer(text, add_special_tokens=True):
        return {"input_ids": [0] * add_special_tokens + [*map(ord, text)]}

    prompt = study.make_prompt(tokenizer, kind, [*map(ord, "word " * 1000)], 2048)
    assert len(prompt.body) == 2048 - 64
    assert [*map(len, prompt.questions)] == [64] * 8
    body = "".join(map(chr, prompt.body))
    for tokens, answer in zip(prompt.questions, prompt.answers, strict=True):
        asked = "".join(map(chr, tokens)).rpartition("\n")[2] + chr(answer[-1])
        assert body.count(asked) == 1
        assert asked.endswith("".join(map(chr, answer)))


def test_a_window_in_pieces_gives_the_result_of_one_piece(monkeypatch):
    query, key, value = inputs()
    position = torch.arange(1024)
    distance = position[:, None] - position
    mask = ((distance >= 0) & (distance < 100))[None, None]
    options = {"sliding_window": 100, "scaling": SCALE}
    module = SimpleNamespace(num_key_value_groups=2)
    expected = study.sdpa_attention_forward(module, query[:, :, 448:], key, value, mask[..., 448:, :], scaling=SCALE)
    monkeypatch.setattr(study, "WINDOW_PIECE", 200)
    out = study.Attention(1 << 18)(module, query[:, :, 448:], key, value, mask[..., 448:, :], **options)
    torch.testing.assert_close(out, expected)


def test_prompts_that_decode_together_give_the_answers_of_one_after_the_other():
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            eos_token_id=None,
        )
    ).eval()
    AttentionInterface.register(study.NAME, study.Attention(1 << 18))
    AttentionMaskInterface.register(study.NAME, study.sdpa_mask)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(64, (1, 128), generator=generator) for _ in range(3)]
    texts = [" ".join(map(str, model.generate(x, max_new_tokens=9)[0, 128:].tolist())) for x in prompts]
    tokenizer = SimpleNamespace(decode=lambda row: " ".join(map(str, row)))
    items = [study.Item(x[0].tolist(), [text, "no"], 9) for x, text in zip(prompts, texts, strict=True)]
    model.set_attn_implementation(study.NAME)
    caches, first = zip(*(study.prefill(model, item) for item in items), strict=True)
    assert study.generate(model, tokenizer, items, [*caches], torch.cat(first)) == [[1, 0]] * 3
