"""Tasks under several backends: lm-eval's own numbers, paired, resumed, and split over processes."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from dma_eval.config import TasksPart
from dma_eval.console import Progress
from dma_eval.errors import UserError
from dma_eval.files import slug
from dma_eval.load.backends import Backend, parse_backends
from dma_eval.load.models import LoadedModel
from dma_eval.measures import tasks as tasks_module
from dma_eval.measures.tasks import find_tasks, measure_tasks
from dma_eval.results import Report, TaskResult, TaskSection, read_report
from dma_eval.session import Session, Store
from dma_eval.show.pages import task_page
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

Run = Callable[..., Any]
Evaluate = Callable[..., TaskSection]
ALL = "tiny_choice,tiny_last_word,tiny_text,tiny_answer,tiny_few"


@pytest.fixture
def evaluate(loaded: LoadedModel, tiny_tasks: Path) -> Evaluate:
    def run(
        names: str, *attn: str, folder: Path | None = None, seen: list[Any] | None = None, seed: int = 0, **options: Any
    ) -> TaskSection:
        class Seen(Progress):
            def begin(self, what: str, steps: int | None = None) -> None:
                if seen is not None:
                    seen.append((what, "measured"))

            def kept(self, what: str) -> None:
                if seen is not None:
                    seen.append((what, "kept"))

        backends = parse_backends(attn or ("sdpa", "dma_mxfp:balanced", "dma_mxfp:paper"))
        session = Session(loaded, backends, store=Store(folder), progress=Seen(), seed=seed)
        return measure_tasks(session, find_tasks([names], [tiny_tasks]), TasksPart(names=[names], **options))

    return run


def by_name(section: TaskSection) -> dict[str, TaskResult]:
    return {task.name: task for task in section.tasks}


class TestNumbers:
    def test_are_lm_evals(self, evaluate: Evaluate, loaded: LoadedModel, tiny_tasks: Path) -> None:
        section = evaluate(ALL, "sdpa")
        manager = TaskManager(include_path=str(tiny_tasks), include_defaults=False)
        lm = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=4)
        expected = simple_evaluate(
            lm, tasks=ALL.split(","), task_manager=manager, bootstrap_iters=0, fewshot_random_seed=0
        )["results"]
        checked = 0
        for task in section.tasks:
            for metric in task.metrics:
                (value,) = metric.values
                assert value.value == pytest.approx(expected[task.name][f"{metric.name},{metric.filter}"], rel=1e-4)
                checked += 1
        assert checked == 8

    def test_identity_changes_nothing(self, evaluate: Evaluate, identity_file: Path) -> None:
        section = evaluate(ALL, "sdpa", f"dma_mxfp:{identity_file}")
        for task in section.tasks:
            for metric in task.metrics:
                assert metric.values[1].difference == pytest.approx(
                    0, abs=1e-3 * max(1.0, abs(metric.values[0].value or 0))
                )
                if metric.right_or_wrong:
                    assert (metric.values[1].lost, metric.values[1].gained, metric.values[1].mcnemar_p) == (0, 0, 1.0)

    def test_group(self, evaluate: Evaluate) -> None:
        section = evaluate("tiny_group", "sdpa", limit=6)
        assert [task.name for task in section.tasks] == ["tiny_choice", "tiny_few"]
        (group,) = section.groups
        accuracies = [task.metrics[0].values[0].value for task in section.tasks]
        assert group.values["sdpa"] == pytest.approx(np.mean([value or 0.0 for value in accuracies]))
        assert section.backends[0].mean_accuracy == pytest.approx(np.mean([value or 0.0 for value in accuracies]))

    def test_fewshot(self, evaluate: Evaluate) -> None:
        found = by_name(evaluate("tiny_choice,tiny_few", "sdpa", limit=3))
        assert [found[name].num_fewshot for name in ("tiny_choice", "tiny_few")] == [0, 2]
        assert by_name(evaluate("tiny_few", "sdpa", limit=3, num_fewshot=1))["tiny_few"].num_fewshot == 1


class TestPairs:
    def test_every_backend_has_the_same_prompts(self, evaluate: Evaluate, tmp_path: Path) -> None:
        """Examples are drawn anew for each backend; without a seed they would be others."""
        evaluate("tiny_few", "sdpa", "dma_mxfp:paper", folder=tmp_path)
        hashes = []
        for label in ("sdpa", "dma_mxfp:paper"):
            record = json.loads((tmp_path / "samples" / slug(label) / "tiny_few.json").read_text(encoding="utf-8"))
            hashes.append([sample["prompt_hash"] for sample in record["content"]["tasks"][0]["samples"]])
        assert hashes[0] == hashes[1]
        assert len(set(hashes[0])) == 24

    def test_every_backend_draws_the_same_answers(self, evaluate: Evaluate, tiny_tasks: Path, tmp_path: Path) -> None:
        """Of a task that samples; else two runs of one backend would differ."""
        task = yaml.safe_load((tiny_tasks / "tiny_answer.yaml").read_text(encoding="utf-8"))
        task["generation_kwargs"] |= {"do_sample": True, "temperature": 2.0}
        file = tmp_path / "tiny_drawn.yaml"
        file.write_text(yaml.safe_dump(task | {"task": "tiny_drawn"}), encoding="utf-8")
        evaluate(str(file), "sdpa", "sdpa", folder=tmp_path)
        one, two = (
            [sample["filtered_resps"] for sample in record["content"]["tasks"][0]["samples"]]
            for path in sorted((tmp_path / "samples").rglob("*.json"))
            for record in [json.loads(path.read_text(encoding="utf-8"))]
        )
        assert one == two

    def test_other_prompts_are_refused(self, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
        from lm_eval.api.task import Task

        monkeypatch.setattr(Task, "set_fewshot_seed", lambda self, seed: None)
        with pytest.raises(RuntimeError, match="task tiny_few: dma_mxfp:paper got other questions"):
            evaluate("tiny_few", "sdpa", "dma_mxfp:paper")

    def test_differences(self, evaluate: Evaluate) -> None:
        """A backend of another quality: its numbers, intervals and flips belong together."""
        section = evaluate("tiny_last_word", "sdpa", "dma_mxfp:paper")
        for metric in section.tasks[0].metrics:
            reference, other = metric.values
            assert reference.difference is None
            assert other.difference == pytest.approx((other.value or 0) - (reference.value or 0))
            assert other.low is not None
            assert other.high is not None
            assert other.low <= other.difference <= other.high
            if metric.right_or_wrong:
                assert ((other.gained or 0) - (other.lost or 0)) / 24 == pytest.approx(other.difference)

    def test_as_many_passes_as_lm_eval_itself(
        self, evaluate: Evaluate, loaded: LoadedModel, tiny_tasks: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of every kind of task, one after the other as ours are; each backend costs as many again."""
        monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # it runs pip, each time
        passes: list[tuple[int, ...]] = []
        loaded.model.register_forward_pre_hook(
            lambda module, args, kwargs: passes.append(tuple((args[0] if args else kwargs["input_ids"]).shape)),
            with_kwargs=True,
        )
        manager = TaskManager(include_path=str(tiny_tasks), include_defaults=False)
        lm = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=4)
        for name in ALL.split(","):
            simple_evaluate(lm, tasks=[name], task_manager=manager, bootstrap_iters=0, fewshot_random_seed=0)
        expected = list(passes)
        passes.clear()
        evaluate(ALL, "sdpa", "eager", batch_size=4)
        assert len(passes) == 2 * len(expected)
        assert sorted(passes) == sorted(2 * expected)


