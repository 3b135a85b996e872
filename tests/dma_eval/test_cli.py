"""The command line: how it is read, and what its commands do."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
import typer
from dma_eval.cli import COMMANDS
from dma_eval.config import add_command, load_suite, option
from dma_eval.errors import UserError, one_line
from dma_eval.files import check_file, write_text
from dma_eval.measures.tasks import find_tasks
from dma_eval.names import parse_name
from dma_eval.results import read_report

EVAL = Path(__file__).parents[2] / "eval"


@dataclass(kw_only=True)
class Options:
    names: list[str] = option(["sdpa"], "-n")  # noqa: RUF009 (a field)
    values: list[float] = option([0.0], "--values")  # noqa: RUF009
    flag: bool = option(False, "--flag")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {}),
        ("-n a b --flag", {"names": ["a", "b"], "flag": True}),
        ("--names=a b -n c d --names=e", {"names": ["a", "b", "c", "d", "e"]}),
        ("--names dma_mxfp:paper dma_mxfp:my.toml+int4", {"names": ["dma_mxfp:paper", "dma_mxfp:my.toml+int4"]}),
        ("--values 1 -2 -.5 --flag", {"values": [1, -2, -0.5], "flag": True}),
    ],
)
def test_an_option_takes_several_values(given, expected):
    def note(args: Options) -> int:
        """Note what is given."""
        seen.append(vars(args))
        return 0

    seen, app = [], typer.Typer()
    add_command(app, "note", note)
    app(given.split(), standalone_mode=False)
    assert seen == [{"names": ["sdpa"], "values": [0.0], "flag": False} | expected]


class TestHome:
    """What a shell leaves to the program, such as ``--out=~/run``."""

    def test_is_that_of_the_user(self, ppl, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        ppl("--attn", "sdpa", "--max-windows", 1, "--out=~/run", "--json=~/r.json", code=0)
        assert read_report(tmp_path / "run") == read_report(tmp_path / "r.json")

    def test_holds_configurations_suites_and_tasks(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "mine.toml").write_text('low = "mxfp4"\n')
        (tmp_path / "suite.toml").write_text("[perplexity]\n")
        (tmp_path / "task.yaml").write_text("task: mine\n")
        assert parse_name("dma_mxfp:~/mine.toml+int8") == ("dma_mxfp", f"{tmp_path}/mine.toml", "+int8")
        assert load_suite("~/suite.toml").perplexity is not None
        assert find_tasks(["~/task.yaml"]).names == (f"{tmp_path}/task.yaml",)

    @pytest.mark.parametrize("option", ["--model", "--data"])
    def test_of_nobody_is_no_file(self, ppl, refused, option):
        assert f"{option}: no such f" in refused(ppl(option, "~no-such-user/a"))


class TestPpl:
    def test_shows_the_table(self, ppl):
        result = ppl("--attn", "sdpa", "dma_mxfp:balanced", code=0)
        assert result.stderr == (
            "Warning: low tiles held less than 5 % of the keys at context 128 (0.00 %): "
            "its windows are too short to test low tiles\n"
        )
        header, _, *rows = [line.split() for line in result.stdout.strip().splitlines()[:4]]
        assert " ".join(header) == "backend perplexity change KL / token top-1 tokens/s"
        assert [row[0] for row in rows] == ["sdpa", "dma_mxfp:balanced"]
        assert "2 windows of 128 tokens (non-overlapping), 254 tokens predicted by every backend" in result.stdout

    def test_writes_a_file(self, ppl, tmp_path):
        """Folders are made as needed."""
        path = tmp_path / "a [b]/r.json"
        result = ppl("--json", path, "--stride", 64, "--batch-size", 2, "--seed", 3, code=0)
        assert f"Wrote {path}" in result.stdout
        report = read_report(path)
        section = report.perplexity[0]
        assert (section.context, section.stride, section.batch_size, section.windows) == (128, 64, 2, 2)
        assert report.seed == 3


class TestEnv:
    def test_shows_versions_and_devices(self, run):
        result = run("env", code=0)
        rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
        assert rows["python"].strip() == ".".join(map(str, sys.version_info[:3]))
        for package in ("torch", "transformers", "datasets"):
            assert rows[package].strip() == metadata.version(package)
        assert rows["threads"].strip() == "1"
        assert rows.keys() >= {"system", "cpu", "gpus", "cuda"}


class TestHelp:
    def test_version(self, run):
        result = run("--version", code=0)
        assert re.fullmatch(r"dma-hf (\d+\.\d+\S*|\(not installed\))\n", result.stdout)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_help(self, run, command):
        result = run(command, "--help", code=0)
        assert "Examples" in result.stdout
        assert "--debug" in result.stdout

    def test_no_arguments_show_the_help(self, run):
        result = run()
        assert "dma-hf demo" in result.output
        assert result.exit_code == 2
        assert "Error" not in result.output

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without space")
    def test_full_standard_output(self, python):
        with Path("/dev/full").open("w") as full:
            done = python("-m", "dma_eval", "--version", stdout=full)
        assert (done.returncode, done.stderr) == (2, "Error: No space left on device\n")

    def test_help_does_not_import_torch(self, python):
        assert python("-c", "import sys; import dma_eval.cli; sys.exit('torch' in sys.modules)").returncode == 0


WRONG = {
    "pplx": "No such command 'pplx'. Did you mean 'ppl'?",
    "ppl -d book.txt": "Missing option '--model' / '-m' (try: dma-hf ppl --help)",
    "ppl --attm sdpa": "No such option: --attm",
    "ppl --attn": "Option '--attn' requires an argument (try: dma-hf ppl --help)",
    "ppl --attn --help": "Option '--attn' requires an argument (try: dma-hf ppl --help)",
    "ppl --spread=1": "Option '--spread' does not take a value (try: dma-hf ppl --help)",
    "ppl -m m -d none.txt -c many": "Invalid value for '--context' / '-c': Input should be a valid integer, unable ",
    "ppl -m m -d none.txt -c 1": "Invalid value for '--context' / '-c': Input should be greater than or equal to 2",
    "ppl -m m -d none.txt --seed -1": "Invalid value for '--seed': Input should be greater than or equal to 0, got ",
    "ppl -m m -d none.txt --seed 4294967296": "Invalid value for '--seed': Input should be less than or equal to 42",
    "ppl -m m -d none.txt --yarn nan": "--yarn: expected a finite number, got nan",
    "ppl -m m -d none.txt stray": "Got unexpected extra argument(s) (stray) (try: dma-hf ppl --help)",
    "equalize -m m -d none.txt --tokens 100 --out o": "Invalid value for '--tokens': Input should be greater than or ",
    "equalize -m ./none -d none.txt --out file": "--out: cannot create the folder file: it is a file",
    "ppl -m ./none -d none.txt": "--model: no such folder: ./none",
    "ppl -m owner/model -d none.txt": "--data: no such file: none.txt",
    "bench --device mps": "--device: expected auto, cpu, cuda or cuda:N; got 'mps'",
    "bench -m owner/model -d none.txt": "--data: no such file: none.txt",
    "serve ./none": "--model: no such folder: ./none",
    "serve m --attn spda": "--attn: unknown backend 'spda'; valid: dma_mxfp, eager, flash_attention_2, ",
    "ppl -m m -d none.txt --device mps": "--device: expected auto, cpu, cuda or cuda:N; got 'mps'",
    "ppl -m m -d none.txt --dtype bf16": "Invalid value for '--dtype': 'bf16' is not one of 'auto', 'float32', ",
    "ppl -m m -d none.txt --out file": "--out: cannot create the folder file: it is a file",
    "demo --out file": "--out: cannot create the folder file: it is a file",
    "ppl -m m -d none.txt --attn sdpa spda": "--attn: unknown backend 'spda'; valid: dma_mxfp, eager, ",
    "lm-eval -m m --tasks none --attn sdpa dma_mxfp:typo": "--attn: unknown preset 'typo'",
    "ppl -m m -d none.txt --attn sdpa:balanced": "--attn: unknown backend 'sdpa:balanced'; valid: dma_mxfp, eager, ",
    "bench --run spda+dynamic": "--run: unknown backend 'spda'; valid: dma_mxfp, eager, ",
    "bench --run sdpa+int4": "--run: unknown backend 'sdpa+int4'; valid: dma_mxfp, eager, ",
    "bench --run sdpa+dynamo": "--run: expected ATTENTION+CACHE with a cache of dynamic, static, int8, ",
    "bench --shape big": "Invalid value for '--shape': 'big' is not one of 'llama-3.1-8b', ",
    "ppl -m m -d none.txt -c 128 --stride 129": "--stride must be from 1 to the context, 128, got 129",
    "ppl -m m -d none.txt --stride 2049": "--stride must be from 1 to the context, 2048, got 2049",
    "ppl -m m -d none.txt --spread": "--spread needs --max-windows; without it all windows are read",
    "suite -s s.toml -m m -d none.txt --out o": "--stride must be from 1 to the context, 128, got 129",
    "suite -s texts.toml -m m --out o": "--data: no such file: none.txt",
    "suite -s stress.toml -m m --out o": "--data: suite stress.toml names no text of its own; name one",
    "ppl -m m -d none.txt --yarn 1": "--yarn: expected a factor above 1, got 1",
    "ppl -m m -d none.txt --device cpu --device-map auto": "--device and --device-map exclude each other; ",
    "ppl -m . -d none.txt --revision v1": "--revision: . is a local model, which has none; leave it out",
    "bench --yarn 2": "--data and --yarn need --model; without it prompts are random",
    "bench --model m": "--model needs --data, a text for the prompts, and excludes --shape",
    "bench --context 0": "Invalid value for '--context': Input should be greater than or equal to 1, got '0'",
    "ppl -m m -d file": "--model: cannot load 'm': no such folder here, the Hub's cache has no such model, and ",
}
"""Commands, and what their errors begin with."""
RUN_ALL = """
import contextlib, io, json, sys
import dma_eval.cli

