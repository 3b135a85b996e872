"""One run, from its configuration to its pages.

A command or a file makes a :class:`Suite` of parts (``config``). The model, texts and backends are loaded (``load``).
Each part becomes one or more sections (``measures``), made of pieces that are saved one by one (``session``). A section
is recorded with its own date, command, commit and machine (``results``). Pages are made of records (``show``).
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from accelerate.state import PartialState

from . import config, console
from .config import Suite
from .errors import UserError, one_line
from .files import write_json
from .load.backends import Backend
from .load.data import Text, load_text
from .measures.fidelity import measure_fidelity
from .measures.perplexity import default_context, measure_perplexity
from .measures.stress import measure_stress
from .results import RESULTS, Report, has_failures, here_and_now, merged, read_report
from .session import Session, join_processes, load
from .show.pages import PAGES
from .show.render import write_run

FAILURES = (UserError, RuntimeError, ValueError, TypeError)
"""Exceptions of a part that cannot be measured: invalid input, or an error of a model or a library."""


class Run:
    """The parts of a suite on one model.

    Texts and tasks are looked up before the model is loaded, so that a missing one is an error at once. The text may
    replace the suite's. Tasks may be in folders of YAML files.
    """

    def __init__(
        self,
        args: config.QualityOptions,
        backends: Sequence[Backend],
        suite: Suite,
        text: config.OptionalTextOptions | None,
        include_path: Sequence[Path],
    ) -> None:
        self._is_main = join_processes(args.device, args.seed).is_main_process
        if args.out is not None and self._is_main:
            _previous(args.out)  # an error at once if results of another kind are there
        self._suite = suite
        self._data = None if text is None else text.data
        column = "text" if text is None else text.column
        self._texts: dict[str, Text] = {}
        for name in dict.fromkeys(suite.texts(self._data)):
            with console.working(f"Reading {name}"):
                self._texts[name] = load_text(name, column=column)
        if suite.tasks is not None:
            from .measures.tasks import find_tasks  # the import takes seconds, and a run without tasks does not need it

            with console.working("Looking for the tasks"):
                self._names = find_tasks(suite.tasks.names, include_path)
        self.session = Session(load(args), backends, args.out, seed=args.seed)

    def _parts(self, limit: int | None) -> Iterator[tuple[str, Callable[[], Any], str]]:
        """Yield name, measurement and request of each section. Contexts beyond ``limit`` are skipped."""
        suite, session, default = self._suite, self.session, default_context(self.session.loaded)

        def fits(part: str, lengths: Sequence[int]) -> list[int]:
            for length in lengths:
                if limit is not None and length > limit:
                    console.print_warning(f"{part} at {length:,} is skipped: the model has {limit:,} positions")
            return [length for length in lengths if limit is None or length <= limit]

        def of_text(name: str, measure: Callable[..., Any], part: Any) -> tuple[str, Callable[[], Any], str]:
            text = self._texts[self._data or part.data]
            return name, lambda: measure(session, text, part), self._request(name, part, text.sha256)

        if (perplexity := suite.perplexity) is not None:
            for context in fits("perplexity", perplexity.contexts or [default]):
                yield of_text(f"perplexity, {context:,}", measure_perplexity, replace(perplexity, contexts=[context]))
        if suite.fidelity is not None and fits("fidelity", [suite.fidelity.context or default]):
            yield of_text("fidelity", measure_fidelity, suite.fidelity)
        if suite.tasks is not None:
            tasks = replace(suite.tasks, lengths=fits("tasks", suite.tasks.lengths))
            if tasks.lengths or not suite.tasks.lengths:
                from .measures.tasks import measure_tasks

                yield "tasks", lambda: measure_tasks(session, self._names, tasks), self._request("tasks", tasks, None)
        if suite.stress is not None and fits("stress", [suite.stress.context or default]):
            yield of_text("stress", measure_stress, suite.stress)

    def _request(self, name: str, part: Any, text: str | None) -> str:
        """Return a hash of everything that a section depends on, except code and machine."""
        session, model = self.session, self.session.loaded.info
        asked = {
            "part": {key: value for key, value in asdict(part).items() if key != "batch_size"},
            "text": text,
            "seed": session.seed,
            "name": name,
            "model": [model.name, model.revision, model.dtype, model.yarn, model.device.partition(":")[0]],
            "folder": session.loaded.folder,
            "backends": [backend.info for backend in session.backends],
        }
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]

    def _section(self, measure: Callable[[], Any], request: str) -> Any:
        """Measure a section, except the pieces that are in the run's folder. It has the origin of its newest piece."""
        session = self.session
        session.origins.clear()
        with session.progress.shown():
            section = measure()
        gc.collect()  # frees the fp32 copy of the model, which is a cycle once it is configured
        origin = max(session.origins, key=lambda each: each.created, default=session.origin())
        return replace(section, origin=replace(origin, request=request))

    def measure(self, *, goes_on: bool, json_file: Path | None) -> int:
        """Measure all parts; write the report after each, and return the exit code.

        With ``goes_on``, a failed part is reported and the others continue, and contexts that the model does not
        support are skipped. ``json_file`` gets this command's own report at the end. Several processes measure the
        tasks together, before the first one goes on alone.
        """
        session, out = self.session, self.session.folder
        report = Report(**here_and_now(session.environment), seed=session.seed, model=session.loaded.info)
        failed = is_interrupted = False
        resume = f"interrupted; {'run it again' if out else 'use --out FOLDER'} to resume"
        parts = list(self._parts(session.loaded.max_context if goes_on else None))
        if PartialState().num_processes > 1:
            parts.sort(key=lambda part: part[0] != "tasks")
        for name, measure, request in parts:
            if name != "tasks":
                PartialState().destroy_process_group()
                if not self._is_main:
                    return 0
            try:
                section = self._section(measure, request)
                field = name.partition(",")[0]
                getattr(report, field).append(section)
                console.print_page(PAGES[field](section))
                console.print_line("")
            except KeyboardInterrupt:
                console.print_error(resume)
                return console.INTERRUPTED
            except FAILURES as error:
                if not goes_on or (name == "tasks" and PartialState().num_processes > 1):  # which wait for this one
                    raise
                if console.shows_tracebacks:
                    console.err.print_exception()
                console.print_error(f"{name} failed: {one_line(error)}")
                failed = True
            report = replace(report, **here_and_now(session.environment))
            if self._is_main:
                _record(report, out)
            is_interrupted = any(section.windows_left for section in report.perplexity)
            if is_interrupted:
                console.print_error(resume)
                break
        if self._is_main:
            if json_file is not None:
                write_json(report, json_file)
                console.print_wrote(json_file)
            if out is not None:
                console.print_wrote(RESULTS, *write_run(_record(report, out), out), folder=out)
        PartialState().destroy_process_group()
        if is_interrupted:
            return console.INTERRUPTED
        return console.FAILED if failed or any(has_failures(section) for _, section in report.sections) else 0


def _previous(folder: Path) -> Report | None:
    if not (folder / RESULTS).exists():
        return None
    try:
        return read_report(folder)
    except UserError as error:
        raise UserError(f"--out: {folder} holds other results; name another folder ({error})") from error


def _record(report: Report, folder: Path | None) -> Report:
    """Add the sections of a report to that of the folder, if there is one, and return the whole report."""
    if folder is not None:
        previous = _previous(folder)
        report = report if previous is None else merged(previous, report)
        write_json(report, folder / RESULTS)
    return report
