"""Hub model cards made from a report: metadata, results and usage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, EvalResult, HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError

from .errors import UserError, one_line
from .files import parse
from .names import DMA, PRESETS
from .pages import all_pages, templates
from .render import cache_of, measured, tidy, versions
from .results import RESULTS, Report, backend_configs, backend_groups

TAGS = ["dma_mxfp", "quantized-attention", "low-bit-attention", "dma-hf"]
TASK = "text-generation"
RUNTIME = ("backend", "on_unsupported")
"""Fields of a configuration that are not saved with a model."""
FILE_SUFFIXES = (".gguf", ".toml", ".txt", ".json", ".jsonl", ".csv", ".parquet", ".md", ".png", ".yaml")


def check_token() -> None:
    """Check that an upload would have a token."""
    if get_token() is None:
        raise UserError("--push needs a token of the Hub: run 'hf auth login', or set HF_TOKEN")


def push(card: ModelCard, report_file: Path, repository: str) -> str:
    """Upload a card and its results in one commit, to a repository that is created if necessary; return its address."""
    api = HfApi()
    operations = [CommitOperationAdd("README.md", str(card).encode()), CommitOperationAdd(RESULTS, report_file)]
    try:
        api.create_repo(repository, exist_ok=True)
        commit = api.create_commit(repository, operations, commit_message="Model card and results of dma-hf")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(f"--push: the Hub refused {repository}: {one_line(error)}") from error
    return str(commit.commit_url)


def make_card(
    report: Report, *, backend: str | None = None, base_model: str | None = None, license_name: str | None = None
) -> ModelCard:
    """Make the card of a model for one of the report's ``dma_mxfp`` backends, by default the first.

    ``base_model`` and the licence are spelled as on the Hub. By default the base model is the measured one.
    """
    configs = backend_configs(report)
    if not configs:
        raise UserError("the report has no dma_mxfp backend, so there is nothing to make a card of")
    label = next(iter(configs)) if backend is None else backend
    if label not in configs:
        raise UserError(f"--backend: the report has no {backend!r}; it has: {', '.join(configs)}")
    base = _base_model(report, base_model)
    name = f"{base.rpartition('/')[2]} with {label}"
    results = list(_eval_results(report, label))
    data = ModelCardData(
        base_model=base,
        library_name="transformers",
        pipeline_tag=TASK,
        license=license_name,
        tags=TAGS,
        model_name=name if results else None,
        eval_results=results or None,
        ignore_metadata_errors=False,
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_text(report, label, base, name)}", ignore_metadata_errors=False)


def _base_model(report: Report, base_model: str | None) -> str:
    name = base_model or report.model.name
    if base_model is None and report.model.commit is None:
        raise UserError(f"--base-model: {name} was measured from local files; give the model's Hub name, OWNER/NAME")
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is None or name.endswith(".gguf"):
        raise UserError(f"--base-model: {name!r} is not a Hub name; give the model's Hub name, OWNER/NAME")
    return name


def _eval_results(report: Report, label: str) -> Iterator[EvalResult]:
    def result(dataset: str, kind: str, name: str, value: float, **more: Any) -> EvalResult:
        return EvalResult(
            task_type=TASK,
            dataset_type=re.sub(r"[^\w./-]+", "_", dataset),
            dataset_name=dataset.rpartition("/")[2],
            metric_type=kind,
            metric_name=name,
            metric_value=value,
            **more,
        )

    for section in report.perplexity:
        data, path = section.data, Path(section.data.name)
        is_file = data.column is None or path.suffix in FILE_SUFFIXES  # and no dataset of the Hub, OWNER/NAME
        dataset = {"dataset_config": data.config, "dataset_split": data.split}
        for each in section.backends:
            if each.label == label and each.perplexity is not None:
                name, shown = f"perplexity, context {section.context:,}", path.name if is_file else data.name
                yield result(shown, "perplexity", name, round(each.perplexity, 4), **dataset)
    for task in (task for section in report.tasks for task in section.tasks):
        for metric in task.metrics:
            value = next((each.value for each in metric.values if each.label == label), None)
            if value is not None:
                name = f"{metric.title}, {task.num_fewshot}-shot"
                yield result(task.name, metric.name, name, round(value, 6))


def _reduced(report: Report, label: str) -> Report:
    """Return the report of one backend and its references."""
    groups = [[each.label for each in group] for group in backend_groups(report)]
    others = {each for group in groups for each in group[1:]} - {label, *(group[0] for group in groups)}

    def reduce(value: Any) -> Any:
        if isinstance(value, list):
            return [reduce(each) for each in value if not (isinstance(each, dict) and each.get("label") in others)]
        if isinstance(value, dict):
            return {name: reduce(each) for name, each in value.items() if name not in others}
        return value

    return parse(Report, reduce(asdict(report)))


def _text(report: Report, label: str, base: str, name: str) -> str:
    config = backend_configs(report)[label]
    section = {key: value for key, value in config.items() if key not in RUNTIME}
    is_named = label.removeprefix(DMA).removeprefix(":").partition("+")[0] in ("", *PRESETS)
    report = _reduced(report, label)
    content = {
        "name": name,
        "base": base,
        "config": config,
        "cache": cache_of(label, config),
        "attention": label if is_named else DMA,
        "arguments": "" if is_named else repr(section),
        "json": json.dumps({DMA: section}, indent=2),
        "measured": measured(report.model),
        "model": report.model,
        "machine": report.environment,
        "versions": versions(report.environment),
        "date": report.created[:10],
        "pages": all_pages(report),
        "command": report.command,
    }
    return tidy(templates().get_template("card.md").render(content))
