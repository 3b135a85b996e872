"""The command line ``dma-hf``.

A new command is an entry in ``COMMANDS``: a function that returns the exit code. Its parameters are the options, and
its docstring is the help with examples.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from . import console
from .commands import bench, env, equalize, quality, report, serve
from .config import Run, add_command
from .environment import versions
from .errors import UserError, one_line

COMMANDS: dict[str, Run] = {
    "ppl": quality.ppl,
    "suite": quality.suite,
    "lm-eval": quality.lm_eval,
    "fidelity": quality.fidelity,
    "stress": quality.stress,
    "equalize": equalize.equalize,
    "report": report.report,
    "card": report.card,
    "serve": serve.serve,
    "demo": quality.demo,
    "bench": bench.bench,
    "env": env.env,
}
START = """Start here:
  dma-hf demo         compare every preset on a small model that comes with the package
  dma-hf ppl --help   measure your own model"""


def make_app() -> typer.Typer:
    app = typer.Typer(
        epilog=START, callback=_root, rich_markup_mode="rich", add_completion=False, invoke_without_command=True
    )
    for name, run in COMMANDS.items():
        add_command(app, name, run)
    return app


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Measure what low-bit attention (dma_mxfp) costs and gains on a language model."""
    if version:
        console.print_line(f"dma-hf {versions(['dma-hf']).get('dma-hf', '(not installed)')}")  # in a source tree
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.get_help()
        raise typer.Exit(console.USER_ERROR)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run ``dma-hf``, with the arguments of the process by default, and exit with its code."""
    # Disable the progress bars of libraries, which read these variables at import.
    for variable in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(variable, "1")
    console.shows_tracebacks = False
    try:
        sys.exit(make_app()(arguments, prog_name="dma-hf", standalone_mode=False))
    except (UserError, OSError, typer.TyperException) as error:
        if console.shows_tracebacks:
            console.err.print_exception()
        message = str(error)
        if isinstance(error, OSError):  # a folder that may not be searched, a full disk below standard output
            place = "" if error.filename is None else f"cannot use {error.filename}: "
            message = f"{place}{error.strerror or one_line(error)}"
        elif isinstance(error, typer.TyperException):  # an invalid command line
            path = getattr(getattr(error, "ctx", None), "command_path", "dma-hf")
            message = f"{error.format_message().rstrip('.')} (try: {path} --help)"
        console.print_error(message)
        sys.exit(console.USER_ERROR)
