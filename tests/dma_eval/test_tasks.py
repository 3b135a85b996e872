"""Tasks under several backends: lm-eval's own numbers, paired, resumed, and split over processes."""

from __future__ import annotations

import itertools
import json
import resource
from pathlib import Path

import numpy as np
import pytest
import yaml
from dma_eval.config import TasksPart, load_suite, suite_names
from dma_eval.console import Progress
from dma_eval.errors import UserError
from dma_eval.files import slug
from dma_eval.load.backends import parse_backends
from dma_eval.measures import tasks as tasks_module
from dma_eval.measures.tasks import find_tasks, measure_tasks
from dma_eval.results import read_report
from dma_eval.session import Session
from dma_eval.show.pages import task_page
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tiny_tasks import CONFIGS

ALL = "tiny_choice,tiny_last_word,tiny_text,tiny_answer,tiny_few"


@pytest.fixture
def evaluate(loaded, tiny_tasks):
    """Evaluate backends on tasks, from the tiny ones by default; ``seen`` gets what is measured and what is kept."""

    def run(names, *attn, folder=None, seen=None, seed=0, include=tiny_tasks, **options):
        progress = Progress()
        if seen is not None:
            progress.begin = lambda what, steps=None: seen.append((what, "measured"))
            progress.kept = lambda what: seen.append((what, "kept"))
        backends = parse_backends(attn or ("sdpa", "dma_mxfp:balanced", "dma_mxfp:paper"))
        session = Session(loaded, backends, folder=folder, progress=progress, seed=seed)
        return measure_tasks(session, find_tasks([names], [include]), TasksPart(names=[names], **options))

    return run


class TestNumbers:
    def test_are_lm_evals(self, evaluate, loaded, tiny_tasks, monkeypatch):
        """From as many passes as lm-eval's own, task by task; each backend costs as many again."""
        monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # it runs pip, each time
        passes = []
        loaded.model.register_forward_pre_hook(
            lambda module, args, kwargs: passes.append(tuple((args[0] if args else kwargs["input_ids"]).shape)),
            with_kwargs=True,
        )
        manager = TaskManager(include_path=str(tiny_tasks), include_defaults=False)
        lm = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=4)
        options = {"task_manager": manager, "bootstrap_iters": 0, "fewshot_random_seed": 0}
        expected = {name: simple_evaluate(lm, tasks=[name], **options)["results"][name] for name in ALL.split(",")}
        their_passes = list(passes)
        passes.clear()
        section = evaluate(ALL, "sdpa", "eager", batch_size=4)
        assert sorted(passes) == sorted(2 * their_passes)
        found = [(task, metric) for task in section.tasks for metric in task.metrics]
        assert len(found) == 8
        for task, metric in found:
            expected_value = expected[task.name][f"{metric.name},{metric.filter}"]
            assert metric.values[0].value == pytest.approx(expected_value, rel=1e-4)

    def test_identity_changes_nothing(self, evaluate, identity_file):
        section = evaluate("tiny_choice,tiny_text,tiny_answer", "sdpa", f"dma_mxfp:{identity_file}")
        for metric in (metric for task in section.tasks for metric in task.metrics):
            reference, identity = metric.values
            assert identity.difference == pytest.approx(0, abs=1e-3 * max(1.0, abs(reference.value)))
            if metric.right_or_wrong:
                assert (identity.lost, identity.gained, identity.mcnemar_p) == (0, 0, 1.0)

    def test_group_and_fewshot(self, evaluate):
        section = evaluate("tiny_group", "sdpa", limit=6)
        assert [(task.name, task.num_fewshot) for task in section.tasks] == [("tiny_choice", 0), ("tiny_few", 2)]
        (group,) = section.groups
        mean = np.mean([task.metrics[0].values[0].value for task in section.tasks])
        assert group.values["sdpa"] == section.backends[0].mean_accuracy == pytest.approx(mean)
        section = evaluate("tiny_group", "sdpa", limit=3, num_fewshot=1)
        assert [task.num_fewshot for task in section.tasks] == [1, 1]

    def test_a_task_that_sets_no_examples_keeps_none(self, evaluate, tiny_tasks, tmp_path, capsys):
        fixed = yaml.safe_load((tiny_tasks / "tiny_choice.yaml").read_text(encoding="utf-8"))
        fixed |= {"task": "fixed", "num_fewshot": 0}
        (tmp_path / "fixed.yaml").write_text(yaml.safe_dump(fixed), encoding="utf-8")
        (task,) = evaluate("fixed", "sdpa", include=tmp_path, limit=1, num_fewshot=2).tasks
        assert task.num_fewshot == 0
        assert "Warning: fixed sets num_fewshot to 0, and keeps it" in capsys.readouterr().err


