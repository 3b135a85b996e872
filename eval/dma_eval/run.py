"""One run: the parts of a suite in order, each kept in the run's folder, and shown when it is done."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from . import console
from .data import Text, load_text
from .errors import UserError
from .fidelity import measure_fidelity
from .files import Piece
from .pages import PAGES
from .parts import Suite, TasksPart
from .perplexity import default_context, measure_perplexity
from .progress import shown_progress
from .results import SECTIONS, PerplexitySection, Report, has_failures
from .retrieval import measure_retrieval
from .session import Session
from .stress import measure_stress

FOLDER = "parts"


class Run:
    """What a suite asks for, and in ``sections`` what was measured of it so far, by the names of a report's fields.

    Texts and tasks are looked up at once: what is missing should come to light before the model is loaded. The text,
    with its split and its column, may be another than the suite's; tasks may lie in folders of YAMLs.

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
        for name in [part.data for part in suite.readers] if data is None else [data]:
            self._text(name)
        self._names = None
        if suite.tasks is not None:
            from .tasks import find_tasks  # lm-eval takes seconds to import, and a run without tasks does not need it

            with console.working("Looking for the tasks"):
                self._names = find_tasks(suite.tasks.names, include_path)
        self.sections: dict[str, Any] = {name: [] for name in SECTIONS}

    def parts(self, session: Session, *, skips: bool) -> Iterator[tuple[str, Callable[[], float]]]:
        """Name of each part, and the function that measures it, keeps its section, shows it and returns the seconds.

        What is finished in the run's folder is taken from there. Contexts beyond the model's are errors or skipped.
        """
        suite, limit = self._suite, session.loaded.max_context if skips else None

        def piece(name: str, part: Any, text: Text | None, measure: Callable[..., Any], **settings: Any) -> Any:
            settings |= {"part": asdict(part), "text": None if text is None else text.sha256}
            return name, partial(self._piece, session, name, partial(measure, text=text, part=part), settings)

        if suite.perplexity is not None:
            contexts = suite.perplexity.contexts or [default_context(session.loaded)]
            text = self._text(suite.perplexity.data)
            for context in _fitting("perplexity", contexts, limit):
                name = f"perplexity, {context:,}"
                measure = partial(measure_perplexity, context=context, name=name)
                yield piece(name, suite.perplexity, text, measure, context=context)
        if suite.fidelity is not None:
            text = self._text(suite.fidelity.data)
            yield piece("fidelity", suite.fidelity, text, measure_fidelity)
        if suite.tasks is not None:
            yield "tasks", partial(self._tasks, session, suite.tasks)
        if suite.retrieval is not None:
            lengths = _fitting("retrieval", suite.retrieval.lengths, limit)
            part = replace(suite.retrieval, lengths=lengths)
            for kind in dict.fromkeys(part.kinds if lengths or not suite.retrieval.lengths else ()):
                prose = self._text(part.data) if kind == "needle" else None
                ask = partial(measure_retrieval, kind=kind)
                yield piece(f"retrieval, {kind}", part, prose, ask, seed=session.seed)
        if suite.stress is not None:
            text = self._text(suite.stress.data)
            yield piece("stress", suite.stress, text, measure_stress, seed=session.seed)

    def _piece(
        self, session: Session, name: str, measure: Callable[[Session], Any], settings: Mapping[str, object]
    ) -> float:
        """Take a section from the run's folder, or measure and keep it; show it, and return the seconds it took."""
        field = name.partition(",")[0]
        (kind,) = get_args(get_type_hints(Report)[field])  # what the field of a report is a list of
        processes, store = session.processes, session.store
        identity = session.identity(*session.backends, **settings)
        piece = processes.from_main(store.load(kind, identity, FOLDER, name) if processes.is_main else None)
        if piece is None:
            began = time.perf_counter()
            with shown_progress() as progress:
                section = measure(replace(session, progress=progress))
            piece = Piece(identity=identity, content=section, seconds=time.perf_counter() - began)
            gc.collect()  # a copy of the model, once configured, is a cycle: later parts would run beside it
            is_complete = not (isinstance(section, PerplexitySection) and section.windows_left)
            if processes.is_main and is_complete and not has_failures(section):  # so that the next run tries again
                store.save(piece, FOLDER, name)
                store.drop(FOLDER, name)
        else:
            console.print_note(f"{name}: taken from the folder")
        self._show(field, piece.content)
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
        console.print_page(PAGES[name](section))

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
