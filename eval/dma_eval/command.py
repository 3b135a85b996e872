"""Commands whose options are the fields of dataclasses, declared with :func:`option`.

Typer reads one flat signature. The command is called with the dataclasses. A list option takes several values at once
(``--attn sdpa dma_mxfp``) and may be repeated.
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from itertools import pairwise
from typing import Annotated, Any, get_type_hints

import typer.core
from typer.models import OptionInfo

from . import console
from .errors import UserError

REQUIRED = MISSING
"""The default of a required option."""
KEY = "option"
"""Key of the option in a field's metadata."""
DEBUG = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Run = Callable[..., int]


def option(default: Any, *names: str, shown: str | bool = True, panel: str | None = None, **settings: Any) -> Any:
    """Declare a dataclass field as an option. A long name in ``names`` replaces that of the field.

    ``shown`` replaces the default in the help, and ``panel`` is the section of the help. The other settings are those
    of ``typer.Option``: ``help``, ``metavar``, ``min``, ``max``.
    """
    metadata = {KEY: OptionInfo(default=..., param_decls=names, show_default=shown, rich_help_panel=panel, **settings)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def argument(**settings: Any) -> Any:
    """Declare a dataclass field as a required argument."""
    return field(metadata={KEY: typer.Argument(**settings)})


class Command(typer.core.TyperCommand):
    """A command whose list options take several values after one name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the name of a list option before each of its values, and add the given value to errors."""
        known = {name: each for each in self.params for name in each.opts if name.startswith("-")}
        valued = {name for name, each in known.items() if not getattr(each, "is_flag", False)}
        several = {name for name in valued if getattr(known[name], "multiple", False)}
        spread: list[str] = []
        name = None  # of the list option that further values belong to
        waiting = None  # the option that the next argument is the value of
        for argument in [*args, None]:
            option, joined, value = (argument or "").partition("=")
            joined = joined if option in valued and option.startswith("--") else ""
            if waiting is not None and (argument is None or joined or argument in known):
                raise UserError(f"Option {waiting!r} requires an argument (try: {ctx.command_path} --help)")
            if argument is None:
                break
            if waiting is not None:
                spread.append(argument)
                waiting = None
            elif joined:
                spread += [option, value]
                name = option if option in several else None
            elif argument.startswith("-") and not re.fullmatch(r"-\.?\d.*", argument):
                spread.append(argument)
                name = argument if argument in several else None
                waiting = argument if argument in valued else None
            else:
                spread += [argument] if name is None else [name, argument]
        try:
            return super().parse_args(ctx, [*spread])
        except typer.BadParameter as error:
            names = getattr(error.param, "opts", ())
            given = [value for name, value in pairwise(spread) if name in names]
            last = given[-1:] if several.isdisjoint(names) else given  # if an option is repeated, the last value counts
            error.message = error.message.removeprefix("Value error, ")
            if last and repr(last[0]) not in error.message:
                error.message += f", got {' '.join(last)!r}"
            raise
        except typer.TyperException as error:  # of the parser, which names no command
            if getattr(error, "ctx", None) is None:
                vars(error)["ctx"] = ctx
            raise


def add_command(app: typer.Typer, name: str, run: Run) -> None:
    """Add a command to ``app``: a function of dataclasses of options that returns the exit code.

    Its docstring is the help, with examples after a line ``Examples:``.
    """
    kinds = {key: kind for key, kind in get_type_hints(run).items() if key != "return"}
    own: dict[str, list[str]] = {key: [] for key in kinds}  # the options of each dataclass
    declared: dict[str, inspect.Parameter] = {}
    for key, kind in kinds.items():
        types = get_type_hints(kind)
        for each in (each for each in fields(kind) if KEY in each.metadata):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            info = each.metadata[KEY]
            names = info.param_decls
            if isinstance(info, OptionInfo) and not any(name.startswith("--") for name in names):
                info.param_decls = (f"--{each.name.replace('_', '-')}", *names)
            annotation: Any = Annotated[types[each.name], info]
            parameter = inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
            declared[each.name] = parameter if default is MISSING else parameter.replace(default=default)
            own[key].append(each.name)
    declared["debug"] = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DEBUG)

    def call(debug: bool, **values: Any) -> int:
        console.shows_tracebacks = debug
        for key, value in values.items():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, float) and not math.isfinite(each):
                    raise UserError(f"--{key.replace('_', '-')}: expected a finite number, got {each}")
        try:
            return run(**{key: kind(**{name: values[name] for name in own[key]}) for key, kind in kinds.items()})
        except KeyboardInterrupt:
            console.print_error("interrupted")
            return console.INTERRUPTED

    required_first = sorted(declared.values(), key=lambda each: each.default is not inspect.Parameter.empty)
    call.__signature__ = inspect.Signature(required_first)  # type: ignore[attr-defined]
    call.__annotations__ = {key: each.annotation for key, each in declared.items()}
    text, _, examples = inspect.cleandoc(run.__doc__ or "").partition("\nExamples:\n")
    paragraphs = "\n\n".join(paragraph.replace("\n", " ") for paragraph in text.strip().split("\n\n"))
    epilog = f"Examples:\n{textwrap.indent(examples, '  ')}" if examples else None
    app.command(name, cls=Command, help=paragraphs, epilog=epilog)(call)
