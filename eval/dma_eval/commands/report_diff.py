"""``dma-hf report diff``: two runs compared."""

from __future__ import annotations

import argparse
from pathlib import Path

from dma_eval import console
from dma_eval.commands import options

EXAMPLES = """
dma-hf report diff monday tuesday
dma-hf report diff monday/results.json tuesday/results.json --markdown diff.md
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    for name in ("first", "second"):
        help = "Folder of a run, or its results.json."
        options.add(parser, name, metavar=f"{name.upper()}_RUN", type=Path, help=help)
    options.add_files(parser.add_argument_group("output"), "markdown")


def run(args: argparse.Namespace) -> int:
    """Compare two runs: every number that both have, and the settings and versions that differ."""
    options.prepare_files(args)
    with console.starting():
        from dma_eval.markdown import page_to_markdown
        from dma_eval.run_diff import compare_reports
        from dma_eval.run_folder import read_run
    page = compare_reports(read_run(args.first), read_run(args.second))
    console.print_page(page)
    if args.markdown is not None:
        args.markdown.write_text(page_to_markdown(page), encoding="utf-8")
        console.print_wrote(args.markdown)
    return 0
