"""Twins: scales are the same function with other channels, biases another one; the model itself is left as it was."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from dma_eval.config import PerplexityPart, StressPart
from dma_eval.equalization import measure_ranges
from dma_eval.equalization.weight_tracing import find_layers
from dma_eval.load.backends import parse_backends
from dma_eval.load.data import load_text
from dma_eval.load.reading import read
from dma_eval.measures.perplexity import cut
from dma_eval.measures.stress import TWINS, channel_ranges, measure_stress, stressed, study_thresholds
from dma_eval.results import StressSection, ThresholdStudy, has_failures, read_report
from dma_eval.session import Session
from dma_eval.show.pages import stress_page, verdict
from safetensors import SafetensorError
from tiny_models import DECODERS, VOCABULARY
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from dma_hf import DMAConfig

pytestmark = pytest.mark.usefixtures("no_gradients")


def _tokens(length=64):
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "cohere2", "deepseek_v3"])
@pytest.mark.parametrize("twin", [TWINS[1], TWINS[4], TWINS[5], TWINS[7]], ids=lambda twin: twin.name)
def test_scales_keep_the_function_and_biases_change_it(name, twin):
    model, tokens = DECODERS[name].build(DECODERS[name].reference), _tokens()
    model.config.dma_equalized = True
    before = model(input_ids=tokens[None]).logits
    ranges = measure_ranges(model, tokens)
    layers = find_layers(model, tokens)
    with stressed(model, layers, twin):
        during = model(input_ids=tokens[None]).logits
        changed = measure_ranges(model, tokens)
        assert model.config.dma_equalized == (twin.keys == 1 and twin.bias == 0)
    assert model.config.dma_equalized is True
    assert torch.equal(during, before) == (twin.bias == 0)
    assert torch.equal(model(input_ids=tokens[None]).logits, before)
    for module, (queries, keys) in changed.items():
        old_queries, old_keys = ranges[module]
        if twin.keys != 1:
            is_scaled = keys != old_keys
            torch.testing.assert_close(keys, torch.where(is_scaled, old_keys * twin.keys, old_keys))
            assert is_scaled.any(1).all()
            assert not is_scaled.all()
            torch.testing.assert_close(
                queries[queries != old_queries], (old_queries / twin.keys)[queries != old_queries]
            )
        elif twin.bias:
            assert (keys.amax(-1) > 0.9 * twin.bias).all()
        else:
            assert torch.equal(keys, old_keys)


def test_a_text_may_be_shorter_than_a_head_is_wide():
    model = DECODERS["llama"].build("sdpa")
    for short, long in zip(find_layers(model, _tokens(3)), find_layers(model, _tokens(64)), strict=True):
        assert torch.equal(short.key, long.key)
        assert torch.equal(short.mixed, long.mixed)


def test_the_outlier_channel_is_found():
    model, tokens = DECODERS["llama"].build("sdpa"), _tokens()
    plain = channel_ranges(model, tokens)[0]
    model.model.layers[1].self_attn.k_proj.weight[16 + 3] *= 64
    first, second = channel_ranges(model, tokens)[0]
    assert first == plain[0]
    assert (second.layer, second.head, second.channel in (3, 11)) == ("model.layers.1.self_attn", 1, True)
    assert second.ratio > 20


@pytest.fixture
def wild_folder(model_folder, tmp_path):
    """The tiny model with a key channel 512 times as large, and its queries as small."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    for pair in (0, 16):
        model.model.layers[1].self_attn.k_proj.weight[3 + pair] *= 512
        for head in (0, 32):
            model.model.layers[1].self_attn.q_proj.weight[head + 3 + pair] /= 512
    model.save_pretrained(tmp_path / "wild")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "wild")
    return tmp_path / "wild"


def test_command_stress(run, wild_folder, text_file, tmp_path, monkeypatch):
    arguments = ["-m", wild_folder, "-d", text_file, "--device", "cpu", "--context", 256, "--max-windows", 1]
    result = run("stress", *arguments, "--attn", "sdpa", "dma_mxfp:balanced", "--out", tmp_path / "run", code=0)
    (section,) = read_report(tmp_path / "run/results.json").stress
    assert [twin.name for twin in section.twins] == [twin.name for twin in TWINS]
    assert all(twin.tokens is not None and twin.refused is None for twin in section.twins)
    plain, *others = (twin.tokens.backends for twin in section.twins)
    for twin, backends in zip(TWINS[1:], others, strict=True):
        assert (backends[0].nll == plain[0].nll) == (twin.bias == 0)
        assert backends[1].kl_mean > 0
    assert section.range_tokens == 512  # of 1,024, of which the model has no positions
    assert section.key_ranges[1].ratio > 43 > section.key_ranges[0].ratio
    assert section.query_ranges[1].ratio < 43
    output = " ".join(result.output.split())
    assert "model.layers.1.self_attn; presets were tested up to 43x; run dma-hf equalize first" in output
    assert "largest query channel" not in output
    assert "1 window of 256 tokens (non-overlapping), 255 tokens predicted by every backend" in output
    monkeypatch.setattr("dma_eval.measures.perplexity._read_batch", None)  # nothing is read again
    again = run("stress", *arguments, "--attn", "sdpa", "dma_mxfp:balanced", "--out", tmp_path / "run", code=0)
    assert again.stderr.count("1 of 1 windows: taken from the folder") == len(TWINS)
    (resumed,) = read_report(tmp_path / "run/results.json").stress
    assert resumed == section


