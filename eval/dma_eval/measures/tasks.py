"""lm-eval tasks under several backends of one loaded model: the same samples, in the same order, once per backend.

Tasks of RULER (arXiv 2404.06654) make prompts of a given length for the tokenizer of the model.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import itertools
import logging
import os
import random
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml
from accelerate.state import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets.exceptions import DatasetsError
from jinja2 import TemplateError
from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

import dma_hf
from dma_eval import console
from dma_eval.config import TasksPart
from dma_eval.errors import UserError, one_line
from dma_eval.harness import DMALM, BackendFailure
from dma_eval.load.backends import Backend, activate
from dma_eval.results import TaskSection, low_share
from dma_eval.session import Session
from dma_hf import DMAConfig

from .task_summary import TaskRecord, UnitRecord, metric_values, summarize_tasks, task_record

FOLDER = "samples"  # subfolder of a run's folder with the records: a folder for each backend, with a file for each name
SHOWN_NAMES = 12
DATA_KEYS = ("dataset_path", "dataset_kwargs")  # of a task, whose values may be files, patterns or folders
UNUSABLE = (
    *(OSError, ValueError, LookupError, RuntimeError, TypeError, ImportError, AttributeError, AssertionError),
    *(ArithmeticError, DatasetsError, TemplateError),  # the first where a perplexity by word is too large for a float
)
"""Exceptions of lm-eval for a malformed task, or for data that do not match it."""


@dataclass(frozen=True)
class TaskNames:
    """Names of existing tasks and groups, lm-eval's manager of them, and folders of tasks beside lm-eval's own."""

    names: tuple[str, ...]
    manager: TaskManager = field(repr=False)
    folders: tuple[Path, ...] = ()


def find_tasks(names: Sequence[str], include_paths: Sequence[Path] = ()) -> TaskNames:
    """Look up tasks, groups, tags and YAML files, in folders and in lm-eval itself. Commas separate names, too."""
    asked = list(dict.fromkeys(os.path.expanduser(part) for name in names for part in name.split(",") if part))
    if not asked:
        raise UserError("--tasks needs at least one name, for example: --tasks lambada_openai,arc_easy")
    for path in include_paths:
        if not path.is_dir():
            raise UserError(f"--include-path: no such folder: {path}")
    files = {name for name in asked if name.endswith((".yaml", ".yml"))}
    for name in sorted(files):
        check_yaml(Path(name))
    folders = [str(path) for path in include_paths]
    manager = TaskManager(include_path=folders, include_defaults=False)
    local = manager.all_tasks
    if any(name not in files and name not in manager.task_index for name in asked):
        manager = TaskManager(include_path=folders)  # lm-eval takes ten seconds to index its own tasks
    unknown = [name for name in asked if name not in files and name not in manager.task_index]
    if unknown:
        for file in (each for path in include_paths for each in sorted(path.rglob("*.y*ml"))):
            check_yaml(file)  # lm-eval ignores a file that is not YAML
        near = difflib.get_close_matches(unknown[0], manager.all_tasks, SHOWN_NAMES, cutoff=0.5)
        hints = [f"did you mean: {', '.join(near)}?"] if near else []
        if include_paths:
            hints.append(f"in --include-path: {', '.join(local[:SHOWN_NAMES]) or 'no tasks'}")
        hints.append(f"lm-eval has {len(manager.all_tasks):,} names; 'lm-eval ls tasks' lists them")
        raise UserError(f"--tasks: unknown task {unknown[0]!r}; {'; '.join(hints)}")
    return TaskNames(tuple(asked), manager, tuple({*include_paths, *(Path(name).parent for name in files)}))


def check_yaml(file: Path) -> None:
    """Check the syntax of a YAML file. Tags, which name functions, are not resolved."""
    try:
        yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise UserError(f"--tasks: {file} is not YAML: {place}{error.problem}") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"--tasks: cannot read {file}: {why}") from error


class _Plain(yaml.SafeLoader):  # type: ignore[misc]
    """Reads functions by their names."""


_Plain.add_multi_constructor("!", lambda loader, suffix, node: node.value)


def fingerprint(folders: Sequence[Path]) -> str:
    """Return a hash of the modules and YAML files in folders of tasks, and of the local data that these name."""
    pending = [file.resolve() for folder in folders for file in folder.rglob("*")]
    pending = [file for file in pending if file.suffix in (".py", ".yaml", ".yml") and file.is_file()]
    found: set[Path] = set()
    while pending:
        found.add(file := pending.pop())
        if file.suffix not in (".yaml", ".yml"):
            continue
        try:
            config = yaml.load(file.read_bytes(), _Plain)
        except yaml.YAMLError:  # lm-eval says what is wrong when it loads the task
            continue
        if isinstance(config, dict):
            named = {Path(each) for key in DATA_KEYS for each in _data(config.get(key))}
            named |= {file.parent / str(config.get("include")), *file.parent.glob("*.py")}
            pending += {each.resolve() for each in named if each.is_file()} - found
    digest = hashlib.sha256()
    for file in sorted(found):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _data(value: Any) -> Iterator[str]:
    """Yield the files that a value of a task names: files, patterns, or folders of data."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _data(each)
    elif isinstance(value, str):
        yield from glob.glob(os.path.join(value, "**") if os.path.isdir(value) else value, recursive=True)


