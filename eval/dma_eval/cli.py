"""The command line ``dma-hf``: one command per file in ``commands``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from . import console
from .commands.bench_decode import EPILOG as DECODE_EPILOG
from .commands.bench_decode import decode
from .commands.bench_generate import EPILOG as GENERATE_EPILOG
from .commands.bench_generate import generate
from .commands.bench_prefill import EPILOG as PREFILL_EPILOG
from .commands.bench_prefill import prefill
from .commands.card import EPILOG as CARD_EPILOG
from .commands.card import card
from .commands.demo import EPILOG as DEMO_EPILOG
from .commands.demo import demo
from .commands.env import env
from .commands.fidelity import EPILOG as FIDELITY_EPILOG
from .commands.fidelity import fidelity
from .commands.lm_eval import EPILOG as LM_EVAL_EPILOG
from .commands.lm_eval import lm_eval
from .commands.ppl import EPILOG as PPL_EPILOG
from .commands.ppl import ppl
from .commands.report import BUILD_EPILOG, DIFF_EPILOG, build, diff
from .commands.retrieval import EPILOG as RETRIEVAL_EPILOG
from .commands.retrieval import retrieval
from .commands.suite import EPILOG as SUITE_EPILOG
from .commands.suite import suite

EPILOG = """
[bold]Start here[/]

dma-hf demo: everything on a small model that comes with the package

dma-hf ppl --help: measure a model of yours
"""
# What Typer raises for an invalid command line: its versions keep this class in different places, none of them public.
UsageError: type[Any] = typer.BadParameter.__mro__[1]


class OneLineErrorGroup(TyperGroup):
    """A group of commands that reports an invalid command line as one line, like every other error."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command and exit with its code; as a library function, with ``standalone_mode=False``, return it."""
        if not options.get("standalone_mode", True):
            return super().main(*args, **options)
        try:
            code = super().main(*args, **(options | {"standalone_mode": False}))
        except UsageError as error:
            context = getattr(error, "ctx", None)
            usage = f" (try: {context.command_path} --help)" if context is not None else ""
            message = error.format_message().rstrip(".")
            if message:  # there is none when no arguments are given: the help has been shown
                console.print_error(f"{message}{usage}")
            sys.exit(console.USER_ERROR)
        except typer.Abort:
            console.print_error("interrupted")
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)


class MultiValueCommand(TyperCommand):
    """A command whose list options take several values: ``--attn a b --attn c`` is ``--attn a --attn b --attn c``.

    Values end at the next argument that starts with a dash. Such a command has no positional arguments.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``args`` after giving every value an option of its own."""
        names = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        return super().parse_args(ctx, repeat_options(args, names))


def repeat_options(args: Sequence[str], names: set[str]) -> list[str]:
    """Put the option before each of its values: ``["--attn", "a", "b"]`` to ``["--attn", "a", "--attn", "b"]``."""
    repeated: list[str] = []
    option = None  # the list option whose values come now
    for index, arg in enumerate(args):
        if arg == "--":
            return repeated + list(args[index:])
        if arg.startswith("-") and arg != "-":
            name, equals, _ = arg.partition("=")
            option = name if name in names else None
            # An option without values stays as it is, for the parser to complain about.
            has_value = index + 1 < len(args) and not args[index + 1].startswith("-")
            if option is None or equals or not has_value:
                repeated.append(arg)
        elif option is not None:
            repeated += [option, arg]
        else:
            repeated.append(arg)
    return repeated


def _version(show: bool) -> None:
    if show:
        try:
            version = metadata.version("dma-hf")
        except metadata.PackageNotFoundError:  # run from a source tree
            version = "(not installed)"
        console.out.print(f"dma-hf {version}", highlight=False)
        raise typer.Exit


app = typer.Typer(
    name="dma-hf",
    cls=OneLineErrorGroup,
    help="Measure what low-bit attention (dma_mxfp) costs and gains on a language model.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    add_completion=False,
)
app.command("ppl", cls=MultiValueCommand, epilog=PPL_EPILOG)(ppl)
app.command("suite", cls=MultiValueCommand, epilog=SUITE_EPILOG)(suite)
app.command("lm-eval", cls=MultiValueCommand, epilog=LM_EVAL_EPILOG)(lm_eval)
app.command("fidelity", cls=MultiValueCommand, epilog=FIDELITY_EPILOG)(fidelity)
app.command("retrieval", cls=MultiValueCommand, epilog=RETRIEVAL_EPILOG)(retrieval)
app.command("card", epilog=CARD_EPILOG)(card)
app.command("demo", epilog=DEMO_EPILOG)(demo)
app.command("env")(env)
bench = typer.Typer(help="Measure speed: of attention alone, and of generate.", no_args_is_help=True)
bench.command("prefill", cls=MultiValueCommand, epilog=PREFILL_EPILOG)(prefill)
bench.command("decode", cls=MultiValueCommand, epilog=DECODE_EPILOG)(decode)
bench.command("generate", cls=MultiValueCommand, epilog=GENERATE_EPILOG)(generate)
app.add_typer(bench, name="bench")
report = typer.Typer(name="report", help="The page and plots of runs; two runs compared.", no_args_is_help=True)
report.command("build", epilog=BUILD_EPILOG)(build)
report.command("diff", epilog=DIFF_EPILOG)(diff)
app.add_typer(report)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


def main() -> None:
    """Run ``dma-hf``."""
    app()
