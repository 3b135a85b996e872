"""``dma-hf card``: a Hub model card from a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dma_eval import console, options

EPILOG = """
[bold]Examples[/]

dma-hf card run --base-model HuggingFaceTB/SmolLM2-135M --license apache-2.0 --out README.md

dma-hf card run --base-model HuggingFaceTB/SmolLM2-135M --push me/SmolLM2-135M-dma
"""


def card(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or its results.json.", show_default=False)
    ],
    backend: Annotated[
        str | None,
        typer.Option(help="The backend that the card is for.", show_default="the first dma_mxfp backend"),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME", help="The model on the Hub.", show_default="the name that it was measured by"
        ),
    ] = None,
    license_name: Annotated[
        str | None,
        typer.Option("--license", help="The licence, as the Hub spells it.", show_default="not stated"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File for the card.",
            show_default="shown, not written",
            rich_help_panel=options.OUTPUT_PANEL,
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Upload the card and the results to this repository; shows what it will do, and asks.",
            show_default="not uploaded",
            rich_help_panel=options.OUTPUT_PANEL,
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Upload without asking.", show_default="off", rich_help_panel=options.OUTPUT_PANEL),
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Make a Hub model card from a run: metadata, results as a model index, use, settings, limits."""
    with console.user_errors(debug):
        from dma_eval.commands.ppl import prepare_output

        prepare_output(out)
        with console.starting():
            from dma_eval.card import make_card, prepare_upload
            from dma_eval.run_folder import RESULTS, read_run

        made = make_card(read_run(run), backend=backend, base_model=base_model, license_name=license_name)
        if out is not None:
            out.write_text(str(made), encoding="utf-8")
            console.print_line(f"Wrote {escape(str(out))}")
        if push is None:
            if out is None:
                console.print_plain(str(made))
            return
        upload = prepare_upload(made, run / RESULTS if run.is_dir() else run, push)
        for line in upload.plan():
            console.print_line(escape(line))
        if not yes:
            typer.confirm("Go on?", abort=True)
        console.print_line(f"Uploaded: {escape(upload.run())}")
