"""Measure the quality of every preset on a model, from local files alone.

    python scripts/measure_quality.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data DATA --out OUT --dtype bfloat16

``DATA`` holds ``wikitext2/wiki.test.raw``, and in ``tasks`` the files ``lambada_openai.jsonl`` (``context``,
``continuation``), ``arc_easy.jsonl`` and ``boolq.jsonl`` (``query``, ``choices``, ``gold``) and
``hellaswag_val_full.txt.bz2`` (per item six lines: context, index of the right ending, four endings). From them it
makes lm-eval tasks in ``OUT/tasks``, and runs the suite ``local-quality`` on them; all arguments that it does not know
go to ``dma-hf suite``. Run again, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import bz2
import json
import sys
from pathlib import Path
from typing import Any

import yaml

LINES_PER_ITEM = 6
ACCURACY = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
ACCURACY_BY_LENGTH = {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}
CHOICE: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{query}}",
    "doc_to_choice": "choices",
    "doc_to_target": "{{gold}}",
    "metric_list": [ACCURACY, ACCURACY_BY_LENGTH],
}
TASKS: dict[str, dict[str, Any]] = {
    "lambada": {
        "file": "lambada_openai.jsonl",
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{' ' + continuation}}",
        "metric_list": [ACCURACY, {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}],
    },
    "hellaswag": {"file": "hellaswag.jsonl", **CHOICE},
    "arc_easy": {"file": "arc_easy.jsonl", **CHOICE, "doc_to_text": "{{query}}\nAnswer:"},
    "boolq": {"file": "boolq.jsonl", **CHOICE, "doc_to_text": "{{query}}\nAnswer:"},
}


def read_hellaswag(path: Path, items: int) -> list[dict[str, Any]]:
    """The first ``items`` items of the file, as a context, four endings and the index of the right one."""
    lines = bz2.decompress(path.read_bytes()).decode("utf-8").splitlines()
    if len(lines) % LINES_PER_ITEM:
        raise ValueError(f"{path}: expected {LINES_PER_ITEM} lines for each item, got {len(lines)} lines")
    groups = [lines[i : i + LINES_PER_ITEM] for i in range(0, min(len(lines), items * LINES_PER_ITEM), LINES_PER_ITEM)]
    return [{"query": query, "gold": int(gold), "choices": endings} for query, gold, *endings in groups]


def write_tasks(data: Path, folder: Path, hellaswag_items: int) -> None:
    """Write HellaSwag as JSON lines, and a task YAML for each of ``TASKS``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = read_hellaswag(data / "hellaswag_val_full.txt.bz2", hellaswag_items)
    (folder / "hellaswag.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, task in TASKS.items():
        config = dict(task)
        file = config.pop("file")
        path = folder / file if (folder / file).is_file() else data / file
        config |= {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(path.resolve())}},
            "test_split": "test",
            "metadata": {"version": 1.0},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def main() -> None:
    """Prepare the tasks and run the suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, GGUF file or Hub name")
    parser.add_argument("--data", required=True, type=Path, help="folder of the data")
    parser.add_argument("--out", required=True, type=Path, help="folder for the report")
    parser.add_argument("--hellaswag-items", type=int, default=1000, help="items of HellaSwag (default: 1000)")
    known, others = parser.parse_known_args()
    write_tasks(known.data / "tasks", known.out / "tasks", known.hellaswag_items)

    from dma_eval.cli import main as run

    command = ["suite", "--suite", "local-quality", "--model", known.model, "--out", str(known.out)]
    command += ["--data", str(known.data / "wikitext2/wiki.test.raw"), "--include-path", str(known.out / "tasks")]
    sys.argv = ["dma-hf", *command, *others]  # reports quote it
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
