"""The command line ``dma-hf``: one module per command in ``commands``, which has its options and runs it.

A new command is a module with ``add_options``, ``run`` (its docstring is the help; it returns the exit code) and
``EXAMPLES``, and an entry in ``COMMANDS``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from types import ModuleType
from typing import NoReturn

from . import console
from .commands import (
    bench_decode,
    bench_generate,
    bench_prefill,
    bench_serve,
    card,
    demo,
    env,
    equalize,
    fidelity,
    lm_eval,
    ppl,
    report_build,
    report_diff,
    retrieval,
    serve,
    stress,
    suite,
)
from .errors import UserError

COMMANDS: dict[str, ModuleType] = {
    "ppl": ppl,
    "suite": suite,
    "lm-eval": lm_eval,
    "fidelity": fidelity,
    "retrieval": retrieval,
    "stress": stress,
    "equalize": equalize,
    "report build": report_build,
    "report diff": report_diff,
    "card": card,
    "serve": serve,
    "demo": demo,
    "env": env,
    "bench prefill": bench_prefill,
    "bench decode": bench_decode,
    "bench generate": bench_generate,
    "bench serve": bench_serve,
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
    for name, module in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in commands:
            grouped = commands[""].add_parser(group, help=GROUPS[group], description=GROUPS[group])
            grouped.set_defaults(parser=grouped)
            commands[group] = grouped.add_subparsers(title="commands", metavar="COMMAND")
        text = (module.run.__doc__ or "").strip()
        command = commands[group].add_parser(
            last,
            help=text.partition("\n")[0],
            description="\n".join(line.strip() for line in text.splitlines()),
            epilog=f"examples:\n  {module.EXAMPLES.strip()}".replace("\n", "\n  ").replace("\n    ", "\n  "),
            formatter_class=form,
            allow_abbrev=False,
        )
        module.add_options(command)
        command.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
        command.set_defaults(command=module.run)
    return parser


def version() -> str:
    """The installed version."""
    try:
        return metadata.version("dma-hf")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "(not installed)"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run ``dma-hf``, with the arguments of the process by default, and exit with its code."""
    debug = "--debug" in (sys.argv if arguments is None else arguments)
    try:
        args = make_parser().parse_args(arguments)
        if args.command is None:
            args.parser.print_help()
            sys.exit(console.USER_ERROR)
        sys.exit(args.command(args))
    except UserError as error:
        if debug:
            console.err.print_exception()
        console.print_error(str(error))
        sys.exit(console.USER_ERROR)
    except KeyboardInterrupt:
        console.print_error("interrupted")
        sys.exit(console.INTERRUPTED)
