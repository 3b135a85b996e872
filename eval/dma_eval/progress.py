"""Progress of a measurement."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from . import console

SECONDS_BETWEEN_LINES = 15.0  # where there is no terminal to draw a bar on


class Progress:
    """Progress bars on a terminal, and a line every 15 seconds elsewhere. Without :meth:`shown` there are none."""

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._what, self._done = "", 0
        self._began = self._told = time.monotonic()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the progress of a measurement."""
        times = TimeElapsedColumn(), TextColumn("so far,"), TimeRemainingColumn(), TextColumn("left")
        columns = TextColumn("[progress.description]{task.description}"), BarColumn(), MofNCompleteColumn(), *times
        with Bars(*columns, console=console.err, transient=True, disable=not console.err.is_terminal) as self._bars:
            self._task = self._bars.add_task("", total=None)
            self._began = self._told = time.monotonic()
            yield
        self._bars = None

    def begin(self, what: str, steps: int | None = None) -> None:
        """Begin an activity, with its number of steps if that is known."""
        self._what, self._steps, self._done = what, steps, 0
        if self._bars is not None:
            self._bars.reset(self._task, description=escape(what), total=steps)

    def advance(self, what: str = "", steps: int = 1) -> None:
        """Count steps as done."""
        if self._bars is None:
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
        """Note a result that was taken from the run's folder."""
        if self._bars is not None:
            console.print_note(f"{what}: taken from the folder")
