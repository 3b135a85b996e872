"""The command line: how it is read, and what its commands do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from dma_eval.command import REQUIRED, add_command, option
from dma_eval.commands.options import DEFAULT_ATTN, QualityOptions
from dma_eval.errors import UserError, one_line
from dma_eval.files import prepare_file, write_text
from dma_eval.results import read_report

Run = Callable[..., Any]
EVAL = Path(__file__).parents[2] / "eval"


class TestSeveralValues:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ("--attn a b --attn c", ["a", "b", "c"]),
            ("-a a b -m model", ["a", "b"]),
            ("--attn=a", ["a"]),
            ("--attn dma_mxfp:paper dma_mxfp:my.toml+int4", ["dma_mxfp:paper", "dma_mxfp:my.toml+int4"]),
            ("", list(DEFAULT_ATTN)),
        ],
    )
    def test_cases(self, given: str, expected: list[str]) -> None:
        seen = []
        app = typer.Typer()

        def note(args: QualityOptions) -> int:
            """Note what is given."""
            seen.append(args.attn)
            return 0

        add_command(app, "note", note)
        for _ in range(2):  # defaults are not written to
            app(f"-m m {given}".split(), standalone_mode=False)
        assert seen == [expected, expected]

    def test_negative_numbers_are_values(self) -> None:
        app = typer.Typer()
        seen = []

        @dataclass(kw_only=True)
        class Options:
            values: list[float] = option(REQUIRED, "--values")  # noqa: RUF009 (a field)
            flag: bool = option(False, "--flag")

        def note(args: Options) -> int:
            """Note what is given."""
            seen.append((args.values, args.flag))
            return 0

        note.__annotations__["args"] = Options  # which is no name of the module

        add_command(app, "note", note)
        app(["--values", "1", "-2", "-.5", "--flag"], standalone_mode=False)
        assert seen == [([1, -2, -0.5], True)]

    def test_reaches_the_command(self, ppl: Run, tmp_path: Path) -> None:
        result = ppl("--attn", "sdpa", "eager", "--json", tmp_path / "r.json", "-a", "dma_mxfp:fp4")
        assert result.exit_code == 0, result.output
        labels = [backend.label for backend in read_report(tmp_path / "r.json").perplexity[0].backends]
        assert labels == ["sdpa", "eager", "dma_mxfp:fp4"]

    def test_default(self, ppl: Run, tmp_path: Path) -> None:
        assert ppl("--json", tmp_path / "r.json").exit_code == 0
        assert [b.label for b in read_report(tmp_path / "r.json").perplexity[0].backends] == list(DEFAULT_ATTN)


class TestPpl:
    def test_shows_the_table(self, ppl: Run) -> None:
        result = ppl("--attn", "sdpa", "dma_mxfp:balanced")
        assert result.exit_code == 0, result.output
        assert result.stderr == (
            "Warning: low tiles held less than 5 % of the keys at context 128 (0.00 %): "
            "its windows are too short to test low tiles\n"
        )
        header, _, *rows = [line.split() for line in result.stdout.strip().splitlines()[:4]]
        assert " ".join(header) == "backend perplexity change KL / token top-1 tokens/s"
        assert [row[0] for row in rows] == ["sdpa", "dma_mxfp:balanced"]
        assert "2 windows of 128 tokens (non-overlapping), 254 tokens predicted by every backend" in result.stdout

    def test_writes_a_file(self, ppl: Run, tmp_path: Path) -> None:
        """Folders are made as needed."""
        json = tmp_path / "a [b]/r.json"
        result = ppl("--json", json, "--stride", 64, "--batch-size", 2, "--seed", 3)
        assert result.exit_code == 0, result.output
        assert f"Wrote {json}" in result.stdout
        report = read_report(json)
        section = report.perplexity[0]
        assert (section.context, section.stride, section.batch_size, section.windows) == (128, 64, 2, 2)
        assert report.seed == 3

    def test_json_lines(self, ppl: Run, tmp_path: Path, prose: str) -> None:
        import json

        rows = tmp_path / "rows.jsonl"
        rows.write_text("\n".join(json.dumps({"content": line}) for line in prose.splitlines()), encoding="utf-8")
        result = ppl("--data", rows, "--column", "content", "--attn", "sdpa", "--json", tmp_path / "r.json")
        assert result.exit_code == 0, result.output
        data = read_report(tmp_path / "r.json").perplexity[0].data
        assert (data.name, data.column, data.split) == (rows.name, "content", "train")

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_dtype(self, ppl: Run, tmp_path: Path, dtype: str) -> None:
        result = ppl("--dtype", dtype, "--json", tmp_path / "r.json")
        assert result.exit_code == 0, result.output
        assert read_report(tmp_path / "r.json").model.dtype == dtype


class TestEnv:
    def test_shows_versions_and_devices(self, run: Run) -> None:
        result = run("env")
        assert result.exit_code == 0, result.output
        rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
        assert rows["python"].strip() == ".".join(map(str, sys.version_info[:3]))
        for package in ("torch", "transformers", "datasets"):
            assert rows[package].strip() == metadata.version(package)
        assert rows["threads"].strip() == "1"
        assert rows.keys() >= {"system", "cpu", "gpus", "cuda"}


class TestHelp:
    def test_version(self, run: Run) -> None:
        result = run("--version")
        assert result.exit_code == 0
        assert re.fullmatch(r"dma-hf (\d+\.\d+\S*|\(not installed\))\n", result.stdout)

    def test_version_of_a_source_tree(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> str:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "version", missing)
        assert run("--version").stdout == "dma-hf (not installed)\n"

    @pytest.mark.parametrize(
        ("command", "expected"),
        [
            ((), ("ppl", "demo", "env", "--version", "Start here")),
            (("ppl",), ("--model", "--data", "--attn", "--stride", "--json", "--debug", "Examples")),
            (("lm-eval",), ("--tasks", "--include-path", "--limit", "--num-fewshot", "accelerate launch", "Examples")),
            (("fidelity",), ("--head-windows", "--prompts", "--out", "Examples")),
            (("retrieval",), ("--kind", "--lengths", "--depths", "Examples")),
            (("stress",), ("--attn", "--max-windows", "--out", "Examples")),
            (("equalize",), ("--tokens", "--data", "--out", "Examples")),
            (("suite",), ("--suite", "long-context", "--max-windows", "Examples")),
            (("report",), ("--out", "RUN", "Examples")),
            (("card",), ("--base-model", "--license", "--push", "--yes", "Examples")),
            (("demo",), ("--out", "Needs no network", "Examples")),
            (("env",), ("bug report",)),
        ],
    )
    def test_help(self, run: Run, command: tuple[str, ...], expected: tuple[str, ...]) -> None:
        result = run(*command, "--help")
        assert result.exit_code == 0
        for text in expected:
            assert text in " ".join(result.stdout.replace("│", " ").split())

    def test_no_arguments_show_the_help(self, run: Run) -> None:
        result = run()
        assert "dma-hf demo" in result.output
        assert result.exit_code == 2
        assert "Error" not in result.output

    def test_as_a_module(self) -> None:
        command = [sys.executable, "-m", "dma_eval", "--version"]
        done = subprocess.run(command, cwd=EVAL, capture_output=True, text=True, check=False, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("dma-hf ")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without space")
    def test_full_standard_output(self) -> None:
        command = [sys.executable, "-m", "dma_eval", "--version"]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, cwd=EVAL, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == (2, "Error: No space left on device\n")

    def test_help_does_not_import_torch(self) -> None:
        code = "import sys; import dma_eval.cli; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], cwd=EVAL, check=False, timeout=120).returncode == 0


@pytest.mark.parametrize("attn", ["dma_mxfp:typo", "typo"])
def test_backends_are_looked_up_first(attn: str) -> None:
    """Before what takes seconds to import, and before the text and the model are looked for."""
    code = (
        "import sys, dma_eval.cli\n"
        "try:\n    dma_eval.cli.main(['lm-eval', '-m', 'none', '--tasks', 'none', '--attn', 'sdpa', sys.argv[1]])\n"
        "except SystemExit:\n    print(*{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, attn], cwd=EVAL, capture_output=True, text=True, check=False)
    assert f"Error: --attn: unknown {'preset' if ':' in attn else 'backend'} 'typo'" in done.stderr
    imported = set(done.stdout.split())
    assert not imported & {"lm_eval", "datasets", "matplotlib", "gguf"}
    if attn.startswith("dma_mxfp"):
        assert not imported & {"torch", "transformers"}
    else:  # which alone knows what there is
        assert "transformers" in imported


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("ppl -m ./none -d none.txt", "--model: no such folder: ./none"),
        ("ppl -m owner/model -d none.txt", "--data: no such file: none.txt"),
        ("equalize -m ./none -d none.txt --out made", "--model: no such folder: ./none"),
        ("bench prefill --inputs ./none -d none.txt --length 8", "--inputs: no such folder: ./none"),
        ("bench generate -m owner/model -d none.txt", "--data: no such file: none.txt"),
        ("bench serve -m none.gguf", "--model: no such file: none.gguf"),
        ("serve ./none", "--model: no such folder: ./none"),
    ],
)
def test_missing_files_are_noticed_before_slow_imports(command: str, message: str, tmp_path: Path) -> None:
    code = (
        "import sys, dma_eval.cli\n"
        "try:\n    dma_eval.cli.main(sys.argv[1:])\n"
        "except SystemExit:\n    print('torch' in sys.modules)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(EVAL)}
    given = [sys.executable, "-c", code, *command.split()]
    done = subprocess.run(given, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", f"Error: {message}\n")


class TestPrepareFile:
    def test_leaves_nothing(self, tmp_path: Path) -> None:
        prepare_file(tmp_path / "new/r.json", "--json")
        assert list((tmp_path / "new").iterdir()) == []

    def test_leaves_what_is_there(self, tmp_path: Path) -> None:
        (tmp_path / "r.json").write_text("old", encoding="utf-8")
        prepare_file(tmp_path / "r.json", "--json")
        assert (tmp_path / "r.json").read_text(encoding="utf-8") == "old"

    def test_cannot_be_opened(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(UserError, match=r"cannot write to .*r.json: Permission denied"):
            prepare_file(tmp_path / "r.json", "--json")

    def test_two_processes_write_the_same_file(self, tmp_path: Path) -> None:
        code = "import pathlib, sys\nfrom dma_eval.files import write_text\npath = pathlib.Path(sys.argv[1])\n"
        code += "for _ in range(300):\n    write_text('text' * 10_000, path)\n"
        command = [sys.executable, "-c", code, str(tmp_path / "r.json")]
        processes = [subprocess.Popen(command, cwd=EVAL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        assert [process.communicate()[1] for process in processes] == ["", ""]
        assert [each.name for each in tmp_path.iterdir()] == ["r.json"]

    def test_writes_through_a_link(self, tmp_path: Path) -> None:
        """To replace ``/dev/stdout`` would take it away from the whole machine."""
        (tmp_path / "file").touch()
        (tmp_path / "stdout").symlink_to(tmp_path / "file")
        write_text("3\n", tmp_path / "stdout")
        assert (tmp_path / "stdout").is_symlink()
        assert (tmp_path / "file").read_text(encoding="utf-8") == "3\n"


@pytest.mark.parametrize(
    ("message", "shown"),
    [("a\n b", "a b"), ("a\n\nadvice", "a"), ("", "ValueError"), ("x" * 500, "x" * 399 + "…")],
)
def test_one_line(message: str, shown: str) -> None:
    assert one_line(ValueError(message)) == shown
