"""Caches of hybrid models are compared with the 16-bit cache in the same chunks: the chunks are not their loss."""

from __future__ import annotations

import pytest
import torch
from dma_eval.config import PerplexityPart
from dma_eval.load.backends import activate, needs_chunks, parse_backends, with_references
from dma_eval.load.data import load_text
from dma_eval.load.models import load_model
from dma_eval.load.reading import read
from dma_eval.measures import perplexity
from dma_eval.measures.perplexity import measure_perplexity
from dma_eval.results import read_report
from dma_eval.session import Session
from dma_eval.show.card import make_card
from dma_eval.show.pages import fidelity_page
from tiny_models import OTHERS
from transformers import AutoTokenizer, DynamicCache

import dma_hf
from dma_hf.integrations.internals import CACHE_ARGUMENT

NAMES = ("sdpa", "dma_mxfp:balanced", "dma_mxfp:balanced+int8")


@pytest.fixture(scope="module")
def hybrid_folder(model_folder, tmp_path_factory):
    """A hybrid of one layer with a recurrent state and one with attention."""
    folder = tmp_path_factory.mktemp("hybrid") / "bamba"
    changes = {"vocab_size": 300, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 0}
    OTHERS["bamba"].build("sdpa", **changes).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    return folder


@pytest.fixture
def hybrid(hybrid_folder):
    return load_model(str(hybrid_folder), dtype="float32", device="cpu")


@pytest.fixture
def measured(run, hybrid_folder, text_file, tmp_path):
    def invoke(command, *arguments, attn=NAMES):
        common = ("-m", hybrid_folder, "--device", "cpu", "--dtype", "float32", "--attn", *attn)
        text = () if command == "lm-eval" else ("-d", text_file)
        run(command, *common, *text, "--out", tmp_path / "run", *arguments, code=0)
        return read_report(tmp_path / "run")

    return invoke


def test_a_row_of_a_cache_shows_the_loss_of_the_cache(measured, tmp_path):
    """What the chunks cost has a row of its own."""
    (section,) = measured("ppl", "-c", 512, "--max-windows", 2).perplexity
    page = (tmp_path / "run/report.md").read_text(encoding="utf-8")
    assert "- `dma_mxfp:balanced+int8`: relative to `sdpa+dynamic`, which reads the same chunks" in page
    sdpa, balanced, chunks, int8 = section.backends
    assert [chunks.label, int8.label] == ["sdpa+dynamic", "dma_mxfp:balanced+int8"]
    assert [each.reference for each in section.backends] == [None, None, None, "sdpa+dynamic"]
    assert chunks.kl_mean > 1e-3
    assert 0 < int8.kl_mean < chunks.kl_mean / 100
    assert int8.change_percent == pytest.approx(100 * (int8.perplexity / chunks.perplexity - 1), abs=1e-6)
    assert balanced.change_percent == pytest.approx(100 * (balanced.perplexity / sdpa.perplexity - 1), abs=1e-6)


def test_a_card_keeps_it(measured, tiny_tasks):
    measured("lm-eval", "--tasks", "tiny_last_word", "--include-path", tiny_tasks, "--limit", 4)
    report = measured("ppl", "-c", 256, "--max-windows", 1, attn=(*NAMES, "dma_mxfp:paper"))
    text = make_card(report, backend=NAMES[2], base_model="me/tiny").text
    assert "| sdpa+dynamic |" in text
    assert f"| {NAMES[2]} |" in text
    assert "| dma_mxfp:paper |" not in text


def test_fidelity_has_both_references_in_fp32(measured):
    arguments = ("-c", 256, "--max-windows", 1, "--prompts", 1, "--new-tokens", 2, "--dtype", "bfloat16")
    (section,) = measured("fidelity", *arguments).fidelity
    labels = ["sdpa, fp32", "sdpa, fp32+dynamic", "sdpa", "dma_mxfp:balanced", "sdpa+dynamic", NAMES[2]]
    assert [each.label for each in section.tokens.backends] == labels
    references = [None, None, None, None, None, "sdpa, fp32+dynamic"]
    assert [each.reference for each in section.tokens.backends] == references
    assert [each.label for each in section.divergence] == labels[2:]


def test_heads_are_listed_with_the_number_of_their_layer(measured, tmp_path):
    """``high_layers`` takes these numbers, also where other layers have no attention."""
    dma_hf.DMAConfig(skip_threshold=6.0).to_toml(tmp_path / "mine.toml")
    attn = [f"dma_mxfp:{tmp_path}/mine.toml"]
    (section,) = measured("fidelity", "-c", 256, "--max-windows", 1, "--prompts", 0, attn=attn).fidelity
    (heads,) = section.heads
    assert heads.layers == [1]
    worst, skipped = (table for table in fidelity_page(section).tables if "layer" in " ".join(table.headers))
    assert all(each.startswith("1.") for each in worst.rows[0][-1].split(", "))
    assert [each.partition(" ")[0] for each in skipped.rows[0][-2:]] == ["1", "1"]


