"""How far a measurement has come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from . import console

SECONDS_BETWEEN_LINES = 15.0  # where there is no screen to draw a bar on


class Progress:
    """What a measurement tells of how far it has come: a bar on a screen, a line now and then in a file or a pipe.

    Without bars nothing is shown.
    """

    def __init__(self, bars: Bars | None = None) -> None:
        self._bars = bars
        self._task = None if bars is None else bars.add_task("", total=None)
        self._what, self._done = "", 0
        self._steps: int | None = None
        self._began = self._told = time.monotonic()

    def begin(self, what: str, steps: int | None = None) -> None:
        """Something begins, of so many steps if that is known."""
        self._what, self._steps, self._done = what, steps, 0
        if self._bars is not None and self._task is not None:
            self._bars.reset(self._task, description=escape(what), total=steps)

    def advance(self, what: str = "", steps: int = 1) -> None:
        """So many steps are done, of ``what`` if that is said."""
        if self._bars is None or self._task is None:
            return
        self._done += steps
        description = f"{self._what}: {what}" if what else self._what
        self._bars.update(self._task, advance=steps, description=escape(description))
        now = time.monotonic()
        if not console.err.is_terminal and now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            total = "" if self._steps is None else f" of {self._steps:,}"
            console.print_note(f"{description}, {self._done:,}{total}, {now - self._began:,.0f} s so far")

    def kept(self, what: str) -> None:
        """Something was not measured again, but taken from the run's folder."""
        if self._bars is not None:
            console.print_note(f"{what}: taken from the folder")


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Show how far a measurement has come."""
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("so far,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Bars(*columns, console=console.err, transient=True, disable=not console.err.is_terminal) as bars:
        yield Progress(bars)
