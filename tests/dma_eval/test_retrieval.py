"""Retrieval: prompts of the length asked for, the answer where it should be, and scores that tell found from not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dma_eval.config import RetrievalPart
from dma_eval.errors import UserError
from dma_eval.load.backends import Backend, parse_backends
from dma_eval.load.data import Text
from dma_eval.load.models import LoadedModel
from dma_eval.measures import retrieval
from dma_eval.measures.retrieval import _Prompts, default_lengths, measure_retrieval
from dma_eval.results import RetrievalKind, RetrievalSection, read_report
from dma_eval.session import Session, Store
from dma_eval.show.pages import retrieval_page

Run = Callable[..., Any]


def ask(loaded: LoadedModel, backends: Sequence[Backend], **options: Any) -> RetrievalSection:
    return measure_retrieval(Session(loaded, backends), "kv", RetrievalPart(**options))


@pytest.fixture
def prompts(loaded: LoadedModel, prose: str) -> Callable[[str], _Prompts]:
    return lambda kind: _Prompts(loaded.tokenizer, kind, Text(content=prose, name="prose"), 512)


class TestPrompts:
    @pytest.mark.parametrize("kind", ["needle", "kv"])
    @pytest.mark.parametrize("length", [200, 201, 512])
    @pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
    def test_length_and_answer(
        self, prompts: Callable[[str], _Prompts], loaded: LoadedModel, kind: str, length: int, depth: float
    ) -> None:
        prompt = prompts(kind).make(length, depth, random.Random(0))
        assert len(prompt.tokens) + len(prompt.answer) == length
        text, answer = loaded.tokenizer.decode(prompt.tokens), loaded.tokenizer.decode(prompt.answer)
        question = text[text.rindex("\n") :]  # what the prompt ends with was followed by the answer once before
        assert text.count(question + answer) == 1
        place = text.index(question + answer) / (len(text) - 2 * len(question) - len(answer))
        assert place == pytest.approx(depth, abs=0.12)

    @pytest.mark.parametrize("kind", ["needle", "kv"])
    def test_shortest(self, prompts: Callable[[str], _Prompts], kind: str) -> None:
        def tokens(length: int) -> int:
            prompt = prompts(kind).make(length, 0.5, random.Random(0))
            return len(prompt.tokens) + len(prompt.answer)

        with pytest.raises(UserError, match="8 tokens are too few for a prompt; the minimum is") as refused:
            tokens(8)
        shortest = int(str(refused.value).split()[-1])
        assert tokens(shortest) == shortest
        with pytest.raises(UserError, match=f"the minimum is {shortest}"):
            tokens(shortest - 1)

    def test_seed(self, prompts: Callable[[str], _Prompts]) -> None:
        make = prompts("kv").make
        assert make(256, 0.5, random.Random("a")) == make(256, 0.5, random.Random("a"))
        assert make(256, 0.5, random.Random("a")) != make(256, 0.5, random.Random("b"))


class TestScores:
    def test_a_model_that_knows_the_answer(self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        """Logits that point at the next token of the prompt itself find everything; of any other, nothing."""
        forward = loaded.model.forward

        def oracle(input_ids: torch.Tensor, shift: int = 0, **options: Any) -> Any:
            output = forward(input_ids=input_ids, **options)
            output.logits = torch.zeros_like(output.logits)
            for rows, tokens in zip(output.logits, answers[-len(input_ids) :], strict=True):
                for row, answer in zip(rows, tokens, strict=True):
                    row[answer + shift] = 50.0
            return output

        answers: list[list[int]] = []
        make = _Prompts.make

        def remember(self: _Prompts, *arguments: Any) -> Any:
            prompt = make(self, *arguments)
            answers.append(prompt.answer)
            return prompt

        monkeypatch.setattr(_Prompts, "make", remember)
        for shift, correct in ((0, 2), (1, 0)):
            monkeypatch.setattr(
                loaded.model,
                "forward",
                lambda input_ids, logits_to_keep=0, shift=shift, **options: oracle(
                    input_ids, shift, logits_to_keep=logits_to_keep, **options
                ),
            )
            section = ask(loaded, parse_backends(["sdpa"]), lengths=[128], depths=[0.5], samples=2)
            (cell,) = section.backends[0].cells
            assert (cell.correct, cell.samples) == (correct, 2)
            assert cell.nll == pytest.approx(50.0 * (shift != 0), abs=1e-6)

    def test_backends_are_asked_the_same(self, loaded: LoadedModel, identity_file: Path) -> None:
        backends = parse_backends(["sdpa", f"dma_mxfp:{identity_file}"])
        one, two = ask(loaded, backends, lengths=[256], depths=[0, 1], samples=2).backends
        assert [cell.correct for cell in one.cells] == [cell.correct for cell in two.cells]
        assert [cell.nll for cell in one.cells] == pytest.approx([cell.nll for cell in two.cells], abs=1e-4)

    @pytest.mark.usefixtures("broken_kernels")
    def test_failure_keeps_the_others(self, loaded: LoadedModel) -> None:
        backends = parse_backends(["sdpa", "dma_mxfp:paper"])
        section = ask(loaded, backends, lengths=[128], depths=[0.0, 1.0], samples=1)
        assert [len(backend.cells) for backend in section.backends] == [2, 0]
        assert "they begin in the output of model.layers.0.self_attn" in (section.backends[1].failure or "")
        assert retrieval_page(section).warnings


@pytest.mark.parametrize(
    ("limit", "lengths"), [(None, [1024, 2048, 4096]), (8192, [1024, 2048, 4096, 8192]), (512, [512]), (40_000, None)]
)
def test_default_lengths(limit: int | None, lengths: list[int] | None) -> None:
    assert default_lengths(limit) == (lengths or [4096, 8192, 16384, 32768])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "haystack"], "'--kind': 'haystack' is not one of 'needle', 'kv'"),
        (["--kind", "needle"], "--data: needles are hidden in a text; name one"),
        (["--data", "book.txt"], "--data: key-value pairs need no text; leave it out, or add --kind needle"),
        (["--column", "content"], "--column: only with --data, which names the text"),
        (["--lengths", "4096"], "takes 512 positions, got 4,096"),
        (["--depths", "1.5"], "'--depths': Input should be less than or equal to 1, got '1.5'"),
        (["--lengths", "8"], "--lengths: 8 tokens are too few for a prompt; the minimum is"),
    ],
)
def test_refused(
    run: Run, refused: Callable[[Any], str], model_folder: Path, arguments: list[str], message: str
) -> None:
    assert message in refused(run("retrieval", "-m", model_folder, "--device", "cpu", *arguments))


def test_command(run: Run, model_folder: Path, text_file: Path, tmp_path: Path) -> None:
    arguments = ["-m", model_folder, "-d", text_file, "--device", "cpu", "--kind", "kv", "needle", "--samples", 1]
    arguments += ["--lengths", 128, 256, "--depths", 0, 1, "--out", tmp_path / "run"]
    result = run("retrieval", *arguments)
    assert result.exit_code == 0, result.output
    assert [section.kind for section in read_report(tmp_path / "run/results.json").retrieval] == ["kv", "needle"]
    assert "1 question for each length and depth, the same for every backend" in result.stdout
    assert "sdpa finds nothing: the model itself cannot do this task" in " ".join(result.output.split())


def test_saved_questions_are_not_asked_again(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interruption, and when a backend is added: each has its own answers."""
    asked: list[str] = []
    original = retrieval._ask

    def ask_once(model: Any, backend: Backend, *arguments: Any, **options: Any) -> Any:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(backend.label)
        return original(model, backend, *arguments, **options)

    monkeypatch.setattr(retrieval, "_ask", ask_once)
    part = RetrievalPart(lengths=[128, 256], depths=[0.5], samples=1)

    def measure(*names: str) -> RetrievalSection:
        session = Session(loaded, parse_backends(names), store=Store(tmp_path))
        return measure_retrieval(session, RetrievalKind.KV, part)

    with pytest.raises(KeyboardInterrupt):
        measure("sdpa", "dma_mxfp:paper")
    assert asked == ["sdpa", "dma_mxfp:paper", "sdpa"]
    asked.clear()
    first = measure("sdpa", "dma_mxfp:paper")
    assert asked == ["dma_mxfp:paper"]
    asked.clear()
    second = measure("sdpa", "dma_mxfp:paper", "dma_mxfp:fp4")
    assert asked == ["dma_mxfp:fp4"] * 2
    assert second.backends[:2] == first.backends
