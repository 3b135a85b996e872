"""Output of the command line. Results go to standard output; progress, warnings and errors go to standard error."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box, progress
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.status import Status
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .show import pages

USER_ERROR, FAILED, INTERRUPTED = 2, 1, 130  # exit codes
FILE_WIDTH = 120  # width of tables in a file or a pipe
SECONDS_BETWEEN_LINES = 15.0  # of progress where there is no terminal to draw a bar on

out = Console(emoji=False)  # ":b:" in "NAME:b:SPLIT" is not an emoji
err = Console(stderr=True, emoji=False)
shows_tracebacks = False  # whether errors show a traceback (``--debug``)


def print_error(message: str) -> None:
    """Show an error as one red line. It wraps on a screen but not in a file."""
    err.print(f"[bold red]Error:[/] [red]{escape(message)}[/]", soft_wrap=True, highlight=False)


def print_warning(message: str) -> None:
    err.print(f"[bold yellow]Warning:[/] {escape(message)}", soft_wrap=True, highlight=False)


def print_note(message: str) -> None:
    err.print(f"[dim]{escape(message)}[/]", soft_wrap=True, highlight=False)


def print_line(markup: str) -> None:
    """Show a line of results. It wraps on a screen but not in a file."""
    out.print(markup, soft_wrap=not out.is_terminal, highlight=False)


def print_wrote(*files: object, folder: Path | None = None) -> None:
    """Show which files were written. Names are relative to ``folder``."""
    where = "" if folder is None else f" to {folder}/"
    print_line(escape(f"Wrote {', '.join(map(str, files))}{where}"))


def print_page(page: pages.Page) -> None:
    """Show the tables of a section, how it was measured, and what went wrong."""
    for table in page.tables:
        print_table(table)
    for line in page.notes:
        print_line(f"[dim]{escape(line.replace('`', ''))}[/]")
    for line in page.warnings:
        print_warning(line)


def print_table(table: pages.Table) -> None:
    """Show a table without breaking words or leaving out cells, wider than the screen if necessary."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for index, column in enumerate(zip(table.headers, *table.rows, strict=True)):
        longest = max(len(word) for cell in column for word in cell.split(" "))
        cannot_wrap = longest == max(map(len, column))
        side = "right" if index else "left"
        shown.add_column(escape(column[0]), justify=side, min_width=longest, no_wrap=cannot_wrap)  # type: ignore[arg-type]
    for row in table.rows:
        shown.add_row(*map(escape, row), style="red" if "failed" in row else "")
    needed = Measurement.get(out, out.options.update_width(sys.maxsize), shown)
    room = out.width if out.is_terminal else max(out.width, FILE_WIDTH)
    shown.width = max(needed.minimum, min(needed.maximum, room))
    if table.caption:
        print_line(escape(table.caption))
    out.print(shown, crop=False)
    out.print()


def working(message: str) -> Status:
    """Return a spinner to show during an activity of unknown duration."""
    return err.status(Text(message))


@contextmanager
def starting() -> Iterator[None]:
    """Show a spinner during slow imports, and silence the libraries below errors. Ctrl-C ends the process."""
    for library in ("torchao", "torch.utils._pytree", "lm_eval"):
        logging.getLogger(library).setLevel(logging.ERROR)
    with working("Starting PyTorch and Transformers") as spinner:

        def end(*_: object) -> None:  # an import may turn KeyboardInterrupt into another error, or ignore it
            spinner.stop()
            print_error("interrupted")
            os._exit(INTERRUPTED)

        before = signal.getsignal(signal.SIGINT)
        if before is signal.default_int_handler:  # and not ignored, as in the background of a script
            signal.signal(signal.SIGINT, end)
        try:
            yield
            from transformers.utils import logging as transformers_logging
        finally:
            signal.signal(signal.SIGINT, before)
        transformers_logging.set_verbosity_error()


def quiet() -> None:
    """Stop all output, because another process of the run shows it."""
    out.quiet = err.quiet = True


class Progress:
    """Progress bars on a terminal, and a line every 15 seconds elsewhere. Without :meth:`shown` there are none."""

    def __init__(self) -> None:
        self._bars: progress.Progress | None = None
        self._what = ""

    @contextmanager
    def shown(self) -> Iterator[None]:
        columns = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn()
        times = progress.TimeElapsedColumn(), progress.TextColumn("so far,"), progress.TimeRemainingColumn()
        bars = progress.Progress(*columns, *times, "left", console=err, transient=True, disable=not err.is_terminal)
        with bars as self._bars:
            self._task = bars.add_task("", total=None)
            self._began = self._told = time.monotonic()
            yield
        self._bars = None

    def begin(self, what: str, steps: int | None = None) -> None:
        """Begin an activity, with its number of steps if that is known."""
        self._what, self._steps, self._done = what, steps, 0
        if self._bars is not None:
            self._bars.reset(self._task, description=escape(what), total=steps)

    def advance(self, what: str = "", steps: int = 1) -> None:
        if self._bars is None:
            return
        self._done += steps
        description = f"{self._what}: {what}" if what else self._what
        self._bars.update(self._task, advance=steps, description=escape(description))
        now = time.monotonic()
        if not err.is_terminal and now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            total = "" if self._steps is None else f" of {self._steps:,}"
            print_note(f"{description}, {self._done:,}{total}, {now - self._began:,.0f} s so far")

    def kept(self, what: str) -> None:
        """Note a result that was taken from the run's folder."""
        if self._bars is not None:
            print_note(f"{what}: taken from the folder")
