"""What a command is told: options as fields of dataclasses, the parts of a measurement, and suites of parts.

Typer reads one flat signature (:func:`add_command`). The command is called with the dataclasses. A list option takes
several values at once (``--attn sdpa dma_mxfp``) and may be repeated. A field of a part is a key of a suite's table. If
it is also an option, the default is the same. The suites in the folder ``suites`` come with the package.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer.core
from typer.models import OptionInfo

from . import console
from .errors import UserError
from .files import parse
from .names import check_device, check_yarn, parse_source

REQUIRED = MISSING  # the default of a required option
KEY = "option"  # key of the option in a field's metadata
DEBUG = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
DEFAULT_ATTN = ["sdpa", "dma_mxfp:balanced"]
DEFAULT_CONTEXT = 2048  # tokens per window, or the model's maximum if that is less
MODEL: dict[str, Any] = {"metavar": "NAME|FOLDER|FILE.gguf", "help": "Hub name, local folder, or GGUF file."}
DATA = "Text file; .json, .jsonl, .csv or .parquet file; or a Hub dataset, NAME, NAME:CONFIG or NAME:CONFIG:SPLIT."
OUTPUT = "Output"  # section of the help
SUITES = resources.files("dma_eval") / "suites"
Run = Callable[..., int]


def option(default: Any, *names: str, shown: str | bool = True, panel: str | None = None, **settings: Any) -> Any:
    """Declare a dataclass field as an option. A long name in ``names`` replaces that of the field.

    ``shown`` replaces the default in the help, and ``panel`` is the section of the help. The other settings are those
    of ``typer.Option``: ``help``, ``metavar``, ``min``, ``max``.
    """
    metadata = {KEY: OptionInfo(default=..., param_decls=names, show_default=shown, rich_help_panel=panel, **settings)}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def argument(**settings: Any) -> Any:
    """Declare a dataclass field as a required argument."""
    return field(metadata={KEY: typer.Argument(**settings)})


class Command(typer.core.TyperCommand):
    """A command whose list options take several values after one name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the name of a list option before each of its values, and add the given value to errors."""
        known = {name: vars(each) for each in self.get_params(ctx) for name in each.opts if name.startswith("-")}
        lists = {name for name, each in known.items() if each["multiple"]}
        spread: list[str] = []
        name = ""  # of the list option that further values belong to
        for previous, given in pairwise(["", *args]):
            if given in known and previous in known and not known[previous]["is_flag"]:
                raise UserError(f"Option {previous!r} requires an argument (try: {ctx.command_path} --help)")
            if given.startswith("-") and not re.fullmatch(r"-\.?\d.*", given):
                option = given.partition("=")[0]
                name = option if option in lists else ""
                spread.append(given)
            else:
                spread += [name, given] if name and previous != name else [given]
        try:
            return super().parse_args(ctx, [*spread])
        except typer.TyperException as error:
            vars(error)["ctx"] = ctx  # the parser names no command
            names = set(getattr(getattr(error, "param", None), "opts", ()))
            values = [value for name, value in pairwise(spread) if name in names]
            shown = values if names & lists else values[-1:]  # if an option is repeated, the last value counts
            error.message = error.message.removeprefix("Value error, ")
            if shown and repr(shown[0]) not in error.message:
                error.message += f", got {' '.join(shown)!r}"
            raise


def add_command(app: typer.Typer, name: str, run: Run) -> None:
    """Add a command: a function of dataclasses of options. Its docstring is the help, with examples at the end."""
    kinds = {key: kind for key, kind in get_type_hints(run).items() if key != "return"}
    own = {key: [each for each in fields(kind) if KEY in each.metadata] for key, kind in kinds.items()}
    types = {key: get_type_hints(kind) for key, kind in kinds.items()}
    parameters = [_parameter(each, types[key][each.name]) for key, declared in own.items() for each in declared]
    parameters.append(inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, annotation=DEBUG, default=False))

    def call(debug: bool, **values: Any) -> int:
        console.shows_tracebacks = debug
        values = {key: _expanded(value) for key, value in values.items()}
        for key, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"--{key.replace('_', '-')}: expected a finite number, got {value}")
        try:
            given = {key: {each.name: values[each.name] for each in own[key]} for key in kinds}
            return run(**{key: kind(**given[key]) for key, kind in kinds.items()})
        except KeyboardInterrupt:
            console.print_error("interrupted")
            return console.INTERRUPTED

    parameters.sort(key=lambda each: each.default is not inspect.Parameter.empty)  # required ones first
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    text, _, examples = inspect.cleandoc(run.__doc__ or "").partition("\nExamples:\n")
    paragraphs = "\n\n".join(paragraph.replace("\n", " ") for paragraph in text.strip().split("\n\n"))
    epilog = f"Examples:\n{textwrap.indent(examples, '  ')}" if examples else None
    app.command(name, cls=Command, help=paragraphs, epilog=epilog)(call)


def _expanded(value: Any) -> Any:
    """Return paths with the user's folder for ``~``, which a shell does not replace in ``--out=~/run``."""
    if isinstance(value, list):
        return [_expanded(each) for each in value]
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value