def measure_tasks(session: Session, tasks: TaskNames, part: TasksPart) -> TaskSection:
    """Evaluate every backend on every task. Finished tasks and answers in the run's folder are reused."""
    backends, processes, progress = session.backends, PartialState(), session.progress
    if part.chat_template and session.loaded.tokenizer.chat_template is None:
        raise UserError("--apply-chat-template: the model's tokenizer has no chat template")
    for backend in backends:
        activate(session.loaded.model, backend)
    lm = DMALM.of(session.loaded, batch_size=part.batch_size)
    lm.on_answers = lambda count: progress.advance("answers", count)
    names = ("limit", "num_fewshot", "chat_template", "lengths")
    settings = {"seed": session.seed, "definition": fingerprint(tasks.folders)}
    settings |= {name: getattr(part, name) for name in names}
    if part.lengths:
        session.loaded.check_positions(max(part.lengths), "--lengths")
    asked = {
        title(name, length) if length else name: (name, length)
        for name, length in itertools.product(tasks.names, part.lengths or [0])
    }
    identities = {
        (backend.label, called): session.identity(backend, name=called, **settings)
        for called, backend in itertools.product(asked, backends)
    }
    answers: dict[tuple[str, str], UnitRecord | str] = {}  # records, and the reasons of missing ones
    for unit, identity in identities.items():
        saved = session.saved(UnitRecord, identity, FOLDER, *unit) if processes.is_main_process else None
        (record,) = broadcast_object_list([saved])
        if record is not None:
            answers[unit] = record
    # Load all data before all evaluations, so that missing data are an error now and not hours later.
    missing = [called for called in asked if any((backend.label, called) not in answers for backend in backends)]
    if part.lengths and missing:  # some draw from a generator of their own: the same prompts need the same order
        missing = [*asked]
    units = {called: _load(session, tasks, *asked[called], part) for called in missing}
    if processes.num_processes > 1:
        for task in (task for unit in units.values() for task in unit["tasks"].values()):
            _draw_examples_alike(task)
    for name, backend in itertools.product(asked, backends):
        unit, what = (backend.label, name), f"{name}, {backend.label}"
        if unit in answers:
            progress.kept(what)
            continue
        progress.begin(what)
        partial = session.scratch({**identities[unit], "rank": processes.process_index}, FOLDER, *unit)
        try:
            with _remembered(lm, partial) as remembering:
                record = _evaluate(remembering, units[name], backend, part, session, asked[name][1])
            session.keep(UnitRecord, record, identities[unit], FOLDER, *unit)
            answers[unit] = record
        except BackendFailure as error:
            answers[unit] = str(error)
        except sqlite3.Error as error:  # the disk is full, or the file is damaged
            raise UserError(f"--out: cannot save answers to {partial}: {one_line(error)}") from error
        except UNUSABLE as error:  # of the task: the errors of a backend are failures
            raise UserError(f"--tasks: cannot evaluate {name!r}: {one_line(error)}") from error
        if partial is not None:
            partial.unlink(missing_ok=True)
    return summarize_tasks(session, [*asked], answers, part)


def _load(session: Session, tasks: TaskNames, name: str, length: int, part: TasksPart) -> Mapping[str, Any]:
    """Load a task or group with its data, or let it make prompts of ``length`` tokens, unless that is 0."""
    manager = tasks.manager
    try:
        if length:
            index = manager.task_index
            file = Path((index[name].yaml_path if name in index else None) or name)
            loaded = load_at_length(name, file, length, session.loaded.tokenizer, session.seed)
        else:
            loaded = manager.load([name])
    except UNUSABLE as error:
        raise UserError(f"--tasks: cannot load {name!r}: {one_line(error)}") from error
    except StopIteration as error:  # from inside `datasets`: a file without a row
        raise UserError(f"--tasks: cannot load {name!r}: its data have no rows") from error
    for called, task in loaded["tasks"].items():
        own = task.get_config("num_fewshot")
        if part.num_fewshot and own == 0:  # as in lm-eval
            console.print_warning(f"{called} sets num_fewshot to 0, and keeps it: --num-fewshot does not change it")
        elif part.num_fewshot is not None:
            task.set_config(key="num_fewshot", value=part.num_fewshot)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
    return loaded


def title(name: str, length: int) -> str:
    return f"{name}, {length} tokens"


