"""lm-eval tasks of every output type over a few made-up documents, as YAML and JSON-lines files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

DOCUMENTS = 24
WORDS = ["ship", "whale", "sea", "captain", "white", "water", "thousand", "said"]

METRIC = {"aggregation": "mean", "higher_is_better": True}
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "{{gold}}",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny_choice": CHOICE | {"metric_list": [{"metric": "acc", **METRIC}, {"metric": "acc_norm", **METRIC}]},
    "tiny_last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{' ' + choices[gold]}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", **METRIC},
        ],
    },
    "tiny_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "tiny_answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match", **METRIC}],
    },
    "tiny_few": CHOICE | {"num_fewshot": 2, "fewshot_split": "test", "metric_list": [{"metric": "acc", **METRIC}]},
}


def write_tiny_tasks(folder: Path) -> Path:
    """Write the tasks, and the group ``tiny_group`` of two of them, to ``folder``; return it."""
    rng = random.Random(1)
    rows = []
    for _ in range(DOCUMENTS):
        choices = rng.sample(WORDS, 4)
        question = " ".join(["the", *rng.choices(WORDS, k=rng.randint(3, 40)), "and the"])
        rows.append({"question": question, "choices": choices, "gold": rng.randrange(4)})
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, config in CONFIGS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "metadata": {"version": 1.0},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(common | config), encoding="utf-8")
    group = {
        "group": "tiny_group",
        "task": ["tiny_choice", "tiny_few"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
        "metadata": {"version": 1.0},
    }
    (folder / "tiny_group.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")
    return folder