def _parameter(declared: Field[Any], kind: Any) -> inspect.Parameter:
    """Return the parameter of a signature by which Typer knows an option or an argument."""
    default = declared.default if declared.default_factory is MISSING else declared.default_factory()
    info, names = declared.metadata[KEY], tuple(declared.metadata[KEY].param_decls or ())
    if isinstance(info, OptionInfo) and not any(name.startswith("--") for name in names):
        info.param_decls = (f"--{declared.name.replace('_', '-')}", *names)  # typer negates flags
    default = inspect.Parameter.empty if default is MISSING else default
    how = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(declared.name, how, annotation=Annotated[kind, info], default=default)


# Options that several commands share.

window, task, piece = (partial(option, panel=name) for name in ("Windows", "Tasks", "Parts"))
"""Options in a section of the help."""
yarn_option = partial(option, None, metavar="FACTOR", help="Extend the model's positions by this factor with YaRN.")
json_option = partial(option, None, metavar="FILE", panel=OUTPUT, help="Write all results as JSON.")
out_option = partial(option, metavar="FOLDER", panel=OUTPUT)
data_option = partial(option, metavar="FILE|DATASET", help=DATA, panel="Text")
attn_option = partial(
    option,
    metavar="BACKEND...",
    help="Attention backends to compare; the first is the reference. An attn_implementation of Transformers, "
    "dma_mxfp:PRESET, or dma_mxfp:FILE.toml; +int8 or +int4 reads through a DMACache. Takes several values.",
)
context_option = partial(window, min=2, shown="2048, or the model's maximum if that is less", help="Tokens per window.")
windows_option = partial(window, min=1, help="Read at most this many windows.")
batch_size_option = partial(window, 1, min=1, help="Windows per forward pass.")
limit_option = partial(task, None, min=1, shown="all", help="Use the first samples of each task.")
sequences_option = partial(task, min=1, help="Sequences per forward pass.")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    device: str = option("auto", help="auto, cpu, cuda or cuda:N; auto is CUDA if present.")
    seed: int = option(0, min=0, max=2**32 - 1, help="Seed of PyTorch's random numbers.")

    def __post_init__(self) -> None:
        check_device(self.device)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(RunOptions):
    """How a model is loaded. Subclasses name the model."""

    model: str = ""
    revision: str | None = option(None, shown="the main branch", help="Branch, tag or commit on the Hub.")
    trust_remote_code: bool = option(False, help="Allow code that comes with the model to run.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", help="Data type of the weights; auto is the checkpoint's own, float32 for GGUF."
    )
    device_map: str | None = option(
        None, help="Spread the model over several devices: auto, balanced, sequential. Instead of --device."
    )
    yarn: float | None = yarn_option()

    @property
    def loading(self) -> dict[str, Any]:
        """The arguments of ``load_model`` of the same names."""
        names = ("device", "dtype", "device_map", "revision", "trust_remote_code", "yarn")
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_yarn(self.yarn)
        if self.revision is not None and Path(parse_source(self.model).path).is_dir():
            raise UserError(f"--revision: {self.model} is a local model, which has none; leave it out")
        if self.device_map is not None and self.device != "auto":
            raise UserError("--device and --device-map exclude each other; give one of them")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions):
    model: str = option(REQUIRED, "-m", **MODEL)


