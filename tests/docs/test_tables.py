"""The tables of results in the pages are those that ``scripts/update_docs.py`` makes of the committed files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pandas as pd
import prefill
import pytest
import typer
from dma_eval.cli import make_app
from dma_eval.errors import UserError
from kernel_bench.peers import PEERS
from script_files import load_script

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def script():
    return load_script("update_docs")


def test_pages_show_the_results(script):
    found = set()
    for page in script.pages():
        text = page.read_text(encoding="utf-8")
        assert script.updated(text) == text, f"{page.name} is out of date: python scripts/update_docs.py"
        found |= {block[1] for block in script.BLOCK.findall(text)}
    assert {"results", "files", "prefill", "decode", "generate", "quality-runs", "quality-twins"} <= found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: prefill -->\n", "every <!-- table: NAME --> needs one <!-- end table --> after it"),
        ("<!-- end table -->", "every <!-- table: NAME --> needs one"),
        ("<!-- table: speed -->\n<!-- end table -->", "unknown tables speed; valid: results, "),
    ],
)
def test_wrong_marks_are_refused(script, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        script.updated(text)


def test_what_did_not_run_leaves_a_gap(script):
    frame = pd.DataFrame({"case": ["8K"] * 3, "label": ["fa3", "fast", "failed"], "ms": [3.0, 1.5, None]})
    cells = script.times_faster(frame, "fa3").apply(script.show, form=".2f", unit="x")
    assert cells.loc["8K"].tolist() == ["1.00x", "2.00x", "–"]


def test_a_table_of_generate_says_how_steps_ran(script, monkeypatch):
    labels = ["sdpa+dynamic", "sdpa+static", "dma_mxfp:balanced+int4", "dma_mxfp:balanced+int4-static"]
    figures = dict.fromkeys(("first_token_seconds", "step_milliseconds", "cache_bytes", "peak_bytes"), 1.0)
    rows = pd.DataFrame({"label": labels, "device": "H100", "weights": None, "context": 8192, **figures})
    monkeypatch.setattr(script, "load", lambda *files: rows.assign(graph_steps=[0, 0, 47, None]))
    assert list(script.generate()["steps"].items()) == [
        ("`sdpa+dynamic`", "eager"),
        ("`sdpa+static`", "compiled"),
        ("`balanced+int4`", "CUDA graphs"),
        ("`balanced+int4`", "compiled"),  # of an older file
    ]


def test_a_table_of_servers_under_load_is_sorted_by_load(script, monkeypatch):
    times = {"first_token_milliseconds": 12.3, "between_tokens_milliseconds": 8.0, "tokens_per_second": 1234.0}
    times |= {"first_token_milliseconds_p99": 45.6, "between_tokens_milliseconds_p99": None, "goodput": 1.0}
    few, many = ({"prefix_tokens": 0, "prompt_tokens": 1024, "streams": streams, **times} for streams in (1, 32))
    shared = few | {"prefix_tokens": 3072, "prompt_tokens": 256}
    servers = {
        "a.json": {"server": "dma-hf serve m --attn dma_mxfp:balanced+int4 --compile", "results": [few, many, shared]},
        "b.json": {"server": "transformers serve m", "results": [few]},
    }
    monkeypatch.setattr(script, "read", servers.get)
    table = script.under_load("a", "b")
    ours = "`balanced+int4`, `--compile`"
    assert table.index.tolist() == [ours, "`transformers serve`", ours, ours]
    assert table["prompt"].tolist() == ["1,024", "1,024", "1,024", "3,072 shared + 256"]
    assert table.iloc[2].tolist() == ["32", "1,024", "1,234", "12 ms (46 ms)", "8.0 ms (–)", "1.0"]


def test_the_index_lists_every_file_of_results(script):
    index = script.markdown("files")
    for path in BENCHMARKS.rglob("*.json"):
        named = path.parent if path.name == "results.json" else path
        assert f"]({named.relative_to(BENCHMARKS)})" in index


def committed_commands() -> list[str]:
    reports = (json.loads(path.read_text(encoding="utf-8")) for path in BENCHMARKS.rglob("*.json"))
    return [each for report in reports for each in report["command"].split(" && ")]


def test_every_file_says_how_to_make_it_again(script):
    """Versions, date and command; the command is of today or of a named commit, and names no folder of a machine."""
    for path in BENCHMARKS.rglob("*.json"):
        assert {"created", "command", "environment"} <= json.loads(path.read_text(encoding="utf-8")).keys(), path
    for command in committed_commands():
        program, what = command.split()[:2]
        assert " /" not in command
        assert script.retired_at(command) or program == "dma-hf" or (ROOT / what).is_file(), command


def test_a_retired_command_is_not_one_of_today(script):
    app = typer.main.get_command(make_app())
    for command in (each for commands in script.RETIRED.values() for each in commands):
        program, what, *name = command.split()
        assert not (ROOT / what).is_file(), command
        if program == "dma-hf":
            with pytest.raises((UserError, typer.TyperException)):
                app.commands[what].make_context(command, name)


def test_commands_of_results_can_be_run_again(script):
    """Their options are those of today."""
    app = typer.main.get_command(make_app())
    for command in committed_commands():
        program, *arguments = shlex.split(command)
        if script.retired_at(command):
            continue
        if program == "dma-hf":
            app.commands[arguments[0]].make_context(command, arguments[1:])
        elif arguments[0] == "benchmarks/prefill.py":
            names = prefill.make_options().parse_args(arguments[1:]).attn
            assert all(name in PEERS or name.startswith("dma_mxfp:") for name in names), command


def test_the_index_names_the_commit_of_a_retired_command(script):
    index = script.files()["last commit with the command"]
    assert index["[`serve-h200.json`](serve-h200.json)"] == "5ae510b"
    assert pd.isna(index["[`load-int4-h200.json`](load-int4-h200.json)"])


def test_no_result_lacks_a_table_or_a_report():
    """Files that no script makes are not kept: numbers are in JSON files, beside plots and reports of runs."""
    kinds = {path.suffix for path in BENCHMARKS.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert kinds <= {".json", ".md", ".png", ".toml", ".html"}  # pages of runs are not committed