@pytest.fixture
def skipping(tmp_path):
    for name, threshold in {"plain": math.inf, "skipping": 0.05}.items():
        DMAConfig(skip_threshold=threshold, exact_until=0).to_toml(tmp_path / f"{name}.toml")
    return tmp_path


@pytest.mark.usefixtures("rows_decide_alone", "drawn")
def test_thresholds_are_tried_where_a_backend_skips(run, model_folder, text_file, skipping, tmp_path, monkeypatch):
    monkeypatch.setattr("dma_eval.measures.stress.THRESHOLDS", (0.01, 0.5))
    arguments = ["-m", model_folder, "-d", text_file, "--device", "cpu", "--context", 512, "--max-windows", 1]
    names = ["sdpa", f"dma_mxfp:{skipping}/plain.toml", f"dma_mxfp:{skipping}/skipping.toml"]
    result = run("stress", *arguments, "--attn", *names, "--out", tmp_path / "run", code=0)
    (section,) = read_report(tmp_path / "run/results.json").stress
    (study,) = section.thresholds
    assert (study.label, study.own, study.thresholds) == ("dma_mxfp:skipping", 0.05, [None, 0.5, 0.05, 0.01])
    assert study.skipped == sorted(study.skipped)
    assert study.skipped[0] == 0 < study.skipped[-1]
    plain = section.twins[0].tokens.backends
    assert study.tokens.backends[1].kl_mean == pytest.approx(plain[1].kl_mean)
    assert study.tokens.backends[3].kl_mean == pytest.approx(plain[2].kl_mean)
    assert re.search("the model (keeps its|loses) quality at skip_threshold = 0.05", " ".join(result.output.split()))
    assert {path.stem for path in (tmp_path / "run/configs").iterdir()} == {"plain", "skipping"}
    assert sorted(path.name for path in (tmp_path / "run/parts").iterdir()) == ["stress"]


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([1.0, 1.1, 1.2, 1.3], r"keeps its quality at skip_threshold = 6: .* within 1.25 times: 6, 30.00 % skipped"),
        ([1.0, 1.1, 1.4, 1.9], r"loses quality at skip_threshold = 6: .* within 1.25 times: 7, 20.00 % skipped"),
        ([1.0, 1.1, 1.2, 1.25], r"keeps its quality at skip_threshold = 6: .* within 1.25 times: 5, 40.00 % skipped"),
        ([1.0, 1.5, 1.7, 2.0], r"loses quality at skip_threshold = 6: .* No tested threshold .*: leave skipping off"),
        ([1.0, 1.5, None, 2.0], "is unknown, because a pass failed"),
    ],
)
def test_the_verdict_on_a_threshold(losses, message, compared):
    section = compared("sdpa", "dma_mxfp", context=64, max_windows=1)
    result = section.backends[1]
    backends = [section.backends[0], *(dataclasses.replace(result, kl_mean=loss) for loss in losses)]
    tokens = dataclasses.replace(section, backends=backends)
    thresholds, skipped = [None, 7.0, 6.0, 5.0], [0.0, 0.2, 0.3, 0.4]
    study = ThresholdStudy(label="b", own=6.0, thresholds=thresholds, skipped=skipped, tokens=tokens)
    assert re.search(message, verdict(study))


def test_a_failure_with_another_threshold_counts(compared):
    tokens = compared("sdpa", "dma_mxfp", context=64, max_windows=1)
    failed = dataclasses.replace(tokens.backends[1], failure="no room")
    for backend in (tokens.backends[1], failed):
        study = ThresholdStudy(
            label="b",
            own=6.0,
            thresholds=[None],
            skipped=[0.0],
            tokens=dataclasses.replace(tokens, backends=[tokens.backends[0], backend]),
        )
        section = StressSection(range_tokens=64, key_ranges=[], twins=[], thresholds=[study])
        assert has_failures(section) == (backend is failed)


