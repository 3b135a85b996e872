"""Several commands with one ``--out``: nothing is lost, and every number says where it was measured."""

from __future__ import annotations

import dataclasses
import datetime
import shutil
from types import SimpleNamespace

import pytest
from dma_eval import environment, results, session
from dma_eval.results import merged, read_report


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def machine(monkeypatch):
    """Measure from now on in an environment with other values."""
    here = environment.collect()

    def change(**values):
        changed = dataclasses.replace(here, **values)
        monkeypatch.setattr(session, "collect", lambda: changed)

    return change


@pytest.fixture
def measure(ppl, out):
    def run(*arguments):
        return ppl("--attn", "sdpa", "dma_mxfp:paper", "--max-windows", 1, "--out", out, *arguments, code=0)

    return run


class TestSections:
    def test_of_every_command_are_kept(self, run, measure, out, model_folder, text_file, monkeypatch):
        monkeypatch.setattr("sys.argv", ["dma-hf", "ppl"])
        measure()
        monkeypatch.setattr("sys.argv", ["dma-hf", "ppl", "-c", "256"])
        measure("-c", 256)
        monkeypatch.setattr("sys.argv", ["dma-hf", "fidelity"])
        common = ("-m", model_folder, "-d", text_file, "--device", "cpu", "--out", out)
        assert run("fidelity", *common, "-c", 128, "--max-windows", 1, "--prompts", 0).exit_code == 0
        report = read_report(out)
        assert [section.context for section in report.perplexity] == [128, 256]
        assert len(report.fidelity) == 1
        commands = [section.origin.command for _, section in report.sections if section.origin is not None]
        assert commands == ["dma-hf ppl", "dma-hf ppl -c 256", "dma-hf fidelity"]
        page = (out / "report.md").read_text(encoding="utf-8")
        for heading in ("## Perplexity at context 128", "## Perplexity at context 256", "## Fidelity"):
            assert heading in page
        for command in commands:
            assert page.count(f"by `{command}`") == 1
        assert page.count("## Model and machine, ") == 3
        for plot in out.glob("*.png"):
            assert f"({plot.name})" in page

    def test_of_the_same_command_are_replaced_and_a_single_file_has_no_others(self, measure, out, tmp_path):
        measure()
        first = read_report(out)
        measure()
        assert read_report(out).sections == first.sections
        assert "## Model and machine, " not in (out / "report.md").read_text(encoding="utf-8")
        measure("-c", 256, "--json", tmp_path / "r.json")
        assert [section.context for section in read_report(tmp_path / "r.json").perplexity] == [256]

    @pytest.mark.parametrize("change", [("--dtype", "bfloat16"), ("--attn", "sdpa", "dma_mxfp:fp4"), ("--stride", 64)])
    def test_of_other_settings_are_added(self, measure, out, change):
        measure()
        (first,) = read_report(out).perplexity
        is_kept = "taken from the folder" in measure(*change).stderr
        assert is_kept == ("--stride" in change)  # the first window is the same
        kept, second = read_report(out).perplexity
        assert kept == first
        assert second != first

    def test_of_another_model_of_the_same_name_are_added(self, measure, out, model_folder, tmp_path):
        measure()
        (first,) = read_report(out).perplexity
        measure("-m", shutil.copytree(model_folder, tmp_path / model_folder.name))
        kept, second = read_report(out).perplexity
        assert kept == first
        assert second.origin.model.name == first.origin.model.name

    def test_are_not_added_to_a_file_of_an_older_version(self, ppl, measure, out, refused):
        measure()
        file = out / "results.json"
        file.write_text(file.read_text(encoding="utf-8").replace('"schema_version": 12', '"schema_version": 10'))
        before = file.read_bytes()
        assert "name another folder" in refused(ppl("-c", 256, "--out", out))
        assert file.read_bytes() == before

    def test_interrupted_ones_do_not_replace_complete_ones(self, measure, out):
        measure()
        report = read_report(out)
        (section,) = report.perplexity
        partial = dataclasses.replace(report, perplexity=[dataclasses.replace(section, windows_left=1)])
        assert merged(report, partial).perplexity == [section, *partial.perplexity]
        assert merged(partial, report).perplexity == [section]
        assert merged(merged(report, partial), partial).perplexity == [section, *partial.perplexity]


