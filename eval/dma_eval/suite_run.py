"""One run of a suite: its parts in order, each shown when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import console
from .backends import Backend
from .comparison import compare
from .data import Text, load_text
from .errors import UserError
from .fidelity import compare_with_fp32
from .models import LoadedModel
from .report import describe_model
from .results import FidelitySection, PerplexitySection
from .retrieval import measure_retrieval
from .section_pages import fidelity_page, retrieval_page, task_page
from .sections import RetrievalSection, TaskSection
from .suite_files import Suite
from .task_records import RecordStore


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
    ) -> None:
        """Look texts and tasks up."""
        if data is None and suite.needs_text:
            raise UserError(f"--data: suite {suite.name} names no text of its own; name one")
        self._suite = suite
        self._backends = backends
        self._data = data
        self._limit = limit
        self._max_windows = max_windows
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
        return (
            any(result.failure for section in self.perplexity for result in section.backends)
            or any(result.failure for section in self.fidelity for result in section.tokens.backends)
            or any(backend.failures for section in self.tasks for backend in section.backends)
            or any(backend.failure for section in self.retrieval for backend in section.backends)
        )

    def parts(
        self, loaded: LoadedModel, out: Path, *, batch_size: int, seed: int
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        """Name of each part, and the function that measures it, keeps its section and shows it."""
        suite, limit = self._suite, loaded.max_context
        if suite.perplexity is not None:
            for context in self._fitting("perplexity", suite.perplexity.contexts, limit):
                yield f"perplexity, {context:,}", lambda context=context: self._perplexity(loaded, context)  # type: ignore[misc]
        if suite.fidelity is not None:
            yield "fidelity", lambda: self._fidelity(loaded)
        if suite.tasks is not None:
            yield "tasks", lambda: self._tasks(loaded, out, batch_size, seed)
        if suite.retrieval is not None:
            lengths = self._fitting("retrieval", suite.retrieval.lengths, limit)
            for kind in suite.retrieval.kinds:
                yield f"retrieval, {kind}", lambda kind=kind: self._retrieval(loaded, kind, lengths, seed)  # type: ignore[misc]

    def _perplexity(self, loaded: LoadedModel, context: int) -> None:
        part = self._suite.perplexity
        assert part is not None
        with console.measuring() as (on_start, on_pass):
            section = compare(
                loaded,
                self._text(part.data),
                self._backends,
                context=context,
                max_windows=self._max_windows or part.max_windows,
                batch_size=part.batch_size,
                on_start=on_start,
                on_pass=on_pass,
            )
        self.perplexity.append(section)
        console.print_section(section)

    def _fidelity(self, loaded: LoadedModel) -> None:
        part = self._suite.fidelity
        assert part is not None
        with console.measuring() as (on_start, on_pass):
            section = compare_with_fp32(
                loaded,
                self._text(part.data),
                self._backends,
                context=part.context,
                max_windows=self._max_windows or part.max_windows,
                head_windows=part.head_windows,
                prompts=part.prompts,
                new_tokens=part.new_tokens,
                on_start=on_start,
                on_pass=on_pass,
            )
        self.fidelity.append(section)
        console.print_page(fidelity_page(section))

    def _tasks(self, loaded: LoadedModel, out: Path, batch_size: int, seed: int) -> None:
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
                on_unit=on_unit,
                on_answers=on_answers,
            )
        self.tasks.append(section)
        console.print_page(task_page(section))

    def _retrieval(self, loaded: LoadedModel, kind: str, lengths: Sequence[int], seed: int) -> None:
        part = self._suite.retrieval
        assert part is not None
        with console.measuring() as (on_start, on_pass):
            section = measure_retrieval(
                loaded,
                self._backends,
                kind,
                text=self._text(part.data) if kind == "needle" else None,
                lengths=lengths,
                depths=part.depths,
                samples=part.samples,
                seed=seed,
                on_start=on_start,
                on_pass=on_pass,
            )
        self.retrieval.append(section)
        console.print_page(retrieval_page(section))

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
