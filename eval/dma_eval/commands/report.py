"""``dma-hf report``: the page and plots of runs, made again or put together, and two runs compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dma_eval import console, options

BUILD_EPILOG = """
[bold]Examples[/]

dma-hf report build run

dma-hf report build ppl-2k ppl-8k tasks --out all
"""
DIFF_EPILOG = """
[bold]Examples[/]

dma-hf report diff monday tuesday

dma-hf report diff monday/results.json tuesday/results.json --markdown diff.md
"""
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or its results.json.", show_default=False)]


def build(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, or their results.json files.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder for the report.",
            show_default="the folder of the only run",
            rich_help_panel=options.OUTPUT_PANEL,
        ),
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Write the page, the plots and the configurations of a run again, or of several runs of one model together."""
    with console.user_errors(debug):
        with console.starting():
            from dma_eval.errors import UserError
            from dma_eval.run_folder import merge, read_run, write_run
        if out is None:
            if len(runs) > 1 or not runs[0].is_dir():
                raise UserError("--out: say which folder the report goes to")
            out = runs[0]
        report = merge([read_run(path) for path in runs])
        console.print_line(f"Wrote {escape(', '.join(write_run(report, out)))} to {escape(str(out))}/")


def diff(
    first: Run,
    second: Run,
    markdown: options.Markdown = None,
    debug: options.Debug = False,
) -> None:
    """Compare two runs: every number that both have, and the settings and versions that differ."""
    with console.user_errors(debug):
        from dma_eval.commands.ppl import prepare_output

        prepare_output(markdown)
        with console.starting():
            from dma_eval.markdown import page_to_markdown
            from dma_eval.run_diff import compare_reports
            from dma_eval.run_folder import read_run
        page = compare_reports(read_run(first), read_run(second))
        console.print_page(page)
        if markdown is not None:
            markdown.write_text(page_to_markdown(page), encoding="utf-8")
            console.print_line(f"Wrote {escape(str(markdown))}")
