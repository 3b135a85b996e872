"""Windows of a text begin with BOS where the tokenizer adds it, as the prompts that a model is trained and used on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import prefill
import pytest
import torch
from dma_eval.load.models import load_model
from dma_eval.results import read_report
from dma_eval.show.render import section_pages

Run = Callable[..., Any]


@pytest.fixture
def measured(run, bos_folder, text_file, rows_read, tmp_path):
    """Run a command on a model whose tokenizer adds BOS; return its result and its report."""

    def invoke(command, *arguments, attn=("sdpa", "dma_mxfp:balanced+int8")):
        common = ("-m", bos_folder, "-d", text_file, "--device", "cpu", "--dtype", "float32", "--attn", *attn)
        result = run(command, *common, "--out", tmp_path / "run", *arguments, code=0)
        assert rows_read
        assert all(row[0] == 0 and 0 not in row[1:] for row in rows_read)
        return result, read_report(tmp_path / "run")

    return invoke


@pytest.mark.parametrize("stride", [None, 96])
def test_perplexity(measured, bos_folder, prose, stride):
    _, report = measured("ppl", "-c", 128, *([] if stride is None else ["--stride", stride]), attn=("sdpa",))
    (section,) = report.perplexity
    assert (section.begins_with, section.context) == (["<s>"], 128)
    assert section.tokens_scored == section.data.tokens - 1  # all except BOS
    how = "stride 96" if stride == 96 else "non-overlapping"
    (page,) = section_pages(report)
    assert f"windows of 128 tokens ({how}, each beginning with `<s>`)" in page.notes[1]
    loaded = load_model(str(bos_folder), dtype="float32", device="cpu")
    ids, losses, step = loaded.tokenize(prose).ids, [], min(stride or 127, 127)
    for begin in range(1, len(ids), step):
        window = torch.cat([ids[:1], ids[begin : begin + 127]])
        with torch.no_grad():
            log_probs = loaded.model(window[None]).logits[0].log_softmax(-1)
        own = -log_probs[:-1].gather(-1, window[1:, None]).squeeze(-1)
        losses.append(own if begin == 1 else own[127 - step :])
        if begin + 127 >= len(ids):
            break
    assert section.backends[0].nll == pytest.approx(torch.cat(losses).double().mean().item(), rel=1e-5)


def test_fidelity(measured, rows_read):
    """Windows, heads and prompts, also those from the second half of a window."""
    arguments = ["-c", 128, "--max-windows", 1, "--prompts", 2, "--new-tokens", 2, "--head-windows", 1]
    _, report = measured("fidelity", *arguments)
    assert report.fidelity[0].tokens.begins_with == ["<s>"]
    first, second = ([row[1:] for row in rows_read if len(row) == 64][i] for i in range(2))
    window = next(row[1:] for row in rows_read if len(row) == 128)
    assert (first, second) == (window[:63], window[63:126])


def test_equalize_needs_enough_full_windows(run, refused, bos_folder, prose, tmp_path):
    values = json.loads((bos_folder / "config.json").read_text(encoding="utf-8"))
    folder = shutil.copytree(bos_folder, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 300}), encoding="utf-8")
    (tmp_path / "text.txt").write_text(prose[:5000], encoding="utf-8")
    arguments = ("equalize", "-m", folder, "-d", tmp_path / "text.txt", "--device", "cpu", "--out", tmp_path / "equal")
    message = refused(run(*arguments, "--tokens", 1100))
    assert "--data: 1,100 tokens fill 3 windows of 300, too few to equalize; at least 4: give a longer text" in message
    assert run(*arguments, "--tokens", 1200).exit_code == 0


def test_equalize(run, bos_folder, text_file, rows_read, tmp_path):
    arguments = ["-m", bos_folder, "-d", text_file, "--device", "cpu", "--dtype", "float32", "--tokens", 1536]
    result = run("equalize", *arguments, "--out", tmp_path / "equal", code=0)
    assert 512 in {len(row) for row in rows_read}
    assert all(row[0] == 0 and 0 not in row[1:] for row in rows_read)
    assert "Ranges are measured over 1,536 tokens" in result.stdout


def test_inputs_of_benchmarks(run, bos_folder, text_file, rows_read, tmp_path):
    common = ["--data", text_file, "--batch", 2, "--device", "cpu"]
    given = map(str, ["--inputs", bos_folder, "--length", 140, "--dtype", "bfloat16", *common])
    ((shape, _),) = prefill.model_inputs(prefill.make_options().parse_args([*given]))
    assert "prose.txt after <s>" in shape.family
    assert shape.inputs.begins_with == ("<s>",)
    arguments = ["--model", bos_folder, "--context", 140, "--new-tokens", 8, "--run", "sdpa+dynamic"]
    run("bench", *arguments, *common, "--dtype", "float32", "--json", tmp_path / "generate.json", code=0)
    assert json.loads((tmp_path / "generate.json").read_text())["begins_with"] == ["<s>"]
    windows = {tuple(row) for row in rows_read if len(row) == 140}
    assert len(windows) == 2  # the same for both commands
    assert all(row[0] == 0 and 0 not in row[1:] for row in rows_read)