@dataclass(frozen=True, kw_only=True)
class QualityOptions(ModelOptions):
    """Options of every command that compares backends on a model."""

    attn: list[str] = attn_option(DEFAULT_ATTN, "-a")
    out: Path | None = out_option(
        None,
        "-o",
        help="Folder for the whole report: results.json, pages, plots, configurations. Finished parts in it are not "
        "measured again.",
    )


@dataclass(frozen=True, kw_only=True)
class AllPresetsOptions(QualityOptions):
    attn: list[str] = attn_option([], "-a", shown="sdpa and every preset")


@dataclass(frozen=True, kw_only=True)
class OptionalTextOptions:
    data: str | None = data_option(None, "-d")
    column: str = option("text", panel="Text", help="The dataset's column of text.")


@dataclass(frozen=True, kw_only=True)
class TextOptions(OptionalTextOptions):
    data: str = data_option(REQUIRED, "-d")


@dataclass(frozen=True, kw_only=True)
class TaskFolderOptions:
    include_path: list[Path] = task([], metavar="FOLDER...", help="Folders with your own task YAMLs.")


# The parts of a measurement. In a suite, lengths and contexts beyond the model's maximum are skipped.


@dataclass(frozen=True, kw_only=True)
class PerplexityPart:
    """Perplexity, and divergence from the first backend."""

    # Tokens per window, one section for each. By default 2,048, or the model's maximum if that is less.
    contexts: list[int] = field(default_factory=list, metadata={"min": 2})
    data: str | None = None  # the text, as for ``dma-hf ppl``; by default, here and below, the command line's
    stride: int | None = window(
        None,
        min=1,
        shown="the context",
        help="Distance of two windows. Below the context, windows overlap and each scores only its new tokens.",
    )
    max_windows: int | None = windows_option(None, shown="all")
    skip_windows: int = window(0, min=0, help="Skip the first windows of the text.")
    spread: bool = window(
        False, "--spread", help="Spread --max-windows over the whole text instead of taking the first ones."
    )
    batch_size: int = batch_size_option()

    def check(self, context: int) -> None:
        if self.stride is not None and not 1 <= self.stride <= context:
            raise UserError(f"--stride must be from 1 to the context, {context}, got {self.stride}")
        if self.spread and self.max_windows is None:
            raise UserError("--spread needs --max-windows; without it all windows are read")


@dataclass(frozen=True, kw_only=True)
class FidelityPart:
    data: str | None = None
    context: int | None = context_option(None, "-c")
    max_windows: int | None = windows_option(None, shown="all")
    batch_size: int = batch_size_option()
    head_windows: int = piece(2, min=0, help="Windows for the errors by head; 0 skips them.")
    prompts: int = piece(4, min=0, help="Greedy continuations, each of the first half of a window; 0 skips them.")
    new_tokens: int = piece(64, min=1, help="Tokens of each continuation.")


@dataclass(frozen=True, kw_only=True)
class TasksPart:
    names: list[str] = task(
        REQUIRED,
        "--tasks",
        "-t",
        metavar="TASK...",
        help="Tasks or groups of lm-eval, or YAML files. Takes several values, separated by commas or spaces.",
    )
    limit: int | None = limit_option()
    num_fewshot: int | None = task(
        None, min=0, shown="what each task says", help="Examples in each prompt; a task that sets 0 keeps 0."
    )
    batch_size: int = sequences_option(8)
    lengths: list[int] = task(
        [],
        metavar="TOKENS...",
        min=1,
        shown="what each task says",
        help="Tokens per prompt of tasks that make their prompts themselves, such as ruler_vt.",
    )
    chat_template: bool = task(False, "--apply-chat-template", help="Format prompts with the model's chat template.")