class TestResuming:
    def test_takes_what_is_there(self, evaluate: Evaluate, tmp_path: Path) -> None:
        names = "tiny_choice,tiny_text"
        first = evaluate(names, "sdpa", "dma_mxfp:paper", folder=tmp_path)
        (tmp_path / "samples" / slug("dma_mxfp:paper") / "tiny_text.json").unlink()
        seen: list[Any] = []
        second = evaluate(names, "sdpa", "dma_mxfp:paper", folder=tmp_path, seen=seen)
        assert [how for _, how in seen] == ["kept", "kept", "kept", "measured"]
        assert second.tasks == first.tasks

    def test_data_of_finished_tasks_is_not_loaded(
        self, evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = evaluate("tiny_choice", "sdpa", folder=tmp_path)
        monkeypatch.setattr(tasks_module, "_load", None)
        assert evaluate("tiny_choice", "sdpa", folder=tmp_path).tasks == first.tasks

    @pytest.mark.parametrize("change", [{"limit": 7}, {"seed": 1}, {"num_fewshot": 1}])
    def test_other_settings_are_evaluated(self, evaluate: Evaluate, tmp_path: Path, change: dict[str, int]) -> None:
        evaluate("tiny_choice", "sdpa", folder=tmp_path)
        seen: list[Any] = []
        evaluate("tiny_choice", "sdpa", folder=tmp_path, seen=seen, **change)
        assert seen == [("tiny_choice, sdpa", "measured")]

    @pytest.fixture
    def composed(self, tmp_path: Path) -> Path:
        """A group of a task that includes a file with functions from elsewhere, and reads data from two files."""
        folder, shared = tmp_path / "tasks", tmp_path / "shared"
        shared.mkdir()
        (folder / "data").mkdir(parents=True)
        for part, word in (("a", "ship"), ("b", "sea")):
            row = json.dumps({"question": "the white", "word": word}) + "\n"
            (folder / f"data/{part}.jsonl").write_text(row, encoding="utf-8")
        (shared / "common.yaml").write_text(
            "output_type: loglikelihood\ndoc_to_text: '{{question}}'\ndoc_to_target: !function functions.target\n"
            "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\ntest_split: test\n",
            encoding="utf-8",
        )
        (shared / "helpers.py").write_text("END = ''\n", encoding="utf-8")
        (shared / "functions.py").write_text(
            f"import runpy\nEND = runpy.run_path({str(shared / 'helpers.py')!r})['END']\n"
            "def target(doc):\n    return f\" {doc['word']}{END}\"\n",
            encoding="utf-8",
        )
        (folder / "member.yaml").write_text(
            f"task: member\ninclude: ../shared/common.yaml\ntag: [tagged]\ndataset_path: json\n"
            f"dataset_kwargs: {{data_files: {{test: '{folder}/data/*.jsonl'}}}}\n",
            encoding="utf-8",
        )
        (folder / "group.yaml").write_text(
            "group: composed\ntask: [{task: member, num_fewshot: 0}]\n", encoding="utf-8"
        )
        return folder

    @pytest.mark.parametrize("name", ["member", "composed", "tagged", "member.yaml"])
    @pytest.mark.parametrize(
        ("file", "before", "after"),
        [
            ("data/b.jsonl", "sea", "whale"),
            ("data/c.jsonl", "", '{"question": "the", "word": "sea"}\n'),
            ("../shared/common.yaml", "'{{question}}'", "'{{question}} and the'"),
            ("../shared/functions.py", "END}", "END} and"),
            ("../shared/helpers.py", "''", "' and'"),
            ("member.yaml", "dataset_path", "description: 'Say: '\ndataset_path"),
        ],
    )
    def test_a_change_of_what_a_task_resolves_to_is_evaluated(
        self, loaded: LoadedModel, composed: Path, name: str, file: str, before: str, after: str
    ) -> None:
        kept: list[str] = []

        class Seen(Progress):
            def kept(self, what: str) -> None:
                kept.append(what)

        asked = str(composed / name) if name.endswith(".yaml") else name
        session = Session(loaded, parse_backends(["sdpa"]), Store(composed / "run"), progress=Seen())

        def evaluate() -> TaskSection:
            return measure_tasks(session, find_tasks([asked], [composed]), TasksPart(names=[asked]))

        evaluate()
        evaluate()
        assert len(kept) == 1  # nothing has changed
        path = composed / file
        path.write_text(path.read_text(encoding="utf-8").replace(before, after, 1) if path.exists() else after)
        evaluate()
        assert len(kept) == 1

    def test_interrupted(self, evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        original = tasks_module._evaluate

        def interrupt(lm: Any, unit: Any, backend: Backend, *others: Any) -> Any:
            if backend.label == "dma_mxfp:paper":
                raise KeyboardInterrupt
            return original(lm, unit, backend, *others)

        with monkeypatch.context() as patch:
            patch.setattr(tasks_module, "_evaluate", interrupt)
            with pytest.raises(KeyboardInterrupt):
                evaluate("tiny_choice", "sdpa", "dma_mxfp:paper", folder=tmp_path)
        seen: list[Any] = []
        evaluate("tiny_choice", "sdpa", "dma_mxfp:paper", folder=tmp_path, seen=seen)
        assert [how for _, how in seen] == ["kept", "measured"]

    def test_a_full_disk(self, evaluate: Evaluate, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            with pytest.raises(UserError, match=r"--out: cannot save answers to .*\.partial: disk I/O error"):
                evaluate("tiny_choice", "sdpa", folder=tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "sqlite" not in capfd.readouterr().err

    @pytest.mark.parametrize("task", ["tiny_last_word", "tiny_answer"])  # lm-eval keeps rolling losses at the end
    def test_interrupted_within_a_task(
        self, evaluate: Evaluate, loaded: LoadedModel, tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It goes on after the batches that were answered, by lm-eval's own cache."""
        expected = evaluate(task, "sdpa", batch_size=4)
        asked: list[int] = []
        most = 10**9

        def count(module: Any, args: Any, kwargs: Any) -> None:
            asked.append(1)
            if len(asked) > most:
                raise KeyboardInterrupt

        loaded.model.register_forward_pre_hook(count, with_kwargs=True)
        evaluate(task, "sdpa", batch_size=4)
        whole = len(asked)
        most = whole // 2
        asked.clear()
        with pytest.raises(KeyboardInterrupt):
            evaluate(task, "sdpa", folder=tmp_path, batch_size=4)
        most = 10**9
        asked.clear()
        resumed = evaluate(task, "sdpa", folder=tmp_path, batch_size=4)
        assert len(asked) < whole
        assert resumed.tasks == expected.tasks
        assert resumed.backends[0].low_share == expected.backends[0].low_share
        assert not list(tmp_path.rglob("*.partial"))

    def test_answers_of_other_settings_are_not_taken(self, evaluate: Evaluate, tmp_path: Path) -> None:
        store = Store(tmp_path)
        assert store.scratch({"limit": 1}, "a") != store.scratch({"limit": 2}, "a")
        assert store.scratch({"limit": 1}, "a") == store.scratch({"limit": 1}, "a")
        assert Store().scratch({}, "a") is None

    @pytest.mark.parametrize("name", ["a", "dma_mxfp:fp4", "dma_mxfp:fp4 #2", "ü/../x", "..", "a-b", "a:b", "a/b"])
    def test_file_names(self, name: str) -> None:
        assert "/" not in slug(name)
        assert slug(name) not in ("", ".", "..")
        assert len({slug(each) for each in ("a-b", "a:b", "a/b", "a b")}) == 4


class TestFailure:
    @pytest.mark.usefixtures("broken_kernels")
    def test_keeps_the_others(self, evaluate: Evaluate, tmp_path: Path) -> None:
        """NaN under one backend: it is stopped, its layer is named, and the others' results stand."""
        section = evaluate("tiny_choice,tiny_answer", "sdpa", "dma_mxfp:paper", folder=tmp_path)
        failures = section.backends[1].failures
        assert failures.keys() == {"tiny_choice", "tiny_answer"}
        assert "NaN or infinite logits; they begin in the output of model.layers.0.self_attn" in failures["tiny_choice"]
        assert section.backends[1].mean_accuracy is None
        for task in section.tasks:
            for metric in task.metrics:
                assert metric.values[0].value is not None
                assert (metric.values[1].value, metric.values[1].difference) == (None, None)
        assert any("dma_mxfp:paper failed in tiny_choice" in line for line in task_page(section).warnings)
        kept = (tmp_path / "samples" / slug("dma_mxfp:paper")).rglob("*")
        assert not list(kept)  # so that the next run tries again

    @pytest.mark.usefixtures("broken_kernels")
    def test_of_the_reference(self, evaluate: Evaluate) -> None:
        section = evaluate("tiny_choice", "dma_mxfp:paper", "sdpa")
        values = section.tasks[0].metrics[0].values
        assert (values[0].value, values[1].difference, values[1].low) == (None, None, None)
        assert values[1].value is not None
        assert task_page(section).tables


class TestNames:
    @pytest.mark.slow  # lm-eval looks through all its own tasks
    def test_unknown_lists_near_and_local_ones(self, tiny_tasks: Path) -> None:
        with pytest.raises(UserError, match=r"unknown task 'tiny_choic'; did you mean: tiny_choice, .*in --incl"):
            find_tasks(["tiny_choic"], [tiny_tasks])

    @pytest.mark.parametrize(
        ("names", "folders", "message"),
        [
            (["", ","], [], "--tasks needs at least one name"),
            (["a"], ["none"], "--include-path: no such folder"),
            (["missing.yaml"], [], "--tasks: cannot read missing.yaml: No such file"),
        ],
    )
    def test_what_is_not_there(self, names: list[str], folders: list[str], message: str) -> None:
        with pytest.raises(UserError, match=message):
            find_tasks(names, [*map(Path, folders)])

    @pytest.mark.parametrize(("file", "message"), [("none.jsonl", ""), ("empty.jsonl", "its data have no rows")])
    def test_lacking_data(self, tmp_path: Path, loaded: LoadedModel, file: str, message: str) -> None:
        (tmp_path / "empty.jsonl").touch()
        data = f"{{data_files: {{test: {tmp_path / file}}}}}"
        text = f"task: gone\ndataset_path: json\ndataset_kwargs: {data}\ntest_split: test\n"
        (tmp_path / "gone.yaml").write_text(text + "doc_to_text: a\ndoc_to_target: b\n", encoding="utf-8")
        session, names = Session(loaded, parse_backends(["sdpa"])), find_tasks(["gone"], [tmp_path])
        with pytest.raises(UserError, match=f"--tasks: cannot load 'gone': {message}"):
            measure_tasks(session, names, TasksPart(names=["gone"]))

    def test_yaml_file(self, tiny_tasks: Path, evaluate: Evaluate) -> None:
        section = evaluate(str(tiny_tasks / "tiny_choice.yaml"), "sdpa", "dma_mxfp:paper", limit=2)
        assert [task.name for task in section.tasks] == ["tiny_choice"]
        assert section.asked == [*section.backends[1].low_share] == ["tiny_choice.yaml"]  # without its folder

    @pytest.mark.parametrize("field", ["task", "dataset_path", "doc_to_text", "doc_to_target", "output_type"])
    def test_a_missing_field(
        self, run: Run, model_folder: Path, tmp_path: Path, field: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One line, and no traceback of lm-eval."""
        original = tasks_module.TaskManager
        monkeypatch.setattr(
            tasks_module, "TaskManager", lambda **options: original(**options | {"include_defaults": False})
        )
        (tmp_path / "rows.jsonl").write_text('{"q": "the ship", "a": " sea"}\n', encoding="utf-8")
        fields = {
            "task": "mine",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
            "test_split": "test",
            "output_type": "loglikelihood",
            "doc_to_text": "{{q}}",
            "doc_to_target": "{{a}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        del fields[field]
        (tmp_path / "mine.yaml").write_text(json.dumps(fields), encoding="utf-8")
        arguments = ("-m", model_folder, "--tasks", "mine", "--include-path", tmp_path, "--device", "cpu")
        result = run("lm-eval", *arguments, "--attn", "sdpa")
        assert result.exit_code == 2, result.output
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
        assert line.startswith("Error: --tasks: ")
        assert "Traceback" not in result.stderr

    @pytest.mark.parametrize("name", ["broken", "BROKEN.yaml"])
    def test_broken_yaml(self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """By the name that is in it, which cannot be read, or by the file's own."""
        original = tasks_module.TaskManager
        monkeypatch.setattr(
            tasks_module, "TaskManager", lambda **options: original(**options | {"include_defaults": False})
        )
        file = tmp_path / "BROKEN.yaml"
        file.write_text("task: broken\ndataset_path: [json\ntest_split: test\n", encoding="utf-8")
        with pytest.raises(UserError) as caught:
            find_tasks([name if name == "broken" else str(file)], [tmp_path])
        assert str(caught.value).startswith(f"--tasks: {file} is not YAML: line 3, column 11: ")


class TestCommand:
    @pytest.fixture
    def lm_eval(self, run: Run, model_folder: Path, tiny_tasks: Path) -> Run:
        def invoke(*arguments: object) -> Any:
            common = ("-m", model_folder, "--include-path", tiny_tasks, "--device", "cpu", "--dtype", "float32")
            return run("lm-eval", *common, *arguments)

        return invoke

    def test_writes_the_folder(self, lm_eval: Run, tmp_path: Path) -> None:
        result = lm_eval("--tasks", "tiny_choice,tiny_last_word", "tiny_text", "--limit", 6, "--out", tmp_path / "run")
        assert result.exit_code == 0, result.output
        assert "significant drops" in result.stdout
        assert "it/s" not in result.stderr  # lm-eval's bars
        report = read_report(tmp_path / "run/results.json")
        assert report.tasks[0].asked == ["tiny_choice", "tiny_last_word", "tiny_text"]
        assert (tmp_path / "run/tasks.png").is_file()
        shares = [backend.low_share for backend in report.tasks[0].backends]
        assert shares == [{}, {"tiny_choice": 0, "tiny_last_word": 0, "tiny_text": 0}]  # SDPA has none; short prompts
        page = (tmp_path / "run/report.md").read_text(encoding="utf-8")
        assert "Share of keys in low tiles: tiny_choice" in page
        assert "low tiles held less than 5 % of the keys of tiny_choice (" in page
        assert "| tiny_choice, acc | dma_mxfp:balanced |" in page
        few = lm_eval("--tasks", "tiny_few", "--limit", 2, "--num-fewshot", 1, "--attn", "sdpa")
        assert ", 1-shot" in few.stdout
        assert "low tiles" not in few.output  # SDPA has none
        assert "](tasks.png)" in page
        assert 'low = "mxint8"' in (tmp_path / "run/configs/balanced.toml").read_text(encoding="utf-8")

    def test_no_chat_template(self, lm_eval: Run, refused: Callable[[Any], str]) -> None:
        result = lm_eval("--tasks", "tiny_choice", "--apply-chat-template")
        assert "the model's tokenizer has no chat template" in refused(result)

    @pytest.mark.usefixtures("broken_kernels")
    def test_exit_code_of_a_failure(self, lm_eval: Run) -> None:
        result = lm_eval("--tasks", "tiny_choice", "--limit", 2)
        assert result.exit_code == 1
        assert "Warning: dma_mxfp:balanced failed in tiny_choice" in result.stderr


def numbers(report: Report) -> Any:
    return report.tasks[0].tasks, report.tasks[0].groups, [b.mean_accuracy for b in report.tasks[0].backends]


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(
    run: Run, run_in_two_processes: Run, model_folder: Path, tiny_tasks: Path, tmp_path: Path
) -> None:
    """``accelerate launch`` on the CPU, with gloo. An odd number of samples, so that one process has one more."""
    arguments = ["lm-eval", "-m", str(model_folder), "--dtype", "float32", "--device", "cpu", "--limit", "7"]
    arguments += ["--tasks", "tiny_choice,tiny_last_word,tiny_answer,tiny_few", "--include-path", str(tiny_tasks)]
    arguments += ["--attn", "sdpa", "dma_mxfp:paper", "--out"]
    assert run(*arguments, tmp_path / "one").exit_code == 0
    done = run_in_two_processes(*arguments, tmp_path / "two")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("mean accuracy") == 1  # one process speaks for all
    reports = [read_report(tmp_path / name / "results.json") for name in ("one", "two")]
    assert [report.tasks[0].processes for report in reports] == [1, 2]
    one, two = (numbers(report) for report in reports)
    assert one[1:] == two[1:]
    for first, second in zip(one[0], two[0], strict=True):
        for metric, twin in zip(first.metrics, second.metrics, strict=True):
            for value, other in zip(metric.values, twin.values, strict=True):
                if metric.right_or_wrong:
                    assert value == other
                else:  # sums of other batches, in fp32
                    assert value.value == pytest.approx(other.value, rel=1e-5)