class TestPairs:
    def test_every_backend_has_the_same_prompts(self, evaluate, tmp_path):
        """Examples are drawn anew for each backend; without a seed they would be others."""
        evaluate("tiny_few", "sdpa", "dma_mxfp:paper", folder=tmp_path)
        hashes = []
        for label in ("sdpa", "dma_mxfp:paper"):
            record = json.loads((tmp_path / "samples" / slug(label) / "tiny_few.json").read_text(encoding="utf-8"))
            hashes.append([sample["prompt_hash"] for sample in record["content"]["tasks"][0]["samples"]])
        assert hashes[0] == hashes[1]
        assert len(set(hashes[0])) == 24

    def test_every_backend_draws_the_same_answers(self, evaluate, tiny_tasks, tmp_path):
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

    def test_other_prompts_are_refused(self, evaluate, monkeypatch):
        from lm_eval.api.task import Task

        monkeypatch.setattr(Task, "set_fewshot_seed", lambda self, seed: None)
        with pytest.raises(RuntimeError, match="task tiny_few: dma_mxfp:paper got other questions"):
            evaluate("tiny_few", "sdpa", "dma_mxfp:paper")

    def test_differences(self, evaluate):
        """A backend of another quality: its numbers, intervals and flips belong together."""
        section = evaluate("tiny_last_word", "sdpa", "dma_mxfp:paper")
        for metric in section.tasks[0].metrics:
            reference, other = metric.values
            assert reference.difference is None
            assert other.difference == pytest.approx(other.value - reference.value)
            assert other.low <= other.difference <= other.high
            if metric.right_or_wrong:
                assert (other.gained - other.lost) / 24 == pytest.approx(other.difference)


