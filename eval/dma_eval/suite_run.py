"""One run of a suite: its parts in order, each kept in the run's folder and shown when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from . import console, fingerprint
from .backends import Backend
from .comparison import compare
from .data import Text, load_text
from .distributed import Processes
from .errors import UserError
from .fidelity import compare_with_fp32
from .models import LoadedModel
from .part_store import PartStore
from .report import describe_model
from .results import FidelitySection, PerplexitySection
from .retrieval import measure_retrieval
from .section_pages import fidelity_page, retrieval_page, task_page
from .sections import RetrievalSection, TaskSection
from .suite_files import Suite
from .task_records import RecordStore

Section = TypeVar("Section", PerplexitySection, FidelitySection, RetrievalSection)
Measure = Callable[[Callable[[int], None], Callable[[Backend], None]], Section]
"""Measures a part, given the callbacks of its progress bar."""


class SuiteRun:
    """What a suite asks for, and what was measured of it so far.

    Texts and tasks are looked up at once: what is missing should come to light before the model is loaded.

    Args:
        suite: The suite.
        backends: The backends; the first is the reference.
        data: The text, instead of the suite's.
        include_paths: Folders of task YAMLs.
        limit: Samples per task, instead of the suite's.
        max_windows: Windows per text, instead of the suite's.
        processes: The processes that split the work; one by default. Each must run every part, and gets all results.

    Attributes:
        perplexity: Finished sections; so the next three.
        fidelity: Fidelity.
        tasks: Tasks.
        retrieval: Retrieval.

    Raises:
        UserError: A text or a task is missing.
    """

    def __init__(
        self,
        suite: Suite,
        backends: Sequence[Backend],
        *,
        data: str | None = None,
        include_paths: Sequence[Path] = (),
        limit: int | None = None,
        max_windows: int | None = None,
        processes: Processes | None = None,
    ) -> None:
        """Look texts and tasks up."""
        if data is None and suite.needs_text:
            raise UserError(f"--data: suite {suite.name} names no text of its own; name one")
        self._suite = suite
        self._backends = backends
        self._data = data
        self._limit = limit
        self._max_windows = max_windows
        self._processes = processes or Processes()
        self._texts: dict[str, Text] = {}
        for part in (suite.perplexity, suite.fidelity, suite.retrieval):
            if part is not None and (data or part.data):
                self._text(part.data)
        self._names = None
        if suite.tasks is not None:
            from .tasks import find_tasks  # lm-eval takes seconds to import, and a suite without tasks does not need it

            with console.working("Looking for the tasks"):
                self._names = find_tasks(suite.tasks.names, include_paths)
        self.perplexity: list[PerplexitySection] = []
        self.fidelity: list[FidelitySection] = []
        self.tasks: list[TaskSection] = []
        self.retrieval: list[RetrievalSection] = []

    @property
    def has_failures(self) -> bool:
        """Whether a backend failed in any part."""
        sections: list[PerplexitySection | FidelitySection | RetrievalSection]
        sections = [*self.perplexity, *self.fidelity, *self.retrieval]
        has_failed_tasks = any(backend.failures for section in self.tasks for backend in section.backends)
        return has_failed_tasks or any(_has_failures(section) for section in sections)

    def parts(
        self, loaded: LoadedModel, out: Path, *, batch_size: int, seed: int
    ) -> Iterator[tuple[str, Callable[[], float]]]:
        """Name of each part, and the function that measures it, keeps its section, shows it and returns the seconds.

        A part that is finished in the folder ``out`` is taken from there.
        """
        suite, limit = self._suite, loaded.max_context
        if suite.perplexity is not None:
            for context in self._fitting("perplexity", suite.perplexity.contexts, limit):
                name = f"perplexity, {context:,}"
                yield name, lambda name=name, context=context: self._perplexity(loaded, out, name, context)  # type: ignore[misc]
        if suite.fidelity is not None:
            yield "fidelity", lambda: self._fidelity(loaded, out)
        if suite.tasks is not None:
            yield "tasks", lambda: self._tasks(loaded, out, batch_size, seed)
        if suite.retrieval is not None:
            lengths = self._fitting("retrieval", suite.retrieval.lengths, limit)
            for kind in suite.retrieval.kinds:
                yield f"retrieval, {kind}", lambda kind=kind: self._retrieval(loaded, out, kind, lengths, seed)  # type: ignore[misc]

    def _perplexity(self, loaded: LoadedModel, out: Path, name: str, context: int) -> float:
        part = self._suite.perplexity
        assert part is not None
        text = self._text(part.data)
        options: dict[str, Any] = {
            "context": context,
            "max_windows": self._max_windows or part.max_windows,
            "batch_size": part.batch_size,
        }

        def measure(on_start: Callable[[int], None], on_pass: Callable[[Backend], None]) -> PerplexitySection:
            progress: dict[str, Any] = {"on_start": on_start, "on_pass": on_pass}
            return compare(loaded, text, self._backends, processes=self._processes, **options, **progress)

        section, seconds = self._kept(loaded, out, name, PerplexitySection, {"text": text.sha256, **options}, measure)
        self.perplexity.append(section)
        console.print_section(section)
        return seconds

    def _fidelity(self, loaded: LoadedModel, out: Path) -> float:
        part = self._suite.fidelity
        assert part is not None
        text = self._text(part.data)
        options: dict[str, Any] = {
            "context": part.context,
            "max_windows": self._max_windows or part.max_windows,
            "head_windows": part.head_windows,
            "prompts": part.prompts,
            "new_tokens": part.new_tokens,
        }

        def measure(on_start: Callable[[int], None], on_pass: Callable[[Backend], None]) -> FidelitySection:
            progress: dict[str, Any] = {"on_start": on_start, "on_pass": on_pass}
            return compare_with_fp32(loaded, text, self._backends, processes=self._processes, **options, **progress)

        settings = {"text": text.sha256, **options}
        section, seconds = self._kept(loaded, out, "fidelity", FidelitySection, settings, measure)
        self.fidelity.append(section)
        console.print_page(fidelity_page(section))
        return seconds

    def _tasks(self, loaded: LoadedModel, out: Path, batch_size: int, seed: int) -> float:
        from .tasks import TaskOptions, evaluate_tasks

        part = self._suite.tasks
        assert part is not None
        assert self._names is not None
        settings = TaskOptions(
            limit=self._limit or part.limit, num_fewshot=part.num_fewshot, batch_size=batch_size, seed=seed
        )
        with console.answering() as (on_unit, on_answers):
            section = evaluate_tasks(
                loaded,
                describe_model(loaded),
                self._names,
                self._backends,
                settings,
                store=RecordStore(out),
                processes=self._processes,
                on_unit=on_unit,
                on_answers=on_answers,
            )
        self.tasks.append(section)
        console.print_page(task_page(section))
        return sum(sum(backend.seconds.values()) for backend in section.backends)

    def _retrieval(self, loaded: LoadedModel, out: Path, kind: str, lengths: Sequence[int], seed: int) -> float:
        part = self._suite.retrieval
        assert part is not None
        text = self._text(part.data) if kind == "needle" else None
        options: dict[str, Any] = {
            "lengths": list(lengths),
            "depths": part.depths,
            "samples": part.samples,
            "seed": seed,
        }

        def measure(on_start: Callable[[int], None], on_pass: Callable[[Backend], None]) -> RetrievalSection:
            given: dict[str, Any] = {"text": text, "processes": self._processes, **options}
            return measure_retrieval(loaded, self._backends, kind, on_start=on_start, on_pass=on_pass, **given)

        settings = {"kind": kind, "text": text and text.sha256, **options}
        section, seconds = self._kept(loaded, out, f"retrieval, {kind}", RetrievalSection, settings, measure)
        self.retrieval.append(section)
        console.print_page(retrieval_page(section))
        return seconds

    def _kept(
        self,
        loaded: LoadedModel,
        out: Path,
        name: str,
        kind: type[Section],
        settings: dict[str, Any],
        measure: Measure[Section],
    ) -> tuple[Section, float]:
        """Return a section and the seconds that it took: from the folder, or measured and kept there."""
        backends = [{"label": each.label, **fingerprint.of_backend(each)} for each in self._backends]
        identity = {
            **fingerprint.of_model(describe_model(loaded)),
            "backends": backends,
            "settings": settings,
            "versions": fingerprint.of_versions(),
        }
        store = PartStore(out)
        kept = self._processes.from_main(store.load(name, kind, identity) if self._processes.is_main else None)
        if kept is not None:
            console.print_note(f"{name}: taken from the folder")
            return kept
        began = time.perf_counter()
        with console.measuring() as (on_start, on_pass):
            section = measure(on_start, on_pass)
        seconds = time.perf_counter() - began
        if self._processes.is_main and not _has_failures(section):  # so that the next run tries again
            store.save(name, section, seconds, identity)
        return section, seconds

    def _text(self, own: str | None) -> Text:
        name = self._data or own
        assert name is not None
        if name not in self._texts:
            with console.working(f"Reading {name}"):
                self._texts[name] = load_text(name)
        return self._texts[name]

    @staticmethod
    def _fitting(part: str, lengths: Sequence[int], limit: int | None) -> list[int]:
        """The lengths that the model takes; what is skipped is said."""
        if limit is None:
            return list(lengths)
        for length in lengths:
            if length > limit:
                console.print_warning(f"{part} at {length:,} is skipped: the model takes {limit:,} positions")
        return [length for length in lengths if length <= limit]


def _has_failures(section: PerplexitySection | FidelitySection | RetrievalSection) -> bool:
    results = section.tokens.backends if isinstance(section, FidelitySection) else section.backends
    return any(result.failure is not None for result in results)
