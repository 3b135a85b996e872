"""``dma-hf card``: a Hub model card from a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.markup import escape

from dma_eval import console
from dma_eval.commands import options
from dma_eval.files import prepare_file

EXAMPLES = """
dma-hf card run --base-model HuggingFaceTB/SmolLM2-135M --license apache-2.0 --out README.md
dma-hf card run --base-model HuggingFaceTB/SmolLM2-135M --push me/SmolLM2-135M-dma
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add(parser, "run", metavar="RUN", type=Path, help="Folder of a run, or its results.json.")
    options.add(parser, "--backend", help="The backend that the card is for.", shown="the first dma_mxfp backend")
    shown = "the name that it was measured by"
    options.add(parser, "--base-model", metavar="OWNER/NAME", help="The model on the Hub.", shown=shown)
    help = "The licence, as the Hub spells it."
    options.add(parser, "--license", dest="license_name", help=help, shown="not stated")
    group = options.add_out(parser, "File for the card; it is shown if this is left out.")
    help = "Upload the card and the results to this repository; shows what it will do, and asks."
    options.add(group, "--push", metavar="OWNER/NAME", help=help, shown="not uploaded")
    options.add(group, "--yes", action="store_true", help="Upload without asking.")


def run(args: argparse.Namespace) -> int:
    """Make a Hub model card from a run: metadata, results as a model index, use, settings, limits."""
    prepare_file(args.out, "--out")
    with console.starting():
        from dma_eval.card import make_card, prepare_upload
        from dma_eval.run_folder import RESULTS, read_run

    chosen = {name: getattr(args, name) for name in ("backend", "base_model", "license_name")}
    card = make_card(read_run(args.run), **chosen)
    if args.out is not None:
        args.out.write_text(str(card), encoding="utf-8")
        console.print_wrote(args.out)
    if args.push is None:
        if args.out is None:
            console.print_plain(str(card))
        return 0
    upload = prepare_upload(card, args.run / RESULTS if args.run.is_dir() else args.run, args.push)
    for line in upload.plan():
        console.print_line(escape(line))
    if not args.yes and not console.confirm("Go on?"):
        return console.INTERRUPTED
    console.print_line(f"Uploaded: {escape(upload.run())}")
    return 0