class TestResuming:
    def test_takes_what_is_there(self, evaluate, tmp_path, monkeypatch):
        names = "tiny_choice,tiny_text"
        first = evaluate(names, "sdpa", "dma_mxfp:paper", folder=tmp_path)
        (tmp_path / "samples" / slug("dma_mxfp:paper") / "tiny_text.json").unlink()
        seen = []
        second = evaluate(names, "sdpa", "dma_mxfp:paper", folder=tmp_path, seen=seen)
        assert [how for _, how in seen] == ["kept", "kept", "kept", "measured"]
        assert second.tasks == first.tasks
        monkeypatch.setattr(tasks_module, "_load", None)  # nor are data of finished tasks loaded
        assert evaluate(names, "sdpa", "dma_mxfp:paper", folder=tmp_path).tasks == first.tasks

    @pytest.mark.parametrize("change", [{"limit": 7}, {"seed": 1}, {"num_fewshot": 1}])
    def test_other_settings_are_evaluated(self, evaluate, loaded, tmp_path, change):
        evaluate("tiny_choice", "sdpa", folder=tmp_path)
        seen = []
        evaluate("tiny_choice", "sdpa", folder=tmp_path, seen=seen, **change)
        assert seen == [("tiny_choice, sdpa", "measured")]
        session = Session(loaded, [], tmp_path)  # nor are their unfinished answers taken
        assert session.scratch(change, "a") != session.scratch({}, "a") == session.scratch({}, "a")
        assert Session(loaded, []).scratch({}, "a") is None

    @pytest.fixture
    def composed(self, tmp_path):
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
    def test_a_change_of_what_a_task_resolves_to_is_evaluated(self, evaluate, composed, name):
        def how():
            seen = []
            asked = str(composed / name) if name.endswith(".yaml") else name
            evaluate(asked, "sdpa", folder=composed / "run", seen=seen, include=composed)
            return [each for _, each in seen]

        assert (how(), how()) == (["measured"], ["kept"])
        for file, before, after in (
            ("data/b.jsonl", "sea", "whale"),
            ("data/c.jsonl", "", '{"question": "the", "word": "sea"}\n'),
            ("../shared/common.yaml", "'{{question}}'", "'{{question}} and the'"),
            ("../shared/functions.py", "END}", "END} and"),
            ("../shared/helpers.py", "''", "' and'"),
            ("member.yaml", "dataset_path", "description: 'Say: '\ndataset_path"),
        ):
            path = composed / file
            path.write_text(path.read_text(encoding="utf-8").replace(before, after, 1) if path.exists() else after)
            assert (how(), how()) == (["measured"], ["kept"]), file

    def test_a_full_disk(self, evaluate, tmp_path, capfd):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            with pytest.raises(UserError, match=r"--out: cannot save answers to .*\.partial: disk I/O error"):
                evaluate("tiny_choice", "sdpa", folder=tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "sqlite" not in capfd.readouterr().err

    @pytest.mark.parametrize("task", ["tiny_last_word", "tiny_answer"])  # lm-eval keeps rolling losses at the end
    def test_interrupted_within_a_task(self, evaluate, loaded, tmp_path, task):
        """It goes on after the batches that were answered, by lm-eval's own cache; a finished backend is kept."""
        expected = evaluate(task, "sdpa", "eager", batch_size=4)
        asked, most = [], 10**9

        def count(*_):
            asked.append(1)
            if len(asked) > most:
                raise KeyboardInterrupt

        loaded.model.register_forward_pre_hook(count)
        evaluate(task, "sdpa", "eager", batch_size=4)
        whole = len(asked)
        most = 3 * whole // 4
        asked.clear()
        with pytest.raises(KeyboardInterrupt):
            evaluate(task, "sdpa", "eager", folder=tmp_path, batch_size=4)
        most, seen = 10**9, []
        asked.clear()
        resumed = evaluate(task, "sdpa", "eager", folder=tmp_path, batch_size=4, seen=seen)
        assert [how for _, how in seen] == ["kept", "measured"]
        assert len(asked) < whole // 2
        assert resumed.tasks == expected.tasks
        assert not list(tmp_path.rglob("*.partial"))

    def test_file_names(self):
        names = ["a", "a-b", "a:b", "a/b", "a b", "dma_mxfp:fp4", "dma_mxfp:fp4 #2", "ü/../x", ".."]
        found = {slug(name) for name in names}
        assert len(found) == len(names)
        assert not any("/" in each or each in ("", ".", "..") for each in found)


class TestFailure:
    @pytest.mark.usefixtures("broken_kernels")
    def test_keeps_the_others(self, evaluate, tmp_path):
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
    def test_of_the_reference(self, evaluate):
        section = evaluate("tiny_choice", "dma_mxfp:paper", "sdpa")
        values = section.tasks[0].metrics[0].values
        assert (values[0].value, values[1].difference, values[1].low) == (None, None, None)
        assert values[1].value is not None
        assert task_page(section).tables


class TestNames:
    @pytest.mark.slow  # lm-eval looks through all its own tasks
    def test_unknown_lists_near_and_local_ones(self, tiny_tasks):
        """The tasks of suites are known, so they are not what is unknown first."""
        known = [load_suite(name).tasks.names for name in suite_names() if "local" not in name]
        with pytest.raises(UserError, match=r"unknown task 'tiny_choic'; did you mean: tiny_choice, .*in --incl"):
            find_tasks([*itertools.chain(*known), "tiny_choic"], [tiny_tasks])

    @pytest.mark.parametrize(
        ("names", "folders", "message"),
        [
            (["", ","], [], "--tasks needs at least one name"),
            (["a"], ["none"], "--include-path: no such folder"),
            (["missing.yaml"], [], "--tasks: cannot read missing.yaml: No such file"),
        ],
    )
    def test_what_is_not_there(self, names, folders, message):
        with pytest.raises(UserError, match=message):
            find_tasks(names, [*map(Path, folders)])

    @pytest.mark.parametrize(("file", "message"), [("none.jsonl", ""), ("empty.jsonl", "its data have no rows")])
    def test_lacking_data(self, tmp_path, loaded, file, message):
        (tmp_path / "empty.jsonl").touch()
        data = f"{{data_files: {{test: {tmp_path / file}}}}}"
        text = f"task: gone\ndataset_path: json\ndataset_kwargs: {data}\ntest_split: test\n"
        (tmp_path / "gone.yaml").write_text(text + "doc_to_text: a\ndoc_to_target: b\n", encoding="utf-8")
        session, names = Session(loaded, parse_backends(["sdpa"])), find_tasks(["gone"], [tmp_path])
        with pytest.raises(UserError, match=f"--tasks: cannot load 'gone': {message}"):
            measure_tasks(session, names, TasksPart(names=["gone"]))

    def test_a_perplexity_that_no_float_can_hold(self, evaluate, tmp_path):
        """Such as that of words in a language without spaces."""
        (tmp_path / "words.jsonl").write_text(json.dumps({"question": "shipwhalesea" * 100}), encoding="utf-8")
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "words.jsonl")}}}
        task = CONFIGS["tiny_text"] | data | {"task": "words", "test_split": "test"}
        (tmp_path / "words.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
        with pytest.raises(UserError, match=r"--tasks: cannot evaluate 'words': math range error"):
            evaluate("words", "sdpa", include=tmp_path)

    def test_yaml_file(self, tiny_tasks, evaluate):
        section = evaluate(str(tiny_tasks / "tiny_choice.yaml"), "sdpa", "dma_mxfp:paper", limit=2)
        assert [task.name for task in section.tasks] == ["tiny_choice"]
        assert section.asked == [*section.backends[1].low_share] == ["tiny_choice.yaml"]  # without its folder

    @pytest.fixture
    def only_own_tasks(self, monkeypatch):
        """lm-eval does not look through all its own tasks, which takes seconds."""
        original = tasks_module.TaskManager
        monkeypatch.setattr(
            tasks_module, "TaskManager", lambda **options: original(**options | {"include_defaults": False})
        )

    @pytest.mark.usefixtures("only_own_tasks")
    @pytest.mark.parametrize("field", ["task", "dataset_path", "doc_to_text", "doc_to_target", "output_type"])
    def test_a_missing_field(self, run, model_folder, tiny_tasks, tmp_path, field):
        """One line, and no traceback of lm-eval."""
        fields = yaml.safe_load((tiny_tasks / "tiny_last_word.yaml").read_text(encoding="utf-8"))
        del fields[field]
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(fields), encoding="utf-8")
        arguments = ("-m", model_folder, "--tasks", "tiny_last_word", "--include-path", tmp_path, "--device", "cpu")
        result = run("lm-eval", *arguments, "--attn", "sdpa")
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
        assert line.startswith("Error: --tasks: ")
        assert (result.exit_code, "Traceback" in result.stderr) == (2, False)

    @pytest.mark.usefixtures("only_own_tasks")
    def test_broken_yaml(self, tmp_path):
        """By the name that is in it, which cannot be read, or by the file's own."""
        file = tmp_path / "BROKEN.yaml"
        file.write_text("task: broken\ndataset_path: [json\ntest_split: test\n", encoding="utf-8")
        for name in ("broken", str(file)):
            with pytest.raises(UserError) as caught:
                find_tasks([name], [tmp_path])
            assert str(caught.value).startswith(f"--tasks: {file} is not YAML: line 3, column 11: ")


