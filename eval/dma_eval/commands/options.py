"""Options that several commands share, as groups of a command's parser; each says its default."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from dma_eval.errors import UserError
from dma_eval.files import prepare_file

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
DEFAULT_ATTN = ("sdpa", "dma_mxfp:balanced")
Part = TypeVar("Part")


class Several(argparse.Action):
    """An option of several values that may be repeated; the first values replace the default."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Add ``values`` to those that were given before."""
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, list(values) if before is self.default else [*before, *values])


def add(to: Any, *names: str, help: str, shown: str = "", several: bool = False, **settings: Any) -> None:
    """Add an option to a parser or a group of it, with what ``add_argument`` takes.

    The help is given the default, or ``shown`` where its value would not say it. An option of ``several`` values may be
    repeated.
    """
    default = settings.get("default")
    if several:
        settings |= {"nargs": "+", "action": Several, "default": list(default or ())}
        shown = shown or " ".join(map(str, default or ()))
    is_flag = settings.get("action") == "store_true"
    if not shown and default is not None and not is_flag:
        shown = str(default)
    to.add_argument(*names, help=(f"{help} (default: {shown})" if shown else help).replace("%", "%%"), **settings)


def number(least: float, most: float | None = None, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """What reads a finite number of an option that is at least this, and at most that."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            expected = f"expected an integer, got {text!r}" if kind is int else f"expected a number, got {text!r}"
            raise argparse.ArgumentTypeError(expected) from None
        if not math.isfinite(value) or value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(
                f"expected at least {least}{f', at most {most}' if most else ''}, got {text}"
            )
        return value

    return read


def add_model(parser: argparse.ArgumentParser, *, is_positional: bool = False) -> None:
    """The model, by option or by position, and where it runs."""
    group = parser.add_argument_group("model")
    metavar, help = "NAME|FOLDER|FILE.gguf", "Hub name, local folder, or GGUF file."
    if is_positional:
        add(group, "model", metavar=metavar, help=help)
    else:
        add(group, "--model", "-m", metavar=metavar, required=True, help=help)
    add(group, "--revision", help="Branch, tag or commit on the Hub.", shown="the main branch")
    add(group, "--trust-remote-code", action="store_true", help="Let code that comes with the model run.")
    help = "auto, float32, bfloat16 or float16; auto is the checkpoint's own, float32 for GGUF."
    add(group, "--dtype", default="auto", help=help)
    add_device(group)
    help = "Spread the model over several devices: auto, balanced, sequential. Instead of --device."
    add(group, "--device-map", help=help, shown="one device")
    add_yarn(group)
    add_seed(group)


def add_yarn(to: Any) -> None:
    """By how much to extend the model's positions."""
    help = "Let the model take so many times its positions, its rotary embedding rescaled by YaRN."
    add(to, "--yarn", metavar="FACTOR", type=number(1, kind=float), help=help, shown="as it is")


def add_device(to: Any) -> None:
    """Where to run."""
    add(to, "--device", default="auto", help="auto, cpu, cuda or cuda:N; auto is CUDA if present.")


def add_seed(to: Any) -> None:
    """The seed."""
    add(to, "--seed", type=number(0, 2**32 - 1), default=0, help="Seed of PyTorch's random numbers.")


def add_attn(parser: argparse.ArgumentParser, default: Sequence[str] = DEFAULT_ATTN, shown: str = "") -> None:
    """The backends to compare."""
    help = (
        "Attention backends to compare; the first is the reference. An attn_implementation of Transformers, or "
        "dma_mxfp:PRESET, or dma_mxfp:FILE.toml; +int8 or +int4 reads through a DMACache. Takes several values, and "
        "may be repeated."
    )
    add(parser, "--attn", "-a", metavar="BACKEND", several=True, default=default, shown=shown, help=help)


def add_text(parser: argparse.ArgumentParser, *, required: bool = True, shown: str = "") -> None:
    """The text to read."""
    group = parser.add_argument_group("text")
    help = (
        "Text file; .json, .jsonl, .csv or .parquet file; or a Hub dataset as NAME, NAME:CONFIG or NAME:CONFIG:SPLIT."
    )
    add(group, "--data", "-d", metavar="FILE|DATASET", required=required, help=help, shown=shown)
    add(group, "--split", help="Split of the dataset, if --data does not name it.", shown="test; all of a file")
    add(group, "--column", default="text", help="The dataset's column of text.")


def add_windows(parser: argparse.ArgumentParser) -> Any:
    """The windows that a text is read in."""
    group = parser.add_argument_group("windows")
    shown = "2048, or the model's maximum if less"
    add(group, "--context", "-c", type=number(2), help="Tokens per window.", shown=shown)
    add_max_windows(group)
    add(group, "--batch-size", type=number(1), default=1, help="Windows per forward pass.")
    return group


def add_max_windows(to: Any) -> None:
    """How many windows to read."""
    add(to, "--max-windows", type=number(1), help="Read so many windows at most.", shown="all")


def add_tasks(parser: argparse.ArgumentParser) -> Any:
    """What restricts the tasks of lm-eval, and where some of one's own are."""
    group = parser.add_argument_group("tasks")
    help = "Folders with task YAMLs of your own."
    add(group, "--include-path", metavar="FOLDER", type=Path, several=True, shown="none", help=help)
    add(group, "--limit", type=number(1), help="Take the first so many samples of each task.", shown="all")
    return group


def add_out(parser: argparse.ArgumentParser, help: str = "", metavar: str = "FOLDER", **settings: Any) -> Any:
    """The folder of a run, or what ``help`` says; a ``help`` also says what is done without it."""
    group = parser.add_argument_group("output")
    shown = "" if help else "not written"
    help = help or (
        "Folder for the whole report: results.json, a page, plots, configurations. What is finished there is not "
        "measured again."
    )
    add(group, "--out", "-o", metavar=metavar, type=Path, help=help, shown=shown, **settings)
    return group


def add_files(to: Any, *names: str) -> None:
    """Single files of results: ``json``, ``markdown``, ``plot``."""
    texts = {
        "json": "Write all results as JSON.",
        "markdown": "Write a readable report.",
        "plot": f"Write the plots, as {', '.join(PLOT_SUFFIXES)}.",
    }
    for name in names:
        add(to, f"--{name}", metavar="FILE", type=Path, help=texts[name], shown="not written")


def prepare_files(args: argparse.Namespace) -> list[Path]:
    """Make sure before a long run that its single files can be written, and return which were asked for.

    Raises:
        UserError: One cannot, or a plot has no known suffix.
    """
    plot = getattr(args, "plot", None)
    if plot is not None and not plot.is_dir() and plot.suffix not in PLOT_SUFFIXES:
        raise UserError(f"--plot: expected a file ending in {', '.join(PLOT_SUFFIXES)}, got {plot}")
    given = {name: path for name in ("json", "markdown", "plot") if (path := getattr(args, name, None)) is not None}
    for name, path in given.items():
        prepare_file(path, f"--{name}")
    return list(given.values())


def part_of(kind: type[Part], args: argparse.Namespace, **others: Any) -> Part:
    """A part of a suite made of the options that have its fields' names, and of ``others``."""
    names = {each.name for each in fields(kind)} & vars(args).keys()  # type: ignore[arg-type]
    return kind(**{name: getattr(args, name) for name in names} | others)
