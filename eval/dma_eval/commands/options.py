"""Options that several commands share, each declared once, and commands made of dataclasses of options.

A command is a function whose parameters are options, or dataclasses whose annotated fields are. Typer reads one flat
signature. A list option takes several values at a time, ``--attn sdpa dma_mxfp``, and may be repeated.
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer.core
from typer import Argument, Option
from typer.models import ParameterInfo

from dma_eval import console
from dma_eval.errors import UserError
from dma_eval.files import prepare_file

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
DEFAULT_ATTN = ("sdpa", "dma_mxfp:balanced")
MODEL_FORMS = "NAME|FOLDER|FILE.gguf"
Run = Callable[..., int]
empty = inspect.Parameter.empty

Model = Annotated[str, Option("--model", "-m", metavar=MODEL_FORMS, help="Hub name, local folder, or GGUF file.")]
data = partial(
    Option,
    "--data",
    "-d",
    metavar="FILE|DATASET",
    rich_help_panel="Text",
    help="Text file; .json, .jsonl, .csv or .parquet file; or a Hub dataset as NAME, NAME:CONFIG or NAME:CONFIG:SPLIT.",
)
Device = Annotated[str, Option("--device", help="auto, cpu, cuda or cuda:N; auto is CUDA if present.")]
Seed = Annotated[int, Option("--seed", min=0, max=2**32 - 1, help="Seed of PyTorch's random numbers.")]
Yarn = Annotated[
    float | None,
    Option("--yarn", metavar="FACTOR", help="Multiply the model's positions by this factor, rescaling RoPE by YaRN."),
]
attn = partial(
    Option,
    "--attn",
    "-a",
    metavar="BACKEND...",
    help=(
        "Attention backends to compare; the first is the reference. An attn_implementation of Transformers, "
        "dma_mxfp:PRESET, or dma_mxfp:FILE.toml; +int8 or +int4 reads through a DMACache. Takes several values."
    ),
)
OUTPUT = "Output"
Out = Annotated[
    Path | None,
    Option(
        "--out",
        "-o",
        metavar="FOLDER",
        rich_help_panel=OUTPUT,
        help=(
            "Folder for the whole report: results.json, pages, plots, configurations. What is finished there is not "
            "measured again."
        ),
    ),
]
Json = Annotated[
    Path | None, Option("--json", metavar="FILE", rich_help_panel=OUTPUT, help="Write all results as JSON.")
]
Markdown = Annotated[
    Path | None, Option("--markdown", metavar="FILE", rich_help_panel=OUTPUT, help="Write a readable report.")
]
Plot = Annotated[
    Path | None,
    Option("--plot", metavar="FILE", rich_help_panel=OUTPUT, help=f"Write the plots, as {', '.join(PLOT_SUFFIXES)}."),
]
IncludePath = Annotated[
    list[Path],
    Option("--include-path", metavar="FOLDER...", rich_help_panel="Tasks", help="Folders with your own task YAMLs."),
]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is loaded, and where it runs."""

    revision: Annotated[
        str | None, Option("--revision", help="Branch, tag or commit on the Hub.", show_default="the main branch")
    ] = None
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Let code that comes with the model run.")
    ] = False
    dtype: Annotated[
        str,
        Option("--dtype", help="auto, float32, bfloat16 or float16; auto is the checkpoint's own, float32 for GGUF."),
    ] = "auto"
    device: Device = "auto"
    device_map: Annotated[
        str | None,
        Option(
            "--device-map",
            help="Spread the model over several devices: auto, balanced, sequential. Instead of --device.",
        ),
    ] = None
    yarn: Yarn = None
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions):
    """The model, named by an option."""

    model: Model


@dataclass(frozen=True, kw_only=True)
class ServedModelOptions(LoadOptions):
    """The model, named by position."""

    model: Annotated[str, Argument(metavar=MODEL_FORMS, help="Hub name, local folder, or GGUF file.")]


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """What of a dataset is read."""

    split: Annotated[
        str | None,
        Option(
            "--split",
            rich_help_panel="Text",
            help="Split of the dataset, if --data does not name it.",
            show_default="test; all of a file",
        ),
    ] = None
    column: Annotated[str, Option("--column", rich_help_panel="Text", help="The dataset's column of text.")] = "text"


@dataclass(frozen=True, kw_only=True)
class TextOptions(DatasetOptions):
    """The text to read."""

    data: Annotated[str, data()]