class TestCommand:
    @pytest.fixture
    def lm_eval(self, run, model_folder, tiny_tasks):
        def invoke(*arguments):
            common = ("-m", model_folder, "--include-path", tiny_tasks, "--device", "cpu", "--dtype", "float32")
            return run("lm-eval", *common, *arguments)

        return invoke

    def test_writes_the_folder(self, lm_eval, tmp_path):
        result = lm_eval("--tasks", "tiny_choice,tiny_last_word", "tiny_text", "--limit", 6, "--out", tmp_path / "run")
        assert result.exit_code == 0, result.output
        assert "significant drops" in result.stdout
        assert "it/s" not in result.stderr  # lm-eval's bars
        report = read_report(tmp_path / "run/results.json")
        assert report.tasks[0].asked == ["tiny_choice", "tiny_last_word", "tiny_text"]
        shares = [backend.low_share for backend in report.tasks[0].backends]
        assert shares == [{}, {"tiny_choice": 0, "tiny_last_word": 0, "tiny_text": 0}]  # SDPA has none; short prompts
        page = (tmp_path / "run/report.md").read_text(encoding="utf-8")
        assert "Share of keys in low tiles: tiny_choice" in page
        assert "low tiles held less than 5 % of the keys of tiny_choice (" in page
        assert "| tiny_choice, acc | dma_mxfp:balanced |" in page
        few = lm_eval("--tasks", "tiny_few", "--limit", 2, "--num-fewshot", 1, "--attn", "sdpa")
        assert ", 1-shot" in few.stdout
        assert "low tiles" not in few.output  # SDPA has none
        assert 'low = "mxint8"' in (tmp_path / "run/configs/balanced.toml").read_text(encoding="utf-8")

    @pytest.mark.usefixtures("broken_kernels")
    def test_failures(self, lm_eval, refused):
        result = lm_eval("--tasks", "tiny_choice", "--limit", 2)
        assert result.exit_code == 1
        assert "Warning: dma_mxfp:balanced failed in tiny_choice" in result.stderr
        result = lm_eval("--tasks", "tiny_choice", "--apply-chat-template")
        assert "the model's tokenizer has no chat template" in refused(result)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(run, python, model_folder, text_file, tiny_tasks, tmp_path):
    """``accelerate launch`` on the CPU, with gloo: they split an odd number of samples, and one does all the rest."""
    names = ["tiny_choice", "tiny_last_word", "tiny_answer", "tiny_few"]
    suite = f"[perplexity]\ncontexts = [128]\nmax_windows = 1\n[tasks]\nnames = {names}\nlimit = 7\n"
    (tmp_path / "mine.toml").write_text(suite, encoding="utf-8")
    arguments = ["suite", "--suite", tmp_path / "mine.toml", "-m", model_folder, "-d", text_file, "--device", "cpu"]
    arguments += ["--dtype", "float32", "--include-path", tiny_tasks, "--attn", "sdpa", "dma_mxfp:paper", "--out"]
    assert run(*arguments, tmp_path / "one").exit_code == 0
    # --multi_gpu is the way of accelerate to start several processes, on the CPU as well.
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    done = python(*launch, "-m", "dma_eval", *arguments, tmp_path / "two")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("mean accuracy") == done.stdout.count("Wrote results.json") == 1  # one speaks for all
    reports = [read_report(tmp_path / name) for name in ("one", "two")]
    losses = [[each.nll for each in report.perplexity[0].backends] for report in reports]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    one, two = (report.tasks[0] for report in reports)
    assert (one.processes, two.processes) == (1, 2)
    assert [each.mean_accuracy for each in one.backends] == [each.mean_accuracy for each in two.backends]
    for first, second in zip(one.tasks, two.tasks, strict=True):
        for metric, twin in zip(first.metrics, second.metrics, strict=True):
            for value, other in zip(metric.values, twin.values, strict=True):
                if metric.right_or_wrong:
                    assert value == other
                else:  # sums of other batches, in fp32
                    assert value.value == pytest.approx(other.value, rel=1e-5)
