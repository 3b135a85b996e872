"""One run: the parts of a suite in order, each kept in the run's folder, and shown when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from . import console
from .data import Text, load_text
from .errors import UserError
from .fidelity import measure_fidelity
from .files import Piece
from .pages import page_of
from .parts import Suite, TasksPart
from .perplexity import default_context, measure_perplexity
from .progress import shown_progress
from .results import SECTIONS, FidelitySection, PerplexitySection, RetrievalSection, StressSection, has_failures
from .retrieval import measure_retrieval
from .session import Session
from .stress import measure_stress

FOLDER = "parts"


class Run:
    """What a suite asks for, and in ``sections`` what was measured of it so far, by the names of a report's fields.

    Texts and tasks are looked up at once: what is missing should come to light before the model is loaded.

    Args:
        suite: The suite.
        data: The text, instead of the suite's.
        split: Its split.
        column: Its column of text.
        include_path: Folders of task YAMLs.

    Raises:
        UserError: A text or a task is missing.
    """

    def __init__(
        self,
        suite: Suite,
        *,
        data: str | None = None,
        split: str | None = None,
        column: str = "text",
        include_path: Sequence[Path] = (),
    ) -> None:
        """Look texts and tasks up."""
        if data is None and suite.needs_text:
            raise UserError(f"--data: suite {suite.name} names no text of its own; name one")
        self._suite = suite
        self._data = data
        self._load = partial(load_text, split=split, column=column)
        self._texts: dict[str, Text] = {}
        for part in (suite.perplexity, suite.fidelity, suite.retrieval, suite.stress):
            if part is not None and (data or part.data):
                self._text(part.data)
        self._names = None
        if suite.tasks is not None:
            from .tasks import find_tasks  # lm-eval takes seconds to import, and a run without tasks does not need it

            with console.working("Looking for the tasks"):
                self._names = find_tasks(suite.tasks.names, include_path)
        self.sections: dict[str, Any] = {name: [] for name in SECTIONS}

    @property
    def has_failures(self) -> bool:
        """Whether a backend failed in any part."""
        return any(has_failures(section) for sections in self.sections.values() for section in sections)

    @property
    def is_interrupted(self) -> bool:
        """Whether windows were left unread."""
        return any(section.windows_left for section in self.sections["perplexity"])

    def parts(self, session: Session, *, skips: bool) -> Iterator[tuple[str, Callable[[], float]]]:
        """Name of each part, and the function that measures it, keeps its section, shows it and returns the seconds.

        A part that is finished in the run's folder is taken from there.

        Args:
            session: The model and the backends.
            skips: Whether contexts beyond the model's are skipped; otherwise they are errors.
        """
        suite, limit = self._suite, session.loaded.max_context if skips else None

        def piece(
            name: str, kind: type[Any], part: Any, text: Text | None, measure: Callable[..., Any], **settings: Any
        ) -> tuple[str, Callable[[], float]]:
            settings |= {"part": asdict(part), "text": None if text is None else text.sha256}
            return name, partial(self._piece, session, name, kind, partial(measure, text=text, part=part), settings)

        if suite.perplexity is not None:
            contexts = suite.perplexity.contexts or [default_context(session.loaded)]
            text = self._text(suite.perplexity.data)
            for context in _fitting("perplexity", contexts, limit):
                name = f"perplexity, {context:,}"
                measure = partial(measure_perplexity, context=context, name=name)
                yield piece(name, PerplexitySection, suite.perplexity, text, measure, context=context)
        if suite.fidelity is not None:
            text = self._text(suite.fidelity.data)
            yield piece("fidelity", FidelitySection, suite.fidelity, text, measure_fidelity)
        if suite.tasks is not None:
            yield "tasks", partial(self._tasks, session, suite.tasks)
        if suite.retrieval is not None:
            part = replace(suite.retrieval, lengths=_fitting("retrieval", suite.retrieval.lengths, limit))
            for kind in dict.fromkeys(part.kinds):
                prose = self._text(part.data) if kind == "needle" and (self._data or part.data) else None
                ask = partial(measure_retrieval, kind=kind)
                yield piece(f"retrieval, {kind}", RetrievalSection, part, prose, ask, seed=session.seed)
        if suite.stress is not None:
            text = self._text(suite.stress.data)
            yield piece("stress", StressSection, suite.stress, text, measure_stress, seed=session.seed)

    def _piece(
        self,
        session: Session,
        name: str,
        kind: type[Any],
        measure: Callable[[Session], Any],
        settings: Mapping[str, object],
    ) -> float:
        """Take a section from the run's folder, or measure and keep it; show it, and return the seconds it took."""
        processes, store = session.processes, session.store
        identity = session.identity(*session.backends, **settings)
        piece = processes.from_main(store.load(kind, identity, FOLDER, name) if processes.is_main else None)
        if piece is None:
            began = time.perf_counter()
            with shown_progress() as progress:
                section = measure(replace(session, progress=progress))
            piece = Piece(identity=identity, content=section, seconds=time.perf_counter() - began)
            is_complete = not (isinstance(section, PerplexitySection) and section.windows_left)
            if processes.is_main and is_complete and not has_failures(section):  # so that the next run tries again
                store.save(piece, FOLDER, name)
                store.drop(FOLDER, name)
        else:
            console.print_note(f"{name}: taken from the folder")
        self._show(name.partition(",")[0], piece.content)
        return piece.seconds

    def _tasks(self, session: Session, part: TasksPart) -> float:
        from .tasks import measure_tasks

        assert self._names is not None
        with shown_progress() as progress:
            section = measure_tasks(replace(session, progress=progress), self._names, part)
        self._show("tasks", section)
        return sum(sum(backend.seconds.values()) for backend in section.backends)

    def _show(self, name: str, section: Any) -> None:
        self.sections[name].append(section)
        console.print_page(page_of(section))

    def _text(self, own: str | None) -> Text:
        name = self._data or own
        assert name is not None
        if name not in self._texts:
            with console.working(f"Reading {name}"):
                self._texts[name] = self._load(name)
        return self._texts[name]


def _fitting(part: str, lengths: Sequence[int], limit: int | None) -> list[int]:
    """The lengths that the model takes; what is skipped is said."""
    for length in lengths:
        if limit is not None and length > limit:
            console.print_warning(f"{part} at {length:,} is skipped: the model takes {limit:,} positions")
    return [length for length in lengths if limit is None or length <= limit]
