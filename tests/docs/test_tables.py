"""The tables of results in the pages are those that ``scripts/update_docs.py`` makes of the committed files."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import prefill
import pytest
import typer
from dma_eval.cli import make_app
from dma_eval.errors import UserError
from kernel_bench.peers import PEERS
from script_files import load_script

ROOT = Path(__file__).parents[2]


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


def test_help_writes_no_page(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["update_docs.py", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "scripts" / "update_docs.py"), run_name="__main__")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: prefill -->\n", "every <!-- table: NAME --> needs one <!-- end table -->"),
        ("<!-- end table -->", "every <!-- table: NAME --> needs one"),
        ("<!-- table: speed -->\n<!-- end table -->", "unknown tables speed; valid: results, "),
    ],
)
def test_wrong_marks_are_refused(script, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        script.updated(text)


def test_a_retired_command_is_not_one_of_today(script):
    app = typer.main.get_command(make_app())
    for command in (each for commands in script.RETIRED.values() for each in commands):
        program, what, *name = command.split()
        assert not (ROOT / what).is_file(), command
        if program == "dma-hf":
            with pytest.raises((UserError, typer.TyperException)):
                app.commands[what].make_context(command, name)


def test_results_can_be_made_again(script):
    """A file has versions, date and commands of today, or of a named commit, that name no folder of a machine."""
    app = typer.main.get_command(make_app())
    for path in (ROOT / "benchmarks").rglob("*.json"):
        report = json.loads(path.read_text(encoding="utf-8"))
        assert {"created", "command", "environment"} <= report.keys(), path
        for command in report["command"].split(" && "):
            program, what, *arguments = shlex.split(command)
            assert " /" not in command
            if script.retired_at(command):
                continue
            if program == "dma-hf":
                app.commands[what].make_context(command, arguments)
            else:
                assert (ROOT / what).is_file(), command
            if what == "benchmarks/prefill.py":
                names = prefill.make_options().parse_args(arguments).attn
                assert all(name in PEERS or name.startswith("dma_mxfp:") for name in names), command