@dataclass(frozen=True, kw_only=True)
class OptionalTextOptions(DatasetOptions):
    """A text that is not always needed."""

    data: Annotated[str | None, data()] = None


@dataclass(frozen=True, kw_only=True)
class QualityOptions(ModelOptions):
    """What every command takes that compares backends on a model."""

    attn: Annotated[list[str], attn()] = field(default_factory=lambda: list(DEFAULT_ATTN))
    out: Out = None


@dataclass(frozen=True, kw_only=True)
class AllPresetsOptions(QualityOptions):
    """The same, with every preset by default."""

    attn: Annotated[list[str], attn(show_default="sdpa and every preset")] = field(default_factory=list)


class Command(typer.core.TyperCommand):
    """A command whose list options take several values after one name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the name of a list option before each of its values."""
        several = {name for each in self.params if getattr(each, "multiple", False) for name in each.opts}
        spread: list[str] = []
        option = None
        for argument in args:
            if argument.startswith("-") and not re.fullmatch(r"-\.?\d.*", argument):
                option = argument if argument in several else None
            elif option is not None and spread[-1] != option:
                spread.append(option)
            spread.append(argument)
        try:
            return super().parse_args(ctx, [*spread])
        except typer.BadParameter as error:
            names = getattr(error.param, "opts", ())
            given = [value for name, value in pairwise(spread) if name in names]
            last = given[-1:] if set(names).isdisjoint(several) else given  # of an option that is repeated, the last
            error.message = error.message.removeprefix("Value error, ")
            if last and last[0] not in error.message:
                error.message += f", got {' '.join(last)!r}"
            raise


def command(app: typer.Typer, name: str, run: Run) -> None:
    """Add a command to ``app``. Its docstring is the help, with examples after a line ``Examples:``.

    The function returns the exit code.
    """
    text, _, examples = inspect.cleandoc(run.__doc__ or "").partition("\nExamples:\n")
    hints = get_type_hints(run, include_extras=True)
    given = {each.name: (hints[each.name], each.default) for each in inspect.signature(run).parameters.values()}

    def call(debug: bool, **values: Any) -> int:
        console.shows_tracebacks = debug
        try:
            return run(**{name: _build(name, kind, values) for name, (kind, _) in given.items()})
        except KeyboardInterrupt:
            console.print_error("interrupted")
            return console.INTERRUPTED

    declared = {name: pair for key, value in given.items() for name, pair in _flat(key, *value)}
    declared["debug"] = (Annotated[bool, Option("--debug", help="Show the traceback of an error.")], False)
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in sorted(declared.items(), key=lambda item: item[1][1] is not empty)
        ]
    )
    call.__annotations__ = {name: kind for name, (kind, _) in declared.items()}
    paragraphs = "\n\n".join(paragraph.replace("\n", " ") for paragraph in text.strip().split("\n\n"))
    epilog = f"Examples:\n{textwrap.indent(examples, '  ')}" if examples else None
    app.command(name, cls=Command, help=paragraphs, epilog=epilog)(call)


def _flat(name: str, kind: Any, default: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The options of a parameter, with kind and default: itself, or the annotated fields of a dataclass."""
    if not is_dataclass(kind):
        yield name, (kind, default)
        return
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        if any(isinstance(extra, ParameterInfo) for extra in getattr(hints[each.name], "__metadata__", ())):
            default = empty if each.default is MISSING else each.default
            yield each.name, (hints[each.name], default if each.default_factory is MISSING else each.default_factory())


def _build(name: str, kind: Any, values: dict[str, Any]) -> Any:
    """The value of a parameter: its option's, or a dataclass of options."""
    own = {key: values[key] for key, _ in _flat(name, kind, None)}
    for key, value in own.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, float) and not math.isfinite(each):
                raise UserError(f"--{key.replace('_', '-')}: expected a finite number, got {each}")
    made: Any = kind
    return made(**own) if is_dataclass(kind) else own[name]


def prepare_files(**files: Path | None) -> list[Path]:
    """Make sure before a long run that single files can be written, and return which were asked for.

    Raises:
        UserError: One cannot, or a plot has no known suffix.
    """
    plot = files.get("plot")
    if plot is not None and not plot.is_dir() and plot.suffix not in PLOT_SUFFIXES:
        raise UserError(f"--plot: expected a file ending in {', '.join(PLOT_SUFFIXES)}, got {plot}")
    for name, path in files.items():
        prepare_file(path, f"--{name}")
    return [path for path in files.values() if path is not None]
