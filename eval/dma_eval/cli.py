"""The command line ``dma-hf``.

A new command is an entry in ``COMMANDS``: a function that adds its options to a parser, and one that runs it, returns
the exit code, and has the help, with examples, as its docstring.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import NoReturn

from . import console
from .commands import bench, demo, env, equalize, quality, report, serve
from .errors import UserError

Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
COMMANDS: dict[str, Command] = {
    "ppl": (quality.add_ppl, quality.ppl),
    "suite": (quality.add_suite, quality.suite),
    "lm-eval": (quality.add_lm_eval, quality.lm_eval),
    "fidelity": (quality.add_fidelity, quality.fidelity),
    "retrieval": (quality.add_retrieval, quality.retrieval),
    "stress": (quality.add_stress, quality.stress),
    "equalize": (equalize.add_equalize, equalize.equalize),
    "report build": (report.add_report_build, report.report_build),
    "report diff": (report.add_report_diff, report.report_diff),
    "card": (report.add_card, report.card),
    "serve": (serve.add_serve, serve.serve),
    "demo": (demo.add_demo, demo.demo),
    "env": (env.add_env, env.env),
    "bench prefill": (bench.add_prefill, bench.time_prefill),
    "bench decode": (bench.add_decode, bench.time_decode),
    "bench generate": (bench.add_generate, bench.time_generate),
    "bench serve": (bench.add_serve, bench.time_serve),
}
GROUPS = {
    "bench": "Measure speed: of attention alone, of generate, and of many requests at once.",
    "report": "The page and plots of runs; two runs compared.",
}
"""Words that several commands begin with."""
DESCRIPTION = "Measure what low-bit attention (dma_mxfp) costs and gains on a language model."
START = """start here:
  dma-hf demo         everything on a small model that comes with the package
  dma-hf ppl --help   measure a model of yours"""


class Parser(argparse.ArgumentParser):
    """A parser that reports an invalid command line as every other error: on one line."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise UserError(f"{message} (try: {self.prog} --help)")


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser("dma-hf", description=DESCRIPTION, epilog=START, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"dma-hf {version()}", help="Show the version and exit.")
    parser.set_defaults(command=None, parser=parser, debug=False)
    commands = {"": parser.add_subparsers(title="commands", metavar="COMMAND")}
    for name, (add_options, run) in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in commands:
            grouped = commands[""].add_parser(group, help=GROUPS[group], description=GROUPS[group])
            grouped.set_defaults(parser=grouped)
            commands[group] = grouped.add_subparsers(title="commands", metavar="COMMAND")
        text, _, examples = inspect.cleandoc(run.__doc__ or "").partition("\nExamples:\n")
        command = commands[group].add_parser(
            last,
            help=text.partition("\n")[0],
            description=text.rstrip(),
            epilog=f"examples:\n{textwrap.indent(examples, '  ')}",
            formatter_class=form,
            allow_abbrev=False,
        )
        add_options(command)
        command.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
        command.set_defaults(command=run, parser=command)
    return parser


def version() -> str:
    """The installed version."""
    try:
        return metadata.version("dma-hf")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "(not installed)"


def hide_library_bars() -> None:
    """Keep libraries from drawing progress bars beside ours; they read these variables when they are imported."""
    for variable in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(variable, "1")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run ``dma-hf``, with the arguments of the process by default, and exit with its code."""
    hide_library_bars()
    debug = "--debug" in (sys.argv if arguments is None else arguments)
    try:
        args, unknown = make_parser().parse_known_args(arguments)
        if unknown:  # said by the command's own parser: its help is the one that lists the options
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if args.command is None:
            args.parser.print_help()
            sys.exit(console.USER_ERROR)
        sys.exit(args.command(args))
    except (UserError, PermissionError) as error:
        if debug:
            console.err.print_exception()
        message = str(error)
        if isinstance(error, PermissionError):  # a path in a folder that may not be searched, wherever it is looked at
            message = f"cannot use {error.filename}: {error.strerror}"
        console.print_error(message)
        sys.exit(console.USER_ERROR)
    except KeyboardInterrupt:
        console.print_error("interrupted")
        sys.exit(console.INTERRUPTED)
