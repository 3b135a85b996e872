"""RULER of lm-eval: prompts of a given length, with flips for each length."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import lm_eval
import pytest
from dma_eval.config import TasksPart
from dma_eval.errors import UserError
from dma_eval.load.backends import parse_backends
from dma_eval.measures.task_summary import TaskRecord
from dma_eval.measures.tasks import at_length, find_tasks, load_at_length, measure_tasks
from dma_eval.session import Session
from sampling import sampled

RULER = Path(lm_eval.__file__).parent / "tasks" / "ruler"


@pytest.fixture
def few_prompts(monkeypatch):
    """lm-eval makes 500 prompts of each length, with a bar of tqdm, and at import sorts all pairs of words.

    It loads a task's functions from their file, and those of ``niah`` as a module.
    """
    wonderwords = pytest.importorskip("wonderwords")

    class FewWords(wonderwords.RandomWord):
        def __init__(self):
            super().__init__()
            self._categories = {name: words[:50] for name, words in self._categories.items()}

    monkeypatch.setattr(wonderwords, "RandomWord", FewWords)

    def first_ones(samples, **_):
        return islice(samples, 5)

    for name in ("tqdm.tqdm", "lm_eval.tasks.ruler.prepare_niah.tqdm"):
        monkeypatch.setattr(name, first_ones)


@pytest.fixture
def evaluate(loaded):
    def run(name, lengths, folder=None):
        session = Session(loaded, parse_backends(["sdpa", "dma_mxfp:paper"]), folder=folder)
        part = TasksPart(names=[name], lengths=lengths, limit=3, batch_size=3)
        return measure_tasks(session, find_tasks([name], [RULER]), part)

    return run


@pytest.mark.parametrize(
    ("name", "metrics"),
    sampled(
        [("ruler_fwe", ["score", "all_found"]), ("niah_single_1", ["score"])], lambda name, metrics: name == "ruler_fwe"
    ),
)
@pytest.mark.usefixtures("few_prompts")
def test_each_length_has_its_own_paired_answers_and_resumes(evaluate, tmp_path, name, metrics):
    section = evaluate(name, [480, 512], tmp_path)
    assert [task.name for task in section.tasks] == [f"{name}, 480 tokens", f"{name}, 512 tokens"]
    for task, length in zip(section.tasks, (480, 512), strict=True):
        assert task.samples == 3
        assert [metric.name for metric in task.metrics] == metrics
        flips = task.metrics[-1].of("dma_mxfp:paper")
        assert None not in (flips.flips, flips.mcnemar_p, flips.low)
        files = [*tmp_path.rglob(f"*{length}-tokens*.json")]
        assert len(files) == 2
        assert all(f'"max_length":{length}' in file.read_text(encoding="utf-8") for file in files)
    (answers,) = [file for file in files if "paper" in str(file)]
    answers.unlink()
    assert evaluate(name, [480, 512], tmp_path).tasks == section.tasks  # the prompts are made again


def test_a_record_counts_the_answers_that_were_found():
    def sample(doc_id, score, answers):
        doc = {"outputs": ["x"] * answers}
        return {"doc_id": doc_id, "filter": "none", "prompt_hash": "", "doc": doc, "4096": -1.0, "8192": score}

    def made(answers):
        record = TaskRecord(
            name="ruler_vt",
            version="1.0",
            output_type="generate_until",
            num_fewshot=0,
            aggregations={"4096": None, "8192": None},
            higher_is_better={"4096": True, "8192": True},
            metrics={"4096,none": -1.0, "8192,none": 0.75},
            samples=[sample(0, 1.0, answers), sample(1, 0.5, answers)],
        )
        return at_length(record, 8192)

    assert made(5).metrics == {"score,none": 0.75, "all_found,none": 0.5}
    assert made(5).name == "ruler_vt, 8192 tokens"
    assert made(1).metrics == {"score,none": 0.75}


def test_lengths_that_cannot_be_measured_are_refused(run, refused, model_folder, tiny_tasks):
    common = ("lm-eval", "-m", model_folder, "--device", "cpu", "--attn", "sdpa")
    long = run(*common, "--tasks", "ruler_fwe", "--include-path", RULER, "--lengths", 512, 513)
    assert "--lengths: " in refused(long)
    assert "takes 512 positions, got 513" in refused(long)
    other = run(*common, "--tasks", "tiny_choice", "--include-path", tiny_tasks, "--lengths", 512)
    assert "--lengths: 'tiny_choice' reads a data set; only tasks that make their prompts take" in refused(other)


def test_missing_packages_are_named(loaded, monkeypatch):
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.ruler.cwe_utils", raising=False)
    with pytest.raises(UserError, match=r"'ruler_cwe' needs more packages: pip install 'dma-hf\[ruler\]' \(.*wonder"):
        load_at_length("ruler_cwe", RULER / "cwe.yaml", 512, loaded.tokenizer, 0)
