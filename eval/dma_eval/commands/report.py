"""``dma-hf report`` and ``dma-hf card``: what can be made of the results of runs, without PyTorch."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.markup import escape

from dma_eval import console
from dma_eval.commands import options
from dma_eval.errors import UserError
from dma_eval.files import prepare_file


def add_report_build(parser: argparse.ArgumentParser) -> None:
    help = "Folders of runs, or their results.json files."
    options.add(parser, "runs", metavar="RUN", nargs="+", type=Path, help=help)
    options.add_out(parser, "Folder for the report; the folder of the only run, if it is left out.")


def report_build(args: argparse.Namespace) -> int:
    """Write the page, the plots and the configurations of a run again, or of several runs of one model together.

    Examples:
    dma-hf report build run
    dma-hf report build ppl-2k ppl-8k tasks --out all
    """
    from dma_eval.results import read_report
    from dma_eval.run_folder import merge, write_run

    if args.out is None and (len(args.runs) > 1 or args.runs[0].is_file()):
        raise UserError("--out: say which folder the report goes to")
    folder = args.out or args.runs[0]
    files = write_run(merge([read_report(path) for path in args.runs]), folder)
    console.print_wrote(*files, folder=folder)
    return 0


def add_report_diff(parser: argparse.ArgumentParser) -> None:
    for name in ("first", "second"):
        help = "Folder of a run, or its results.json."
        options.add(parser, name, metavar=f"{name.upper()}_RUN", type=Path, help=help)
    options.add_files(parser.add_argument_group("output"), "markdown")


def report_diff(args: argparse.Namespace) -> int:
    """Compare two runs: every number that both have, and the settings and versions that differ.

    Examples:
    dma-hf report diff monday tuesday
    dma-hf report diff monday/results.json tuesday/results.json --markdown diff.md
    """
    options.prepare_files(args)
    from dma_eval.markdown import page_to_markdown
    from dma_eval.results import read_report
    from dma_eval.run_folder import compare_reports

    page = compare_reports(read_report(args.first), read_report(args.second))
    console.print_page(page)
    if args.markdown is not None:
        args.markdown.write_text(page_to_markdown(page), encoding="utf-8")
        console.print_wrote(args.markdown)
    return 0


def add_card(parser: argparse.ArgumentParser) -> None:
    options.add(parser, "run", metavar="RUN", type=Path, help="Folder of a run, or its results.json.")
    options.add(parser, "--backend", help="The backend that the card is for.", shown="the first dma_mxfp backend")
    shown = "the name that it was measured by"
    options.add(parser, "--base-model", metavar="OWNER/NAME", help="The model on the Hub.", shown=shown)
    help = "The licence, as the Hub spells it."
    options.add(parser, "--license", dest="license_name", help=help, shown="not stated")
    group = options.add_out(parser, "File for the card; it is shown if this is left out.", "FILE")
    help = "Upload the card and the results to this repository; shows what it will do, and asks."
    options.add(group, "--push", metavar="OWNER/NAME", help=help, shown="not uploaded")
    options.add(group, "--yes", action="store_true", help="Upload without asking.")


def card(args: argparse.Namespace) -> int:
    """Make a Hub model card from a run: metadata, results as a model index, use, settings, limits.

    Examples:
    dma-hf card run --base-model HuggingFaceTB/SmolLM2-135M --license apache-2.0 --out README.md
    dma-hf card run --base-model HuggingFaceTB/SmolLM2-135M --push me/SmolLM2-135M-dma
    """
    prepare_file(args.out, "--out")
    with console.starting():
        from dma_eval.card import make_card, prepare_upload
        from dma_eval.results import RESULTS, read_report

    chosen = {name: getattr(args, name) for name in ("backend", "base_model", "license_name")}
    card = make_card(read_report(args.run), **chosen)
    if args.out is not None:
        args.out.write_text(str(card), encoding="utf-8")
        console.print_wrote(args.out)
    if args.push is None:
        if args.out is None:
            console.out.file.write(str(card))  # as it is, to be piped into a file
        return 0
    upload = prepare_upload(card, args.run / RESULTS if args.run.is_dir() else args.run, args.push)
    for line in upload.plan():
        console.print_line(escape(line))
    if not args.yes and not console.confirm("Go on?"):
        return console.INTERRUPTED
    console.print_line(f"Uploaded: {escape(upload.run())}")
    return 0
