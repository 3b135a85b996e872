"""lm-eval tasks under several backends of one loaded model: the same samples, in the same order, once per backend."""

from __future__ import annotations

import difflib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.model
import lm_eval.api.task
import lm_eval.models.huggingface
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

import dma_hf

from . import fingerprint
from .backends import Backend, activate
from .distributed import Processes
from .errors import UserError, one_line
from .harness import DMALM, BackendFailure
from .models import LoadedModel
from .results import ModelInfo
from .sections import TaskSection
from .task_records import RecordStore, UnitRecord, metric_values, task_record
from .task_summary import summarize_tasks

SHOWN_NAMES = 12


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """How tasks are run.

    Attributes:
        limit: Samples per task; all by default.
        num_fewshot: Examples in each prompt; by default what each task says.
        batch_size: Sequences per forward pass.
        chat_template: Whether prompts go through the model's chat template.
        seed: Seed of the choice of examples, and of the bootstrap.
    """

    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 8
    chat_template: bool = False
    seed: int = 0


@dataclass(frozen=True)
class TaskNames:
    """Names of tasks and groups that are known to exist, and lm-eval's manager that knows them."""

    names: tuple[str, ...]
    manager: TaskManager = field(repr=False)


def find_tasks(names: Sequence[str], include_paths: Sequence[Path] = ()) -> TaskNames:
    """Look names up among the tasks in ``include_paths`` and those that come with lm-eval.

    Args:
        names: Names of tasks, groups or tags, or YAML files; several may stand in one string, with commas.
        include_paths: Folders of task YAMLs.

    Raises:
        UserError: There are no names, a folder is none, or a name is unknown; the message lists the nearest ones.
    """
    asked = list(dict.fromkeys(part for name in names for part in name.split(",") if part))
    if not asked:
        raise UserError("--tasks needs at least one name, for example: --tasks lambada_openai,arc_easy")
    for path in include_paths:
        if not path.is_dir():
            raise UserError(f"--include-path: no such folder: {path}")
    folders = [str(path) for path in include_paths]
    manager = TaskManager(include_path=folders, include_defaults=False)
    local = manager.all_tasks
    if any(not _is_known(name, manager) for name in asked):  # indexing lm-eval's own tasks takes ten seconds
        manager = TaskManager(include_path=folders)
    unknown = [name for name in asked if not _is_known(name, manager)]
    if unknown:
        near = difflib.get_close_matches(unknown[0], manager.all_tasks, SHOWN_NAMES, cutoff=0.5)
        hints = [f"did you mean: {', '.join(near)}?"] if near else []
        if include_paths:
            hints.append(f"in --include-path: {', '.join(local[:SHOWN_NAMES]) or 'no tasks'}")
        hints.append(f"lm-eval has {len(manager.all_tasks):,} names; 'lm-eval ls tasks' lists them")
        raise UserError(f"--tasks: unknown task {unknown[0]!r}; {'; '.join(hints)}")
    return TaskNames(tuple(asked), manager)


def evaluate_tasks(
    loaded: LoadedModel,
    model_info: ModelInfo,
    tasks: TaskNames,
    backends: Sequence[Backend],
    options: TaskOptions,
    *,
    store: RecordStore,
    processes: Processes | None = None,
    on_unit: Callable[[str, Backend, bool], None] = lambda name, backend, resumed: None,
    on_answers: Callable[[int], None] = lambda count: None,
) -> TaskSection:
    """Evaluate every backend on every task; what ``store`` holds already is not evaluated again.

    Args:
        loaded: The model.
        model_info: Facts about it, which tell records of one model from those of another.
        tasks: What to evaluate.
        backends: The backends; the first is the reference.
        options: How.
        store: Where finished backends are kept.
        processes: The processes that split the samples; one by default. Each must make this call.
        on_unit: Called before each evaluation with the task's name and the backend, and whether it is resumed.
        on_answers: Called with the number of requests that were answered since the last call.

    Raises:
        UserError: A task cannot be loaded, or the model cannot run a backend.
    """
    processes = processes or Processes()
    for backend in backends:
        activate(loaded.model, backend)
    lm = DMALM.of(loaded, processes, batch_size=options.batch_size)
    lm.on_answers = on_answers
    records: dict[tuple[str, str], UnitRecord] = {}
    failures: dict[tuple[str, str], str] = {}
    for name in tasks.names:
        for backend in backends:
            identity = _fingerprint(model_info, tasks.manager, name, backend, options)
            record = processes.from_main(store.load(backend.label, name, identity) if processes.is_main else None)
            if record is not None:
                records[backend.label, name] = record
    # All data before all evaluations: what cannot be loaded should not come to light hours later.
    missing = [name for name in tasks.names if any((backend.label, name) not in records for backend in backends)]
    with _without_progress_bars():
        units = {name: _load(tasks.manager, name, options) for name in missing}
        _check_distinct(units)
        if processes.count > 1:
            for unit in units.values():
                for task in unit["tasks"].values():
                    _draw_examples_alike(task)
        for name in tasks.names:
            for backend in backends:
                on_unit(name, backend, (backend.label, name) in records)
                if (backend.label, name) in records:
                    continue
                identity = _fingerprint(model_info, tasks.manager, name, backend, options)
                try:
                    record = _evaluate(lm, units[name], backend, options, identity, processes)
                except BackendFailure as error:
                    failures[backend.label, name] = str(error)
                    continue
                if processes.is_main:
                    store.save(backend.label, name, record)
                records[backend.label, name] = record
    return summarize_tasks(
        backends,
        tasks.names,
        records,
        failures,
        limit=options.limit,
        batch_size=options.batch_size,
        chat_template=options.chat_template,
        processes=processes.count,
        seed=options.seed,
    )