@dataclass(frozen=True, kw_only=True)
class StressPart:
    """Perplexity and divergence on twins of the model with larger outlier channels."""

    data: str | None = None
    context: int | None = context_option(None, "-c")
    max_windows: int | None = windows_option(2)
    batch_size: int = batch_size_option()


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What to measure; ``None`` is not measured."""

    name: str  # its name, or the file it was read from
    description: str = ""  # its purpose, in one line
    perplexity: PerplexityPart | None = None
    fidelity: FidelityPart | None = None
    tasks: TasksPart | None = None
    stress: StressPart | None = None

    def texts(self, data: str | None) -> list[str]:
        """Return ``data`` if it is given, or the text that each part names if it reads one."""
        named: list[Any] = [part.data for part in (self.perplexity, self.fidelity, self.stress) if part is not None]
        if data is not None:
            if not named:
                raise UserError(f"--data: suite {self.name} reads no text; leave it out")
            return [data]
        if None in named:
            raise UserError(f"--data: suite {self.name} names no text of its own; name one")
        return named


PARTS: Mapping[str, type[Any]] = {
    "perplexity": PerplexityPart,
    "fidelity": FidelityPart,
    "tasks": TasksPart,
    "stress": StressPart,
}


def suite_names() -> list[str]:
    """Return the names of the suites that come with the package."""
    return sorted(item.name.removesuffix(".toml") for item in SUITES.iterdir() if item.name.endswith(".toml"))


def load_suite(name: str) -> Suite:
    """Read a suite of the package, by name, or a TOML file."""
    is_known = name in suite_names()
    if not is_known and not name.endswith(".toml"):
        raise UserError(f"--suite: unknown suite {name!r}; valid: {', '.join(suite_names())}, or a TOML file")
    try:
        path = SUITES / f"{name}.toml" if is_known else Path(os.path.expanduser(name))
        content = path.read_text(encoding="utf-8-sig")  # Windows editors write a BOM
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--suite: cannot read {name}: {getattr(error, 'strerror', None) or error}") from error
    try:
        return parse_suite(name, tomllib.loads(content))
    except ValueError as error:  # TOMLDecodeError is one
        raise UserError(f"--suite: {name}: {error}") from error


def parse_suite(name: str, values: Mapping[str, Any]) -> Suite:
    """Make a suite from the contents of a TOML file. A ``ValueError`` names a wrong key or value."""
    asked = [key for key in PARTS if key in values]
    tables = {"": (values, ["description", *PARTS])}
    tables |= {f"[{key}] ": (values[key], [each.name for each in fields(PARTS[key])]) for key in asked}
    for where, (table, valid) in tables.items():
        unknown = [key for key in table if key not in valid] if isinstance(table, Mapping) else []
        if unknown:
            raise ValueError(f"{where}unknown key {unknown[0]!r}; valid: {', '.join(valid)}")
    if not asked:
        raise ValueError(f"nothing to measure; give one of the tables {', '.join(f'[{part}]' for part in PARTS)}")
    suite = parse(Suite, {**values, "name": name})
    for key, each in ((part, each) for part in asked for each in fields(PARTS[part])):
        declared, value = each.metadata.get(KEY), getattr(getattr(suite, key), each.name)
        if value == [] and each.default_factory is MISSING:
            raise ValueError(f"[{key}] {each.name}: expected at least one value")
        least = each.metadata.get("min", getattr(declared, "min", None))
        for one in value if isinstance(value, list) else [value]:
            if least is not None and one is not None and one < least:
                raise ValueError(f"[{key}] {each.name}: expected at least {least}, got {one}")
    return suite