slow = {"lm_eval", "datasets", "matplotlib", "gguf", "torch", "transformers"}
for command in json.load(sys.stdin):
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.suppress(SystemExit):
        dma_eval.cli.main(command.split())
    print(json.dumps([told.getvalue(), not slow.isdisjoint(sys.modules)]))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory, python):
    """What each command says, and whether it was slow: a process runs them all."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "file").write_text("text", encoding="utf-8")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "s.toml").write_text("[perplexity]\ncontexts = [256, 128]\nstride = 129\n", encoding="utf-8")
    (folder / "stress.toml").write_text("[stress]\n", encoding="utf-8")
    (folder / "texts.toml").write_text("[stress]\ndata = 'file'\n[fidelity]\ndata = 'none.txt'", encoding="utf-8")
    offline = {"HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": "1"}
    done = python("-c", RUN_ALL, input=json.dumps(list(WRONG)), cwd=folder, env=offline)
    return dict(zip(WRONG, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("command", WRONG)
def test_wrong_input_is_noticed_before_slow_imports(command, told):
    message, was_slow = told[command]
    assert message.startswith(f"Error: {WRONG[command]}")
    assert message.count("\n") == 1
    assert not was_slow


def test_a_model_that_is_nowhere_is_refused_at_once_without_a_network(tmp_path, python):
    """The libraries would try again for a minute."""
    (tmp_path / "book.txt").write_text("text", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    variables = {"HF_ENDPOINT": closed, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "", "NO_PROXY": "*"}
    done = python("-m", "dma_eval", "ppl", "-m", "org/tiny", "-d", "book.txt", cwd=tmp_path, env=variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "Error: --model: cannot load 'org/tiny': no such folder here, the Hub's cache has no such model, and "
        f"{closed} cannot be reached (Connection refused)\n"
    )


class TestFiles:
    def test_without_the_right_to_write(self, tmp_path, monkeypatch):
        monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
        (tmp_path / "r.json").touch()
        with pytest.raises(UserError, match=r"--json: cannot write to .*: Permission denied"):
            check_file(tmp_path / "r.json", "--json")

    def test_two_processes_write_the_same_file(self, tmp_path):
        code = "import pathlib, sys\nfrom dma_eval.files import write_text\npath = pathlib.Path(sys.argv[1])\n"
        code += "for _ in range(300):\n    write_text('text' * 10_000, path)\n"
        command = [sys.executable, "-c", code, str(tmp_path / "r.json")]
        processes = [subprocess.Popen(command, cwd=EVAL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        assert [process.communicate()[1] for process in processes] == ["", ""]
        assert [each.name for each in tmp_path.iterdir()] == ["r.json"]

    def test_writes_through_a_link(self, tmp_path):
        """To replace ``/dev/stdout`` would take it away from the whole machine."""
        (tmp_path / "file").touch()
        (tmp_path / "stdout").symlink_to(tmp_path / "file")
        write_text("3\n", tmp_path / "stdout")
        assert (tmp_path / "stdout").is_symlink()
        assert (tmp_path / "file").read_text(encoding="utf-8") == "3\n"


@pytest.mark.parametrize(
    ("message", "shown"), [("a\n b", "a b"), ("a\n\nadvice", "a"), ("", "ValueError"), ("x" * 500, "x" * 399 + "…")]
)
def test_one_line(message, shown):
    assert one_line(ValueError(message)) == shown