def _is_known(name: str, manager: TaskManager) -> bool:
    return name in manager.task_index or (Path(name).suffix in (".yaml", ".yml") and Path(name).is_file())


def _fingerprint(
    model: ModelInfo, manager: TaskManager, name: str, backend: Backend, options: TaskOptions
) -> dict[str, Any]:
    """Everything that a record's answers depend on, as JSON values."""
    entry = manager.task_index.get(name)
    file = Path(name) if entry is None else entry.yaml_path
    return {
        "name": name,
        "definition": hashlib.sha256(file.read_bytes()).hexdigest() if file is not None else None,
        **fingerprint.of_model(model),
        **fingerprint.of_backend(backend),
        "limit": options.limit,
        "num_fewshot": options.num_fewshot,
        "chat_template": options.chat_template,
        "seed": options.seed,
        "versions": fingerprint.of_versions(),
    }


def _load(manager: TaskManager, name: str, options: TaskOptions) -> Mapping[str, Any]:
    """Load a task or group with its data; the few-shot setting is overridden as lm-eval's own command line does."""
    try:
        loaded: Mapping[str, Any] = manager.load([name])
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, ImportError) as error:
        raise UserError(f"--tasks: cannot load {name!r}: {one_line(error)}") from error
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if options.num_fewshot is not None and own != 0:  # a task that says 0 means it
            task.set_config(key="num_fewshot", value=options.num_fewshot)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
    return loaded


def _check_distinct(units: Mapping[str, Mapping[str, Any]]) -> None:
    owner: dict[str, str] = {}
    for name, unit in units.items():
        for task in unit["tasks"]:
            if owner.setdefault(task, name) != name:
                raise UserError(f"--tasks: task {task!r} is in both {owner[task]!r} and {name!r}; name it once")


def _draw_examples_alike(task: Any) -> None:
    """Let every process draw the few-shot examples that a single one would.

    The examples of one document depend on how many were drawn before, so that a process which builds the requests of
    its own documents only would draw others. Each builds all of them and keeps its own.
    """
    build_all = task.build_all_requests

    def build_own(*, rank: int, world_size: int, **options: Any) -> None:
        build_all(rank=0, world_size=1, **options)
        task._instances = [instance for instance in task._instances if instance.doc_id % world_size == rank]

    if task.get_config("num_fewshot"):
        task.build_all_requests = build_own


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep lm-eval and ``datasets`` from drawing progress bars: ours is the one that shows."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    bars = [(module, module.tqdm) for module in (lm_eval.api.model, lm_eval.api.task, lm_eval.models.huggingface)]
    for module, bar in bars:
        module.tqdm = partial(_without_bar, bar)
    try:
        yield
    finally:
        for module, bar in bars:
            module.tqdm = bar
        if shown:
            datasets.enable_progress_bars()


def _without_bar(bar: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Make a bar that is not shown, whatever the caller says about it."""
    return bar(*arguments, **(options | {"disable": True}))


def _evaluate(
    lm: DMALM,
    unit: Mapping[str, Any],
    backend: Backend,
    options: TaskOptions,
    identity: dict[str, Any],
    processes: Processes,
) -> UnitRecord:
    """One backend on one loaded task or group.

    Raises:
        BackendFailure: It could not go on, in one process at least.
    """
    lm.use(backend)
    dma_hf.reset_fallback_counts()
    for task in unit["tasks"].values():  # examples are drawn as requests are built: every backend must start alike
        task.set_fewshot_seed(seed=options.seed)
    began = time.perf_counter()
    try:
        results = evaluate(
            lm,
            unit,
            limit=options.limit,
            bootstrap_iters=0,
            apply_chat_template=options.chat_template,
            fewshot_as_multiturn=options.chat_template,
        )
    except (ValueError, AttributeError) as error:
        if options.chat_template and "chat_template" in str(error):
            raise UserError("--apply-chat-template: the model's tokenizer has no chat template") from error
        raise
    seconds = time.perf_counter() - began
    failed = next((failure for failure in processes.gathered(lm.failure) if failure is not None), None)
    if failed is not None:
        raise BackendFailure(failed)
    fallbacks: dict[str, int] = {}
    for counts in processes.gathered(dict(dma_hf.fallback_counts())):
        for reason, count in counts.items():
            fallbacks[reason] = fallbacks.get(reason, 0) + count
    record = None
    if processes.is_main:
        record = UnitRecord(
            fingerprint=identity,
            seconds=seconds,
            fallbacks=fallbacks,
            tasks=[task_record(name, results, task) for name, task in unit["tasks"].items()],
            groups={name: metric_values(values) for name, values in results.get("groups", {}).items()},
        )
    made = processes.from_main(record)
    assert made is not None
    return made
