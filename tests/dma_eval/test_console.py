"""What is shown on screens of several widths."""

from __future__ import annotations

import io

import pytest
from dma_eval import console
from dma_eval.show.pages import Table, perplexity_page
from rich.console import Console


class TestTable:
    def test_no_word_is_split_at_80_columns(self, compared, monkeypatch):
        page = io.StringIO()
        screen = Console(file=page, width=80, force_terminal=True, color_system=None, emoji=False)
        monkeypatch.setattr(console, "out", screen)
        console.print_page(perplexity_page(compared("sdpa", "dma_mxfp:balanced", context=64, max_windows=1)))
        lines = page.getvalue().splitlines()
        table = lines[: lines.index("")]
        assert max(map(len, table)) <= 80
        words = {word for line in table for word in line.split()}
        assert {"perplexity", "change", "token", "top-1", "tokens/s", "dma_mxfp:balanced"} <= words

    @pytest.mark.parametrize("is_terminal", [True, False])
    @pytest.mark.parametrize("width", [20, 80])
    def test_no_cell_is_left_out(self, width, is_terminal, monkeypatch):
        """A table of many backends is wider than the screen, and than the width of tables in a file."""
        names = [f"dma_mxfp:backend{index:02}" for index in range(9)]
        page = io.StringIO()
        screen = Console(file=page, width=width, force_terminal=is_terminal, color_system=None)
        monkeypatch.setattr(console, "out", screen)
        numbers = [f"{index}.12345" for index in range(9)]
        console.print_table(Table(("twin", *names), [["unchanged", *numbers]]))
        header, _, row, _ = page.getvalue().splitlines()
        assert header.split() == ["twin", *names]
        assert row.split() == ["unchanged", *numbers]


@pytest.mark.parametrize("message", ["a:b:c", "[red]x[/]", "no end [/", "x" * 300])
def test_error_is_shown_unchanged(message, capsys):
    console.print_error(message)
    assert capsys.readouterr().err == f"Error: {message}\n"


def test_an_import_cannot_swallow_an_interruption(python):
    """Python turns KeyboardInterrupt into RuntimeError in some places, and libraries go on after an error."""
    code = (
        "import os, signal\n"
        "from dma_eval import console\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # which the background of a script ignores\n"
        "with console.starting():\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGINT)\n    except BaseException:\n        pass\n"
        "print('went on')\n"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (console.INTERRUPTED, "", "Error: interrupted\n")
