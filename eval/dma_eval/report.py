"""Reports: the results of a run put together, and how they read. The file format is in ``results.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dma_kernels.numerics.formats import TILE

from . import environment
from .backends import CACHE_SUFFIX
from .models import LoadedModel
from .results import BackendResult, FidelitySection, Generation, ModelInfo, PerplexitySection, Report
from .sections import RetrievalBackend, RetrievalSection, TaskBackend, TaskSection

MEMORY_KINDS = {
    "cuda_allocated": "GPU memory allocated by PyTorch, summed over GPUs",
    "process_rss": "resident memory of the process, sampled every 5 ms",
}
HEADERS = ("backend", "perplexity", "change", "KL / token", "top-1", "tokens/s", "peak memory")
MISSING = "–"


def make_report(
    loaded: LoadedModel,
    sections: Sequence[PerplexitySection] = (),
    *,
    command: str,
    seed: int,
    generations: Sequence[Generation] = (),
    tasks: Sequence[TaskSection] = (),
    fidelity: Sequence[FidelitySection] = (),
    retrieval: Sequence[RetrievalSection] = (),
    part_seconds: Mapping[str, float] | None = None,
) -> Report:
    """Put a run's results together with what they depend on: model, versions, device, command line, seed, date."""
    return Report(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        seed=seed,
        environment=environment.collect(),
        model=describe_model(loaded),
        perplexity=list(sections),
        generations=list(generations),
        tasks=list(tasks),
        fidelity=list(fidelity),
        retrieval=list(retrieval),
        part_seconds=dict(part_seconds or {}),
    )


def backend_configs(report: Report) -> dict[str, dict[str, Any]]:
    """The configuration of every ``dma_mxfp`` backend in a report, by label."""
    sections: list[Sequence[BackendResult | TaskBackend | RetrievalBackend]] = [
        *(section.backends for section in report.perplexity),
        *(section.backends for section in report.tasks),
        *(section.tokens.backends for section in report.fidelity),
        *(section.backends for section in report.retrieval),
    ]
    return {backend.label: backend.config for group in sections for backend in group if backend.config is not None}


def describe_model(loaded: LoadedModel) -> ModelInfo:
    """Facts about the model that its configuration and its weights tell."""
    model = loaded.model
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    head_dim = getattr(config, "head_dim", None) or (hidden // heads if hidden and heads else None)
    return ModelInfo(
        name=loaded.name,
        revision=loaded.revision,
        commit=getattr(model.config, "_commit_hash", None),
        architecture=type(model).__name__,
        parameters=model.num_parameters(),
        layers=getattr(config, "num_hidden_layers", None),
        query_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        max_context=loaded.max_context,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        device_map=loaded.device_map,
    )


def table_row(result: BackendResult) -> list[str]:
    """One row of the comparison, under ``HEADERS``."""
    if result.failure is not None:
        return [result.label, "failed", *[MISSING] * (len(HEADERS) - 2)]
    return [
        result.label,
        _format(result.perplexity, "{:,.3f}"),
        MISSING if result.change_percent is None else f"{result.change_percent:+.2f} % ± {result.change_stderr:.2f}",
        format_kl(result.kl_mean),
        MISSING if result.top1_agreement is None else f"{100 * result.top1_agreement:.2f} %",
        _format(result.tokens_per_second, "{:,.0f}"),
        format_bytes(result.peak_memory_bytes),
    ]


def format_kl(value: float | None) -> str:
    """A divergence with five decimals, or two digits where it is smaller than those show."""
    if value is None:
        return MISSING
    return f"{value:.5f}" if value == 0 or abs(value) >= 1e-4 else f"{value:.1e}"


def format_bytes(value: int | None) -> str:
    """Bytes in MiB or GiB."""
    if value is None:
        return MISSING
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def protocol_lines(section: PerplexitySection) -> list[str]:
    """How a section was measured, as sentences for people."""
    data = section.data
    origin = ", ".join(
        [f"`{data.name}`", *(f"{key} `{value}`" for key in ("config", "split") if (value := getattr(data, key)))]
    )
    overlap = "non-overlapping" if section.stride == section.context else f"stride {section.stride:,}"
    return [
        f"Text: {origin}, {data.tokens:,} tokens.",
        f"{section.windows} window{'' if section.windows == 1 else 's'} of {section.context:,} tokens ({overlap}), "
        f"{section.tokens_scored:,} tokens "
        f"predicted by every backend; batch size {section.batch_size}.",
        f"Change, KL and top-1 are against `{section.backends[0].label}`, token by token; "
        "± is one standard error of the change over tokens.",
        f"Peak memory: {MEMORY_KINDS[section.memory_kind]}.",
        *cache_lines(result.label for result in section.backends),
    ]


def cache_lines(labels: Iterable[str]) -> list[str]:
    """What a reader must know of backends that read through a cache, if there are some."""
    if not any(label.endswith(CACHE_SUFFIX) for label in labels):
        return []
    return [
        f"`{CACHE_SUFFIX}`: everything is read through a packed `DMACache`, {TILE} tokens at a time, so that what is "
        "scored is what the cache stores. Times and memory are those of such small steps."
    ]


def warnings(section: PerplexitySection) -> list[str]:
    """What a reader must not miss: failed backends, and passes that ran with other attention."""
    lines = [f"{result.label} failed: {result.failure}" for result in section.backends if result.failure is not None]
    for result in section.backends:
        for reason, count in result.fallbacks.items():
            lines.append(f"{result.label} fell back to other attention {count} times: {reason}")
    return lines


def _format(value: float | None, template: str) -> str:
    return MISSING if value is None else template.format(value)
