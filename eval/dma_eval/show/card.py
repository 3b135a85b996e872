"""Hub model cards made from a report: metadata, results and usage."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, but not in __all__

from dma_eval.errors import UserError
from dma_eval.files import parse
from dma_eval.names import BUILDERS, DMA, PRESETS
from dma_eval.results import ModelInfo, Report, backend_configs, backend_groups

from .pages import Page, perplexity_page, task_page, templates
from .render import distinct_origins, machine, measured, section_pages, tidy, versions

TAGS = ["dma_mxfp", "quantized-attention", "low-bit-attention", "dma-hf"]
TASK = "text-generation"
RUNTIME = ("backend", "on_unsupported")  # fields of a configuration that are not saved with a model
WARNED = ", with warnings"  # end of the name of a result whose section has warnings


def make_card(
    report: Report, *, backend: str | None = None, base_model: str | None = None, license_name: str | None = None
) -> ModelCard:
    """Make the card of a model for one of the report's ``dma_mxfp`` backends, by default the first.

    ``base_model`` and the licence are spelled as on the Hub. By default the base model is the measured one. Names of
    results in the metadata say if they are of a part of the data, or have warnings.
    """
    configs = backend_configs(report)
    if not configs:
        raise UserError("the report has no dma_mxfp backend, so there is nothing to make a card of")
    label = next(iter(configs)) if backend is None else backend
    if label not in configs:
        raise UserError(f"--backend: the report has no {backend!r}; it has: {', '.join(configs)}")
    name = re.sub(r" \(\d+\)$", "", label)
    if f"{name} (2)" in configs:
        raise UserError(f"the report has several configurations named {name!r}; measure one in another folder")
    models = [each.model for each in distinct_origins(report)]
    if len({(each.name, each.commit, each.dtype, each.quantization, each.yarn) for each in models}) > 1:
        which = ", ".join(dict.fromkeys(map(measured, models)))
        raise UserError(f"the report has sections of several models ({which}); measure one in another folder")
    base = _base_model(models[0], base_model)
    name = f"{base.rpartition('/')[2]} with {label}"
    report = _reduced(report, label)
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


def _base_model(model: ModelInfo, base_model: str | None) -> str:
    name = base_model or model.name
    if base_model is None and model.commit is None:
        raise UserError(f"--base-model: {name} was measured from local files; give the model's Hub name, OWNER/NAME")
    try:
        validate_repo_id(name)
        is_valid = not name.endswith(".gguf")
    except HFValidationError:
        is_valid = False
    if not is_valid:
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

    def mark(section: Any, page: Callable[[Any], Page], part: str = "") -> str:
        """Return what the name of a result adds, so that it is not taken for one of all data, without a warning."""
        return part + (WARNED if page(section).warnings else "")

    for section in report.perplexity:
        part = "" if section.is_of_whole_text else f", {section.windows:,} window{'s' * (section.windows > 1)}"
        marked = mark(section, perplexity_page, part)
        data, path = section.data, Path(section.data.name)
        is_file = data.column is None or path.suffix.lower() in BUILDERS  # and no dataset of the Hub, OWNER/NAME
        dataset = {"dataset_config": data.config, "dataset_split": data.split}
        for each in section.backends:
            if each.label == label and each.perplexity is not None:
                name, shown = f"perplexity, context {section.context:,}{marked}", path.name if is_file else data.name
                yield result(shown, "perplexity", name, round(each.perplexity, 4), **dataset)
    for tasks in report.tasks:
        part = "" if tasks.limit is None else f", first {tasks.limit:,} sample{'s' * (tasks.limit > 1)}"
        marked = mark(tasks, task_page, part)
        for task in tasks.tasks:
            for metric in task.metrics:
                value = next((each.value for each in metric.values if each.label == label), None)
                if value is not None:
                    name = f"{metric.title}, {task.num_fewshot}-shot{marked}"
                    yield result(task.name, metric.name, name, round(value, 6))


def _reduced(report: Report, label: str) -> Report:
    """Return the report of one backend and its references."""
    groups = backend_groups(report)
    own = [each for group in groups for each in group if each.label == label]
    kept = {label, *(group[0].label for group in groups), *(each.reference for each in own)}
    others = {each.label for group in groups for each in group} - kept

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
    attention = label.partition(" #")[0]  # of a name that was given twice
    is_named = attention.removeprefix(DMA).removeprefix(":").partition("+")[0] in ("", *PRESETS)
    origins = distinct_origins(report)
    content = {
        "name": name,
        "base": base,
        "config": config,
        "attention": attention if is_named else DMA,
        "arguments": "" if is_named else repr(section).replace(": inf", ": float('inf')"),
        "json": json.dumps({DMA: section}, indent=2),
        "model": origins[0].model,
        "origins": [
            (each, measured(each.model), f"{machine(each.environment)}; {versions(each.environment)}")
            for each in origins
        ],
        "pages": section_pages(report),
        "warned": WARNED.removeprefix(", "),
    }
    return tidy(templates().get_template("card.md").render(content))
