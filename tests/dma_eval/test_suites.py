"""Suites: the files that come with the package, files of one's own, and a run of all parts."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from dma_eval import console
from dma_eval.config import PARTS, load_suite, suite_names
from dma_eval.errors import UserError
from dma_eval.load.backends import default_names
from dma_eval.load.data import load_text
from dma_eval.measures import fidelity
from dma_eval.results import read_report

ROOT = Path(__file__).parents[2]
EVERYTHING = """
description = "all parts"
[perplexity]
contexts = [128, 512]
max_windows = 1
[fidelity]
context = 128
max_windows = 1
new_tokens = 4
[tasks]
names = ["tiny_choice"]
limit = 4
batch_size = 3
"""


class TestFiles:
    def test_are_valid_and_shown_in_configs(self):
        assert suite_names() == sorted(path.stem for path in (ROOT / "configs/suites").glob("*.toml"))
        for name in suite_names():
            suite = load_suite(name)
            assert suite.description
            assert suite.tasks is not None

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", f"nothing to measure; give one of the tables {', '.join(f'[{part}]' for part in PARTS)}"),
            ("ppl = 1", "unknown key 'ppl'; valid: description, perplexity, fidelity, tasks, stress"),
            ("[fidelity]\nhead_windows = -1", r"\[fidelity\] head_windows: expected at least 0, got -1"),
            ("[tasks]\nnames = ['x']\nlengths = [4096, 0]", r"\[tasks\] lengths: expected at least 1, got 0"),
            ("[perplexity]\ncontexts = [128, 1]", r"\[perplexity\] contexts: expected at least 2, got 1"),
            ("[perplexity]\ncontexts = [0]", r"\[perplexity\] contexts: expected at least 2, got 0"),
            ("[tasks]\nnames = []", r"\[tasks\] names: expected at least one value"),
            ("[tasks]\nname = 1", r"\[tasks\] unknown key 'name'; valid: names, limit, num_fewshot"),
            ("[tasks]", "tasks.names: Field required"),
            ("[tasks]\nnames = 'arc_easy'", "tasks.names: Input should be a valid array, got 'arc_easy'"),
            ("tasks = 3", "tasks: Input should be an object, got 3"),
            ("[tasks", "Expected"),
        ],
    )
    def test_refused(self, tmp_path, content, message):
        path = tmp_path / "mine.toml"
        path.write_text(content, encoding="utf-8")
        pattern = message if "\\" in message else message.replace("[", r"\[").replace("]", r"\]")
        with pytest.raises(UserError, match=pattern) as caught:
            load_suite(str(path))
        assert str(caught.value).startswith(f"--suite: {path}: ")

    def test_a_byte_order_mark_is_no_part_of_a_file(self, tmp_path):
        (tmp_path / "mine.toml").write_text("[perplexity]\ncontexts = [128]\n", encoding="utf-8-sig")
        assert load_suite(str(tmp_path / "mine.toml")).perplexity.contexts == [128]

    def test_unknown(self):
        with pytest.raises(UserError, match=f"unknown suite 'fast'; valid: {', '.join(suite_names())}"):
            load_suite("fast")
        with pytest.raises(UserError, match=r"--suite: cannot read none.toml: No such file"):
            load_suite("none.toml")


def test_a_suite_that_no_context_fits(run, model_folder, text_file, tiny_tasks, tmp_path):
    """Its report is empty, and no other length is measured instead."""
    content = "[perplexity]\ncontexts = [4096]\n[fidelity]\ncontext = 4096\n[stress]\ncontext = 4096\n"
    content += "[tasks]\nnames = ['tiny_choice']\nlengths = [4096]\n"
    (tmp_path / "long.toml").write_text(content, encoding="utf-8")
    common = ("-m", model_folder, "--device", "cpu", "-d", text_file, "--attn", "sdpa", "--out", tmp_path / "run")
    options = ("--suite", tmp_path / "long.toml", "--include-path", tiny_tasks)
    result = run("suite", *options, *common, code=0)
    for part in ("perplexity", "fidelity", "tasks", "stress"):
        assert f"{part} at 4,096 is skipped: the model has 512 positions" in result.stderr
    assert read_report(tmp_path / "run").sections == []


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("[tasks]\nnames = ['x']", ["--max-windows", 1], "--max-windows: suite {} measures no perplexity or fidelity"),
        ("[stress]", ["--batch-size", 1], "--batch-size: suite {} measures no tasks"),
        ("[tasks]\nnames = ['x']", ["--data", "x.txt"], "--data: suite {} reads no text; leave it out"),
        ("[perplexity]", [], "--data: suite {} names no text of its own; name one"),
    ],
)
def test_options_that_a_suite_cannot_use(run, refused, model_folder, tmp_path, content, arguments, message):
    path = tmp_path / "mine.toml"
    path.write_text(content, encoding="utf-8")
    result = run("suite", "--suite", path, "-m", model_folder, "--out", tmp_path / "run", *arguments)
    assert message.format(path) in refused(result)


class TestRun:
    @pytest.fixture
    def suite(self, run, model_folder, text_file, tiny_tasks, tmp_path):
        (tmp_path / "mine.toml").write_text(EVERYTHING, encoding="utf-8")

        def invoke(*arguments, code=None):
            common = ("-m", model_folder, "--device", "cpu", "--include-path", tiny_tasks, "--out", tmp_path / "run")
            return run("suite", "--suite", tmp_path / "mine.toml", *common, "-d", text_file, *arguments, code=code)

        return invoke

    def test_all_parts(self, suite, tmp_path, monkeypatch):
        """Several parts read a text that is loaded once."""
        load = mock.Mock(wraps=load_text)
        monkeypatch.setattr("dma_eval.run.load_text", load)
        result = suite("--attn", "sdpa", "dma_mxfp:paper")
        assert load.call_count == 1
        assert result.exit_code == 0, result.output
        report = read_report(tmp_path / "run/results.json")
        assert [section.context for section in report.perplexity] == [128, 512]
        assert [len(part) for part in (report.fidelity, report.tasks)] == [1, 1]
        assert report.tasks[0].batch_size == 3

    def test_the_copy_in_fp32_is_gone_after_its_part(self, suite, tmp_path, monkeypatch):
        """Not when Python happens to look for cycles: what later parts need of the memory is measured."""
        copies = []
        left = []
        copied = fidelity.in_fp32
        monkeypatch.setattr(
            fidelity, "in_fp32", lambda model: (made := copied(model), copies.append(weakref.ref(made)))[0]
        )
        monkeypatch.setattr(console, "print_page", lambda page: left.extend(copy() for copy in copies))
        (tmp_path / "mine.toml").write_text(
            "[perplexity]\ncontexts = [128]\n[fidelity]\ncontext = 128\nhead_windows = 0\nprompts = 0\n",
            encoding="utf-8",
        )
        gc.disable()
        try:
            result = suite("--attn", "sdpa", "dma_mxfp:paper", "--dtype", "bfloat16", "--max-windows", 1)
        finally:
            gc.enable()
        assert result.exit_code == 0, result.output
        assert left == [None]

    def test_gsm8k_of_a_local_file(self, run, tmp_path, monkeypatch):
        """With a model that gives the same answer to both questions."""
        asked = []

        def answer(lm, requests, **_):
            asked.extend(request.args[0] for request in requests)
            return ["1 and 0 make 1. The answer is 1."] * len(requests)

        monkeypatch.setattr("dma_eval.harness.DMALM.generate_until", answer)
        monkeypatch.chdir(tmp_path)
        rows = [{"question": f"What is {n} + 1?", "answer": f"<<{n}+1={n + 1}>>\n#### {n + 1}"} for n in range(3)]
        Path("gsm8k_test.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        model = ("-m", ROOT / "eval/dma_eval/assets/demo_model", "--device", "cpu", "--dtype", "float32")
        options = ("--include-path", ROOT / "configs/suites/tasks", "--limit", 2, "--attn", "sdpa", "--out", "run")
        run("suite", "--suite", "gsm8k-local", *model, *options, code=0)
        (task,) = read_report(Path("run")).tasks[0].tasks
        assert (task.name, task.samples, task.num_fewshot) == ("gsm8k_local", 2, 8)
        assert [metric.of("sdpa").value for metric in task.metrics] == [0.5, 0.5]
        assert all(prompt.count("The answer is") == 8 for prompt in asked)
        assert asked[0].endswith("Q: What is 0 + 1?\nA:")

    def test_resumes_where_it_stopped(self, suite, tmp_path, monkeypatch):
        attn = ("--attn", "sdpa", "dma_mxfp:balanced+int4")
        stress = mock.Mock(side_effect=TypeError)  # as if the command were cut off in the last part
        monkeypatch.setattr("dma_eval.run.measure_stress", stress)
        (tmp_path / "mine.toml").write_text(f"{EVERYTHING}[stress]\ncontext = 128\n", encoding="utf-8")
        assert suite(*attn).exit_code == 1
        before = read_report(tmp_path / "run/results.json")
        for name in ("perplexity._read_batch", "fidelity.in_fp32", "fidelity.head_errors", "fidelity._divergence"):
            monkeypatch.setattr(f"dma_eval.measures.{name}", lambda *_, **__: pytest.fail("measured again"))
        result = suite(*attn)
        assert stress.call_count == 2
        assert result.stderr.count("taken from the folder") == 3 + 2  # perplexity twice, fidelity, and two task units
        after = read_report(tmp_path / "run/results.json")
        assert (after.perplexity, after.fidelity, after.tasks) == (before.perplexity, before.fidelity, before.tasks)

    @pytest.mark.parametrize("error", [UserError("no room"), torch.OutOfMemoryError("no room")])
    def test_failure_of_a_part(self, suite, tmp_path, monkeypatch, error):
        """Others are measured with the default: every preset."""

        def fail(*arguments, **options):
            raise error

        monkeypatch.setattr("dma_eval.run.measure_fidelity", fail)
        monkeypatch.setattr("dma_eval.run.measure_perplexity", fail)
        result = suite("--limit", 1)
        assert result.exit_code == 1
        for part in ("perplexity, 128", "perplexity, 512", "fidelity"):
            assert f"Error: {part} failed: no room" in result.stderr
        report = read_report(tmp_path / "run/results.json")
        assert [len(part) for part in (report.perplexity, report.fidelity, report.tasks)] == [0, 0, 1]
        assert [backend.label for backend in report.tasks[0].backends] == default_names()
        assert "Wrote results.json" in result.stdout

    def test_failed_and_damaged_pieces_are_measured_anew(self, suite, tmp_path, monkeypatch):
        (tmp_path / "mine.toml").write_text("[perplexity]\ncontexts = [128]\nmax_windows = 1\n", encoding="utf-8")
        attn = ("--attn", "sdpa", "dma_mxfp:paper")
        with monkeypatch.context() as patch:
            patch.setattr("dma_hf.attention.attention", lambda query, *_, **__: query * float("nan"))
            assert suite(*attn).exit_code == 1
        assert suite(*attn).exit_code == 0
        (file,) = (tmp_path / "run/parts").rglob("*.json")  # its window
        file.write_text(file.read_text(encoding="utf-8")[:300], encoding="utf-8")
        result = suite(*attn)
        assert (result.exit_code, "taken from" in result.stderr) == (0, False)