class TestOthersResults:
    def test_are_not_replaced_by_a_run(self, ppl, out, refused):
        out.mkdir()
        (out / "results.json").write_text('{"accuracy": 0.5}', encoding="utf-8")
        assert f"--out: {out} holds other results; name another folder" in refused(ppl("--out", out))
        assert (out / "results.json").read_text(encoding="utf-8") == '{"accuracy": 0.5}'

    def test_are_not_replaced_by_a_report_of_a_file(self, run, measure, out, tmp_path, refused):
        measure("--json", tmp_path / "mine.json")
        folder = tmp_path / "theirs"
        measure("-c", 256, "--json", folder / "results.json")
        before = (folder / "results.json").read_bytes()
        (tmp_path / "mine.json").rename(folder / "mine.json")
        message = f"--out: {folder} holds the results of another run (results.json); name another folder"
        assert message in refused(run("report", folder / "mine.json"))
        assert message in refused(run("report", folder / "mine.json", "--out", folder))
        assert sorted(path.name for path in folder.iterdir()) == ["mine.json", "results.json"]
        assert (folder / "results.json").read_bytes() == before
        assert run("report", folder / "mine.json", "--out", tmp_path / "pages").exit_code == 0
        assert read_report(tmp_path / "pages") == read_report(folder / "mine.json")

    def test_a_report_of_a_file_is_written_again_after_the_file(self, run, measure, tmp_path):
        for context in (128, 256):
            measure("-c", context, "--json", tmp_path / "pages/mine.json")
            assert run("report", tmp_path / "pages/mine.json").exit_code == 0
            page = (tmp_path / "pages/report.md").read_text(encoding="utf-8")
            assert f"## Perplexity at context {context}" in page
        assert not (tmp_path / "pages/results.json").exists()


class TestEnvironment:
    @pytest.mark.parametrize("change", [{"commit": "edited"}, {"gpus": ["Another GPU"]}, {}])
    def test_another_one_measures_anew(self, measure, machine, out, monkeypatch, change):
        """Or an edit of the code: two edits of one commit have the same name, ``-dirty``."""
        measure()
        machine(**change)
        if not change:
            monkeypatch.setattr(session, "source_hash", lambda: "edited")
        assert "taken from the folder" not in measure().stderr
        assert "taken from the folder" in measure().stderr
        (section,) = read_report(out).perplexity
        assert change.items() <= dataclasses.asdict(section.origin.environment).items()

    def test_of_a_kept_section_is_that_of_its_measurement(self, measure, machine, out):
        """Not that of the last command."""
        machine(commit="first", threads=3)
        measure()
        machine(commit="second", threads=5)
        measure("-c", 256)
        found = [section.origin.environment for section in read_report(out).perplexity]
        assert [(each.commit, each.threads) for each in found] == [("first", 3), ("second", 5)]
        one, two = (out / "report.md").read_text(encoding="utf-8").split("## Perplexity at context")[1:]
        assert "3 threads" in one
        assert "commit first" in one
        assert "commit first" not in two.partition("## Model and machine")[0]

    def test_of_a_section_is_that_of_its_newest_piece(self, measure, out, monkeypatch):
        commands, kept = [], []
        for windows in ("1", "2", "2"):
            monkeypatch.setattr("sys.argv", ["dma-hf", "ppl", "--max-windows", windows, f"--nth={len(commands)}"])
            day = datetime.datetime(2001, 1, 1 + len(commands), tzinfo=datetime.UTC)
            monkeypatch.setattr(results, "datetime", SimpleNamespace(now=lambda zone, day=day: day))
            told = measure("--max-windows", windows).stderr
            kept.append(told.partition(" windows: taken from the folder")[0][-6:])
            *_, section = read_report(out).perplexity
            commands.append(section.origin.command.rpartition("=")[2])
        assert kept[1:] == ["1 of 2", "2 of 2"]
        assert commands == ["0", "1", "1"]  # the third command only took what was there

    def test_of_tasks_too(self, run, machine, out, model_folder, tiny_tasks):
        common = ("-m", model_folder, "--device", "cpu", "--attn", "sdpa", "--limit", 2, "--out", out)
        arguments = ("lm-eval", *common, "--tasks", "tiny_choice", "--include-path", tiny_tasks)
        machine(commit="first")
        assert run(*arguments).exit_code == 0
        (first,) = read_report(out).tasks
        assert "taken from the folder" in run(*arguments).stderr
        assert read_report(out).tasks == [first]
        machine(commit="second")
        assert "taken from the folder" not in run(*arguments).stderr
        (second,) = read_report(out).tasks
        assert [each.environment.commit for each in (first.origin, second.origin)] == ["first", "second"]

    def test_source_hash_covers_every_package(self, tmp_path, monkeypatch):
        for name in ("dma_kernels", "dma_hf", "dma_eval"):
            (tmp_path / name / "inner").mkdir(parents=True)
            (tmp_path / name / "__init__.py").touch()
            (tmp_path / name / "inner/code.py").write_text("a = 1\n", encoding="utf-8")

        monkeypatch.setattr(environment.resources, "files", lambda name: tmp_path / name)
        found = []
        for name in ("", "dma_kernels", "dma_hf", "dma_eval"):
            if name:
                (tmp_path / name / "inner/code.py").write_text("a = 2\n", encoding="utf-8")
            environment.source_hash.cache_clear()
            found.append(environment.source_hash())
        environment.source_hash.cache_clear()
        assert len(set(found)) == 4