def load_at_length(name: str, file: Path, length: int, tokenizer: Any, seed: int) -> Mapping[str, Any]:
    """Load a task, or a group of tasks, from the folder of ``file``, with prompts of ``length`` tokens."""
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):  # the tasks print while they make their prompts
        tokenizer.save_pretrained(folder)
        random.seed(seed)
        np.random.seed(seed)
        how = {"tokenizer": folder, "max_seq_lengths": [length]}
        manager = TaskManager(include_path=str(file.parent), include_defaults=False, metadata=how)
        try:
            loaded: Mapping[str, Any] = manager.load([name])
        except ImportError as error:
            why = one_line(error)
            raise UserError(f"--tasks: {name!r} needs more packages: pip install 'dma-hf[ruler]' ({why})") from error
    if any(task.get_config("custom_dataset") is None for task in loaded["tasks"].values()):
        raise UserError(f"--lengths: {name!r} reads a data set; only tasks that make their prompts take lengths")
    return loaded


def at_length(record: TaskRecord, length: int) -> TaskRecord:
    """Return a record with RULER's score at one length, which lm-eval names by the length.

    ``score`` is the share of the answers that were found. If a question has several answers, ``all_found`` says whether
    all of them were, so that answers can flip.
    """
    has_several = any(len(sample["doc"]["outputs"]) > 1 for sample in record.samples)
    names = ("score", "all_found") if has_several else ("score",)
    samples = []
    for sample in record.samples:
        score = float(sample[str(length)])
        samples.append(sample | dict(zip(names, (score, float(score == 1)), strict=False)))
    filters = sorted({sample["filter"] for sample in samples})
    return replace(
        record,
        name=title(record.name, length),
        aggregations=dict.fromkeys(names, "mean"),
        higher_is_better=dict.fromkeys(names, True),
        metrics={
            f"{name},{each}": float(np.mean([sample[name] for sample in samples if sample["filter"] == each]))
            for name, each in itertools.product(names, filters)
        },
        samples=samples,
    )


def _draw_examples_alike(task: Any) -> None:
    """Let every process draw the few-shot examples of a single process: it builds all requests, and keeps its own."""
    build_all = task.build_all_requests

    def build_own(*, rank: int, world_size: int, **options: Any) -> None:
        build_all(rank=0, world_size=1, **options)
        task._instances = [instance for instance in task._instances if instance.doc_id % world_size == rank]

    if task.get_config("num_fewshot"):
        task.build_all_requests = build_own


@contextmanager
def _remembered(lm: DMALM, file: Path | None) -> Iterator[Any]:
    """Save answers to ``file`` with lm-eval's own cache, so that an interrupted task resumes after its last batch."""
    if file is None:
        yield lm
        return
    logging.getLogger("sqlitedict").setLevel(logging.CRITICAL)  # it logs errors before it raises them
    cached = CachingLM(lm, str(file))
    try:
        yield cached
    finally:
        cached.dbdict.close()
        lm.set_cache_hook(CacheHook(None))


def _evaluate(
    lm: Any, unit: Mapping[str, Any], backend: Backend, part: TasksPart, session: Session, length: int
) -> UnitRecord:
    """Evaluate one backend on one loaded task or group. Raises ``BackendFailure`` if it fails in any process."""
    lm.use(backend)
    dma_hf.reset_stats(lm.model)
    for task in unit["tasks"].values():  # every backend must draw the same examples
        task.set_fewshot_seed(seed=session.seed)
    torch.manual_seed(session.seed)  # and the same answers, where a task samples them
    chat = {"apply_chat_template": part.chat_template, "fewshot_as_multiturn": part.chat_template}
    results = evaluate(lm, unit, limit=part.limit, bootstrap_iters=0, **chat)
    failed = next((failure for failure in gather_object([lm.failure]) if failure is not None), None)
    if failed is not None:
        raise BackendFailure(failed)
    fallbacks = sum(map(Counter, gather_object([dma_hf.stats(lm.model).fallbacks])), Counter[str]())
    record = None
    if PartialState().is_main_process:
        own = f"{length}," if length else ""  # RULER names its metrics by the length
        records = [task_record(name, results, task) for name, task in unit["tasks"].items()]
        record = UnitRecord(
            fallbacks=dict(fallbacks),
            tasks=[at_length(each, length) for each in records] if length else records,
            groups={
                group: {key: value for key, value in metric_values(values).items() if key.startswith(own)}
                for group, values in results.get("groups", {}).items()
            },
            low_share=_low_share(lm, unit, results["samples"], backend.config),
        )
    made: UnitRecord
    (made,) = broadcast_object_list([record])
    return made


def _low_share(lm: Any, unit: Mapping[str, Any], samples: Mapping[str, Any], config: DMAConfig | None) -> float | None:
    if config is None:
        return None
    scored = [name for name, task in unit["tasks"].items() if task.OUTPUT_TYPE != "generate_until"]
    texts = ("".join(given) for name in scored for each in samples[name] for given in each["arguments"])
    lengths = [min(max(len(lm.tok_encode(text)) - 1, 1), lm.max_length) for text in texts]
    return low_share(lengths, config.to_dict()) if lengths else None