def test_tasks_are_paired_with_it(measured, tiny_tasks):
    arguments = ("--tasks", "tiny_last_word", "--include-path", tiny_tasks, "--limit", 4)
    (section,) = measured("lm-eval", *arguments).tasks
    assert [each.reference for each in section.backends] == [None, None, None, "sdpa+dynamic"]
    for metric in section.tasks[0].metrics:
        values = {each.label: each for each in metric.values}
        expected = values[NAMES[2]].value - values["sdpa+dynamic"].value
        assert values[NAMES[2]].difference == pytest.approx(expected)


def test_logits_of_the_reference_are_those_of_the_dynamic_cache(hybrid, prose):
    ids = hybrid.tokenize(prose).ids[None, :300]
    (backend,) = parse_backends(["sdpa+dynamic"])
    activate(hybrid.model, backend)
    cache, expected = DynamicCache(config=hybrid.model.config), []
    with torch.inference_mode():
        for begin in range(0, 300, 128):
            expected.append(hybrid.model(ids[:, begin : begin + 128], **{CACHE_ARGUMENT: cache}).logits)
    torch.testing.assert_close(read(hybrid.model, backend, ids), torch.cat(expected, 1))


def test_every_cache_of_other_models_is_compared_with_the_first_backend(compared):
    """Also if the 16-bit cache is named, and in any order."""
    found = [
        compared(*names, context=512, max_windows=1).backends
        for names in (("sdpa", "dma_mxfp+int4"), ("sdpa", "sdpa+dynamic", "dma_mxfp+int4"))
    ]
    assert [each.reference for each in found[1]] == [None, None, None]
    assert found[0][1].kl_mean > 1e-6
    assert found[1][2].kl_mean == found[0][1].kl_mean


def test_a_reference_may_be_named_after_what_is_compared_with_it(hybrid, text_file):
    part = PerplexityPart(contexts=[512], max_windows=1)

    def measure(*names):
        section = measure_perplexity(Session(hybrid, parse_backends(names)), load_text(str(text_file)), part)
        return {each.label: each for each in section.backends}

    before = measure("sdpa", "sdpa+dynamic", "dma_mxfp+int8")["dma_mxfp+int8"]
    after = measure("sdpa", "dma_mxfp+int8", "sdpa+dynamic")["dma_mxfp+int8"]
    assert before.kl_mean > 0
    assert (after.reference, after.kl_mean) == ("sdpa+dynamic", before.kl_mean)
    assert (after.kl_max, after.top1_agreement) == (before.kl_max, before.top1_agreement)


def test_it_is_added_once_and_only_for_caches(hybrid):
    def labels(*names):
        return [each.label for each in with_references(hybrid.model, parse_backends(names))]

    assert labels("sdpa", "dma_mxfp") == ["sdpa", "dma_mxfp"]
    assert labels("sdpa", "sdpa+dynamic", "dma_mxfp+int8") == ["sdpa", "sdpa+dynamic", "dma_mxfp+int8"]
    assert labels("sdpa", "dma_mxfp+int8", "sdpa+dynamic") == ["sdpa", "dma_mxfp+int8", "sdpa+dynamic"]
    assert labels("sdpa", "dma_mxfp+int8", "sdpa+hqq4") == ["sdpa", "sdpa+dynamic", "dma_mxfp+int8", "sdpa+hqq4"]
    others = ["sdpa", "sdpa+dynamic", "eager+dynamic", "dma_mxfp+int8"]
    assert labels("sdpa", "eager+dynamic", "dma_mxfp+int8") == others  # eager is not the first
    assert not needs_chunks(hybrid.model, parse_backends(["sdpa", "sdpa+dynamic"]))


def test_a_failed_one_leaves_the_others_without_a_comparison(hybrid, text_file, monkeypatch):
    forward = perplexity._forward

    def fail(model, backend, *others):
        if backend.label == "sdpa+dynamic":
            raise RuntimeError("no room")
        return forward(model, backend, *others)

    monkeypatch.setattr(perplexity, "_forward", fail)
    session, part = Session(hybrid, parse_backends(NAMES)), PerplexityPart(contexts=[256], max_windows=1)
    section = measure_perplexity(session, load_text(str(text_file)), part)
    *_, chunks, int8 = section.backends
    assert chunks.failure == "no room"
    assert (int8.kl_mean, int8.change_percent, int8.reference) == (None, None, "sdpa+dynamic")
    assert int8.perplexity is not None
