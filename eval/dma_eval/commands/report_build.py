"""``dma-hf report build``: the page and plots of runs, made again or put together."""

from __future__ import annotations

import argparse
from pathlib import Path

from dma_eval import console
from dma_eval.commands import options
from dma_eval.errors import UserError

EXAMPLES = """
dma-hf report build run
dma-hf report build ppl-2k ppl-8k tasks --out all
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    help = "Folders of runs, or their results.json files."
    options.add(parser, "runs", metavar="RUN", nargs="+", type=Path, help=help)
    options.add_out(parser, "Folder for the report; the folder of the only run, if it is left out.")


def run(args: argparse.Namespace) -> int:
    """Write the page, the plots and the configurations of a run again, or of several runs of one model together."""
    with console.starting():
        from dma_eval.run_folder import merge, read_run, write_run
    if args.out is None and (len(args.runs) > 1 or not args.runs[0].is_dir()):
        raise UserError("--out: say which folder the report goes to")
    folder = args.out or args.runs[0]
    files = write_run(merge([read_run(path) for path in args.runs]), folder)
    console.print_wrote(*files, folder=folder)
    return 0
