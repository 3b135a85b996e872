"""RULER (arXiv 2404.06654): tasks of lm-eval that make prompts of a given length for the tokenizer of a model."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from lm_eval.tasks import TaskManager

from dma_eval.errors import UserError, one_line

from .task_summary import TaskRecord


def title(name: str, length: int) -> str:
    """Return the name of a task at one length."""
    return f"{name}, {length} tokens"


def load(name: str, file: Path, length: int, tokenizer: Any, seed: int) -> Mapping[str, Any]:
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
    scores = [float(sample[str(length)]) for sample in record.samples]
    samples = [
        sample | {name: score if name == "score" else float(score == 1) for name in names}
        for sample, score in zip(record.samples, scores, strict=True)
    ]
    filters = {sample["filter"] for sample in samples}
    return replace(
        record,
        name=title(record.name, length),
        aggregations=dict.fromkeys(names, "mean"),
        higher_is_better=dict.fromkeys(names, True),
        metrics={
            f"{name},{each}": float(np.mean([sample[name] for sample in samples if sample["filter"] == each]))
            for name in names
            for each in sorted(filters)
        },
        samples=samples,
    )
