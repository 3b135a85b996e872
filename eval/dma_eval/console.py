"""What the command line shows: results on standard output; progress, warnings and errors on standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .errors import UserError

if TYPE_CHECKING:
    from .backends import Backend
    from .results import Generation, PerplexitySection
    from .section_pages import Page

USER_ERROR, BACKEND_FAILED = 2, 1  # exit codes
MAX_WIDTH = 10_000  # of a table, to measure how wide it would be
FILE_WIDTH = 120  # columns of tables that go to a file or a pipe, which have no width of their own

out = Console(emoji=False)  # the colons of "NAME:b:SPLIT" are not those of an emoji
err = Console(stderr=True, emoji=False)


def print_error(message: str) -> None:
    """Show an error as one red line, however long: it wraps on the screen, not in a file."""
    err.print(f"[bold red]Error:[/] [red]{escape(message)}[/]", soft_wrap=True, highlight=False)


def print_line(markup: str) -> None:
    """Show a line of results; as for errors, no breaks are put into it where there is no screen."""
    out.print(markup, soft_wrap=not out.is_terminal, highlight=False)


def print_plain(text: str) -> None:
    """Show text as it is, to be piped into a file."""
    out.file.write(text)


@contextmanager
def user_errors(debug: bool) -> Iterator[None]:
    """End the command with exit code 2 and one line if its input cannot work; with ``debug``, a traceback too."""
    try:
        yield
    except UserError as error:
        if debug:
            err.print_exception()
        print_error(str(error))
        raise typer.Exit(USER_ERROR) from error


@contextmanager
def working(message: str) -> Iterator[None]:
    """Show that something of unknown duration goes on."""
    with err.status(Text(message)):
        yield


@contextmanager
def answering() -> Iterator[tuple[Callable[[str, Backend, bool], None], Callable[[int], None]]]:
    """A line on what is evaluated, with a count of answers; gives the two callbacks of ``evaluate_tasks``."""
    columns = (TextColumn("[progress.description]{task.description}"), TimeElapsedColumn())
    answers = 0
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("Preparing the tasks", total=None)
        shown = ""

        def on_unit(name: str, backend: Backend, resumed: bool) -> None:
            nonlocal shown, answers
            shown, answers = f"{name}, {backend.label}", 0
            if resumed:
                print_note(f"{shown}: taken from the folder")
            progress.update(task, description=escape(shown))

        def on_answers(count: int) -> None:
            nonlocal answers
            answers += count
            progress.update(task, description=f"{escape(shown)}: {answers:,} answers")

        yield on_unit, on_answers


@contextmanager
def measuring() -> Iterator[tuple[Callable[[int], None], Callable[[Backend], None]]]:
    """A progress bar over window passes; gives the two callbacks of ``compare``."""
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("passes,"),
        TimeElapsedColumn(),
        TextColumn("so far,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("Reading the text", total=None)

        def on_start(passes: int) -> None:
            progress.update(task, total=passes, description="Measuring")

        def on_pass(backend: Backend) -> None:
            progress.update(task, advance=1, description=f"Measured {escape(backend.label)}")

        yield on_start, on_pass


def print_section(section: PerplexitySection) -> None:
    """Show the table of a comparison, how it was made, and what went wrong."""
    from .report import protocol_lines, warnings

    page = _screen()
    table = _comparison(section)
    if Measurement.get(page, page.options.update(width=MAX_WIDTH), table).maximum > page.width:
        table = _comparison(section, narrow=True)
    page.print(table)
    page.print()
    for line in protocol_lines(section):
        print_line(f"[dim]{escape(line.replace('`', ''))}[/]")
    for line in warnings(section):
        print_warning(line)


def print_table(table: Table) -> None:
    """Show a table; one that goes to a file or a pipe is as wide as it needs to be."""
    page = out if out.is_terminal else Console(file=out.file, emoji=False, width=max(out.width, FILE_WIDTH))
    page.print(table)
    page.print()


def _comparison(section: PerplexitySection, *, narrow: bool = False) -> Table:
    """The table of a comparison; a narrow one, for 80 columns, breaks its widest cells where they may be broken."""
    from .report import HEADERS, table_row

    def cell(text: str) -> str:
        for gap in (" ±", " token", " memory") if narrow else ():
            text = text.replace(gap, f"\n{gap.lstrip()}")
        return escape(text)

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for header in HEADERS:
        table.add_column(cell(header), justify="left" if header == HEADERS[0] else "right", overflow="fold")
    for index, result in enumerate(section.backends):
        name, *numbers = table_row(result)
        style = "red" if result.failure else "dim" if index == 0 else ""
        table.add_row(escape(name), *map(cell, numbers), style=style)
    return table


def print_page(page: Page) -> None:
    """Show the tables of a section, how it was measured, and what went wrong."""
    screen = _screen()
    for each in page.tables:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
        for index, header in enumerate(each.headers):
            table.add_column(escape(header), justify="right" if index else "left", overflow="fold")
        for row in each.rows:
            table.add_row(*map(escape, row))
        if each.caption:
            screen.print(escape(each.caption))
        screen.print(table)
        screen.print()
    for line in page.notes:
        print_line(f"[dim]{escape(line.replace('`', ''))}[/]")
    for line in page.warnings:
        print_warning(line)


def print_warning(message: str) -> None:
    """Show what a reader must not miss, on standard error."""
    err.print(f"[bold yellow]Warning:[/] {escape(message)}", soft_wrap=True, highlight=False)


def print_note(message: str) -> None:
    """Show what is good to know, on standard error."""
    err.print(f"[dim]{escape(message)}[/]", highlight=False)


def quiet() -> None:
    """Say nothing from here on: another process of this run speaks for all."""
    out.quiet = err.quiet = True


def _screen() -> Console:
    """The console for tables: a file or a pipe has no width of its own."""
    if out.is_terminal:
        return out
    return Console(file=out.file, emoji=False, width=max(out.width, FILE_WIDTH), quiet=out.quiet)


def command_line() -> str:
    """The command as it was typed, without the folders that the program lies in."""
    import shlex

    return shlex.join(["dma-hf", *sys.argv[1:]])


@contextmanager
def starting() -> Iterator[None]:
    """Import what is slow to import, and keep the notes of libraries from here on to errors."""
    for library in ("torchao", "torch.utils._pytree", "lm_eval"):
        logging.getLogger(library).setLevel(logging.ERROR)
    with working("Starting PyTorch and Transformers"):
        yield
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()


def print_generations(generations: Sequence[Generation]) -> None:
    """Show how each backend went on with the same prompt."""
    print_line(f"\nGreedy continuation of a prompt of {generations[0].prompt_tokens:,} tokens, with the KV cache")
    print_line(f"[dim]… {escape(generations[0].prompt_end.strip())}[/]")
    for generation in generations:
        same = f"{generation.same_tokens} of {len(generation.tokens)} tokens as {generations[0].label}"
        print_line(f"\n[bold]{escape(generation.label)}[/] ({escape(same)}, {generation.seconds:.1f} s)")
        print_line(escape(generation.continuation.strip()))