def test_a_threshold_that_fails_leaves_the_others(loaded, text_file, tmp_path, monkeypatch):
    def fail(model, backend, *arguments, **options):
        if backend.label.endswith(", t = 4.0"):
            raise RuntimeError("no room")
        return read(model, backend, *arguments, **options)

    for module in ("perplexity", "stress"):
        monkeypatch.setattr(f"dma_eval.measures.{module}.read", fail)
    DMAConfig(skip_threshold=5.0).to_toml(tmp_path / "mine.toml")
    session = Session(loaded, parse_backends(["sdpa", f"dma_mxfp:{tmp_path}/mine.toml"]))
    reading = cut(loaded, load_text(str(text_file)), PerplexityPart(max_windows=1), 256)
    study = study_thresholds(session, reading, session.backends[1])
    assert study.tokens.backends[-1].failure == "no room"
    assert (study.thresholds[-1], study.skipped[-1]) == (4.0, None)
    assert None not in study.skipped[:-1]
    assert re.search("skip_threshold = 5", verdict(study))


def test_twins_of_another_seed_are_others(run, model_folder, text_file, tmp_path):
    """Windows that were read on the twins of the first are not those of the second, though they stay in the folder."""

    def divergences(seed):
        arguments = ["-m", model_folder, "-d", text_file, "-c", 512, "--max-windows", 1, "--device", "cpu"]
        arguments += ["--attn", "sdpa", "dma_mxfp:fp4", "--seed", seed, "--out", tmp_path / "run"]
        assert run("stress", *arguments).exit_code == 0
        assert (tmp_path / "run" / "parts" / "stress").is_dir()
        section = read_report(tmp_path / "run" / "results.json").stress[-1]  # after that of the other seed
        return [twin.tokens.backends[1].kl_mean for twin in section.twins]

    first, second = divergences(0), divergences(1)
    assert second[0] == pytest.approx(first[0])
    # Scales of values are those of their channels here, wherever these lie; so are biases of keys in fixed places.
    assert all(one != pytest.approx(two) for one, two in zip(first[1:5], second[1:5], strict=True))


def test_outlying_queries_and_a_gate_are_warned_of(loaded, text_file):
    """A gate leaves out the twins of values."""
    for layer in loaded.model.model.layers:
        layer.self_attn.q_proj.weight[[3, 19]] *= 512
    loaded.model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    session = Session(loaded, parse_backends(["sdpa"]))
    section = measure_stress(session, load_text(str(text_file)), StressPart(context=64, max_windows=1))
    assert section.twins[0].query_ratio == max(each.ratio for each in section.query_ranges) > 43
    assert [twin.name for twin in section.twins if twin.refused] == ["values x 8", "values x 32"]
    warnings = stress_page(section).warnings
    (line,) = (line for line in warnings if "equalize first" in line)
    assert line.startswith("this model's largest query channel is ")
    assert any("not available for this model: model.layers.0" in line for line in warnings)


def test_command_equalize(run, wild_folder, text_file, tmp_path):
    arguments = ["equalize", "-m", wild_folder, "-d", text_file, "--device", "cpu", "--out", tmp_path / "folder"]
    result = run(*arguments, code=0)
    assert "Largest key channel over the median one" in result.stdout
    assert "Ranges are measured over " in result.stdout
    tokens = _tokens(200)[None]
    plain, equal = (AutoModelForCausalLM.from_pretrained(folder) for folder in (wild_folder, tmp_path / "folder"))
    assert torch.equal(plain(input_ids=tokens).logits, equal(input_ids=tokens).logits)
    assert max(each.ratio for each in channel_ranges(equal, tokens[0])[0]) < 43
    assert "holds a model already; name another folder" in run(*arguments).stderr.replace("\n", " ")


def test_command_equalize_refuses(run, refused, model_folder, text_file, tmp_path):
    common = ("equalize", "-m", model_folder, "-d", text_file, "--device", "cpu", "--out", tmp_path / "folder")
    (tmp_path / "short.txt").write_text("the sea", encoding="utf-8")
    message = "--data: the text has 2 tokens, too few to equalize; at least 1,024"
    assert message in refused(run(*common, "-d", tmp_path / "short.txt"))
    assert "load the model unquantized, in float32 or bfloat16" in refused(run(*common, "--dtype", "float16"))
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError(28, "No space left on device"), "No space left on device"), (SafetensorError("I/O error"), "I/O error")],
    ids=str,
)
def test_a_model_that_cannot_be_written_leaves_nothing(
    error, reason, run, model_folder, text_file, tmp_path, monkeypatch
):
    """So that the command can be repeated, and nobody takes the rest for a model."""

    def fail(tokenizer, save_directory, **options):
        (Path(save_directory) / "tokenizer.json").write_text("{", encoding="utf-8")
        raise error

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", fail)
    folder = tmp_path / "folder"
    result = run("equalize", "-m", model_folder, "-d", text_file, "--device", "cpu", "--out", folder)
    assert result.exit_code == 2
    assert " ".join(result.stderr.split()) == f"Error: --out: cannot write to {folder}: {reason}"
    assert list(folder.iterdir()) == []
