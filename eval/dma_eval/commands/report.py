"""``dma-hf report`` and ``dma-hf card``: what can be made of the results of runs, without PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.markup import escape
from typer import Argument, Option

from dma_eval import console
from dma_eval.errors import UserError
from dma_eval.files import prepare_file


def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders of runs, or their results.json files.")],
    out: Annotated[
        Path | None,
        Option("--out", "-o", metavar="FOLDER", help="Folder for the report.", show_default="that of the only run"),
    ] = None,
) -> int:
    """Write the pages, the plots and the configurations of a run again, or of several runs of one model together.

    Examples:
    dma-hf report run
    dma-hf report ppl-2k ppl-8k tasks --out all
    """
    from dma_eval.results import read_report
    from dma_eval.run_folder import merge, write_run

    if out is None and (len(runs) > 1 or runs[0].is_file()):
        raise UserError("--out: say which folder the report goes to")
    folder = out or runs[0]
    files = write_run(merge([read_report(path) for path in runs]), folder)
    console.print_wrote(*files, folder=folder)
    return 0


def card(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a run, or its results.json.")],
    backend: Annotated[
        str | None,
        Option("--backend", help="The backend that the card is for.", show_default="the first dma_mxfp backend"),
    ] = None,
    base_model: Annotated[
        str | None,
        Option(
            "--base-model", metavar="OWNER/NAME", help="The model on the Hub.", show_default="the name it was loaded by"
        ),
    ] = None,
    license_name: Annotated[str | None, Option("--license", help="The licence, as the Hub spells it.")] = None,
    out: Annotated[
        Path | None,
        Option("--out", "-o", metavar="FILE", help="File for the card.", show_default="shown on the screen"),
    ] = None,
    push: Annotated[
        str | None,
        Option(
            "--push",
            metavar="OWNER/NAME",
            help="Upload the card and the results to this repository; shows what it will do, and asks.",
        ),
    ] = None,
    yes: Annotated[bool, Option("--yes", help="Upload without asking.")] = False,
) -> int:
    """Make a Hub model card from a run: metadata, results as a model index, use, settings, limits.

    Examples:
    dma-hf card run --base-model HuggingFaceTB/SmolLM2-135M --license apache-2.0 --out README.md
    dma-hf card run --base-model HuggingFaceTB/SmolLM2-135M --push me/SmolLM2-135M-dma
    """
    prepare_file(out, "--out")
    from dma_eval.card import make_card, prepare_upload
    from dma_eval.results import RESULTS, read_report

    card = make_card(read_report(run), backend=backend, base_model=base_model, license_name=license_name)
    if out is not None:
        out.write_text(str(card), encoding="utf-8")
        console.print_wrote(out)
    if push is None:
        if out is None:
            console.out.file.write(str(card))  # unformatted, to be piped into a file
        return 0
    upload = prepare_upload(card, run / RESULTS if run.is_dir() else run, push)
    for line in upload.plan():
        console.print_line(escape(line))
    if not yes and not console.confirm("Go on?"):
        return console.INTERRUPTED
    console.print_line(f"Uploaded: {escape(upload.run())}")
    return 0
