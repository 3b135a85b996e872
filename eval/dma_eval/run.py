"""One run: the parts of a suite in order, each kept in the run's folder, and shown when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from . import console
from .data import Text, load_text
from .errors import UserError
from .fidelity import measure_fidelity
from .files import Piece
from .pages import Page, fidelity_page, perplexity_page, retrieval_page, stress_page, task_page
from .parts import PARTS, FidelityPart, PerplexityPart, RetrievalPart, StressPart, Suite, TasksPart
from .perplexity import default_context, measure_perplexity
from .progress import shown_progress
from .results import FidelitySection, PerplexitySection, RetrievalSection, StressSection, TaskSection
from .retrieval import measure_retrieval
from .session import Session
from .stress import measure_stress

FOLDER = "parts"
Section = TypeVar("Section", PerplexitySection, FidelitySection, RetrievalSection, StressSection)


class Run:
    """What a suite asks for, and what was measured of it so far.

    Texts and tasks are looked up at once: what is missing should come to light before the model is loaded.

    Args:
        suite: The suite.
        data: The text, instead of the suite's.
        split: Its split.
        column: Its column of text.
        include_path: Folders of task YAMLs.

    Attributes:
        perplexity: Finished sections; so the next four.
        fidelity: Fidelity.
        tasks: Tasks.
        retrieval: Retrieval.
        stress: Stress.

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
        self.perplexity: list[PerplexitySection] = []
        self.fidelity: list[FidelitySection] = []
        self.tasks: list[TaskSection] = []
        self.retrieval: list[RetrievalSection] = []
        self.stress: list[StressSection] = []

    @property
    def sections(self) -> dict[str, Any]:
        """What is finished, by the names of a report's fields."""
        return {name: list(getattr(self, name)) for name in PARTS}

    @property
    def has_failures(self) -> bool:
        """Whether a backend failed in any part."""
        others: list[PerplexitySection | FidelitySection | RetrievalSection | StressSection]
        others = [*self.perplexity, *self.fidelity, *self.retrieval, *self.stress]
        return any(map(_has_failures, others)) or any(each.failures for part in self.tasks for each in part.backends)

    @property
    def is_interrupted(self) -> bool:
        """Whether windows were left unread."""
        return any(section.windows_left for section in self.perplexity)

    def parts(self, session: Session, *, skips: bool) -> Iterator[tuple[str, Callable[[], float]]]:
        """Name of each part, and the function that measures it, keeps its section, shows it and returns the seconds.

        A part that is finished in the run's folder is taken from there.

        Args:
            session: The model and the backends.
            skips: Whether contexts beyond the model's are skipped; otherwise they are errors.
        """
        suite, limit = self._suite, session.loaded.max_context if skips else None
        if suite.perplexity is not None:
            contexts = suite.perplexity.contexts or [default_context(session.loaded)]
            for context in _fitting("perplexity", contexts, limit):
                yield f"perplexity, {context:,}", partial(self._perplexity, session, suite.perplexity, context)
        if suite.fidelity is not None:
            yield "fidelity", partial(self._fidelity, session, suite.fidelity)
        if suite.tasks is not None:
            yield "tasks", partial(self._tasks, session, suite.tasks)
        if suite.retrieval is not None:
            fitting = replace(suite.retrieval, lengths=_fitting("retrieval", suite.retrieval.lengths, limit))
            for kind in dict.fromkeys(suite.retrieval.kinds):
                yield f"retrieval, {kind}", partial(self._retrieval, session, fitting, kind)
        if suite.stress is not None:
            yield "stress", partial(self._stress, session, suite.stress)

    def _perplexity(self, session: Session, part: PerplexityPart, context: int) -> float:
        text, name = self._text(part.data), f"perplexity, {context:,}"
        settings = {"part": asdict(part), "context": context, "text": text.sha256}
        measure = partial(measure_perplexity, text=text, part=part, context=context, name=name)
        return _measured(session, name, settings, measure, self.perplexity, PerplexitySection, perplexity_page)

    def _fidelity(self, session: Session, part: FidelityPart) -> float:
        text = self._text(part.data)
        settings = {"part": asdict(part), "text": text.sha256}
        measure = partial(measure_fidelity, text=text, part=part)
        return _measured(session, "fidelity", settings, measure, self.fidelity, FidelitySection, fidelity_page)

    def _retrieval(self, session: Session, part: RetrievalPart, kind: str) -> float:
        text = self._text(part.data) if kind == "needle" and (self._data or part.data) else None
        settings = {"part": asdict(part), "text": None if text is None else text.sha256, "seed": session.seed}
        measure = partial(measure_retrieval, kind=kind, text=text, part=part)
        name = f"retrieval, {kind}"
        return _measured(session, name, settings, measure, self.retrieval, RetrievalSection, retrieval_page)

    def _stress(self, session: Session, part: StressPart) -> float:
        text = self._text(part.data)
        settings = {"part": asdict(part), "text": text.sha256, "seed": session.seed}
        measure = partial(measure_stress, text=text, part=part)
        return _measured(session, "stress", settings, measure, self.stress, StressSection, stress_page)

    def _tasks(self, session: Session, part: TasksPart) -> float:
        from .tasks import measure_tasks

        assert self._names is not None
        with shown_progress() as progress:
            section = measure_tasks(replace(session, progress=progress), self._names, part)
        self.tasks.append(section)
        console.print_page(task_page(section))
        return sum(sum(backend.seconds.values()) for backend in section.backends)

    def _text(self, own: str | None) -> Text:
        name = self._data or own
        assert name is not None
        if name not in self._texts:
            with console.working(f"Reading {name}"):
                self._texts[name] = self._load(name)
        return self._texts[name]


def _measured(
    session: Session,
    name: str,
    settings: Mapping[str, object],
    measure: Callable[[Session], Section],
    sections: list[Section],
    kind: type[Section],
    page: Callable[[Section], Page],
) -> float:
    """Take a section from the run's folder, or measure and keep it; show it, and return the seconds that it took."""
    processes, store = session.processes, session.store
    identity = session.identity(*session.backends, **settings)
    piece = processes.from_main(store.load(kind, identity, FOLDER, name) if processes.is_main else None)
    if piece is None:
        began = time.perf_counter()
        with shown_progress() as progress:
            section = measure(replace(session, progress=progress))
        piece = Piece(identity=identity, content=section, seconds=time.perf_counter() - began)
        is_complete = not (isinstance(section, PerplexitySection) and section.windows_left)
        if processes.is_main and is_complete and not _has_failures(section):  # so that the next run tries again
            store.save(piece, FOLDER, name)
            store.drop(FOLDER, name)
    else:
        console.print_note(f"{name}: taken from the folder")
    sections.append(piece.content)
    console.print_page(page(piece.content))
    return piece.seconds


def _fitting(part: str, lengths: Sequence[int], limit: int | None) -> list[int]:
    """The lengths that the model takes; what is skipped is said."""
    for length in lengths:
        if limit is not None and length > limit:
            console.print_warning(f"{part} at {length:,} is skipped: the model takes {limit:,} positions")
    return [length for length in lengths if limit is None or length <= limit]


def _has_failures(section: PerplexitySection | FidelitySection | RetrievalSection | StressSection) -> bool:
    if isinstance(section, StressSection):
        return any(twin.tokens is not None and _has_failures(twin.tokens) for twin in section.twins)
    results = section.tokens.backends if isinstance(section, FidelitySection) else section.backends
    return any(result.failure is not None for result in results)
