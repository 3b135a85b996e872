"""Reports: the results of a run put together, and as Markdown. The file format is in ``results.py``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from . import environment
from .models import LoadedModel
from .results import BackendResult, Generation, ModelInfo, PerplexitySection, Report

MEMORY_KINDS = {
    "cuda_allocated": "GPU memory allocated by PyTorch, summed over GPUs",
    "process_rss": "resident memory of the process, sampled every 5 ms",
}
HEADERS = ("backend", "perplexity", "change", "KL / token", "top-1", "tokens/s", "peak memory")
MISSING = "–"


def make_report(
    loaded: LoadedModel,
    sections: list[PerplexitySection],
    *,
    command: str,
    seed: int,
    generations: list[Generation] | None = None,
) -> Report:
    """Put a run's results together with what they depend on: model, versions, device, command line, seed, date."""
    return Report(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        seed=seed,
        environment=environment.collect(),
        model=describe_model(loaded),
        perplexity=sections,
        generations=generations or [],
    )


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
    ]


def warnings(section: PerplexitySection) -> list[str]:
    """What a reader must not miss: failed backends, and passes that ran with other attention."""
    lines = [f"{result.label} failed: {result.failure}" for result in section.backends if result.failure is not None]
    for result in section.backends:
        for reason, count in result.fallbacks.items():
            lines.append(f"{result.label} fell back to other attention {count} times: {reason}")
    return lines


def to_markdown(report: Report, plots: Sequence[tuple[str, str]] = ()) -> str:
    """The report as Markdown.

    Args:
        report: The results.
        plots: Caption and relative path of each plot.
    """
    parts = [f"# Attention backends on {Path(report.model.name).name}\n"]
    for section in report.perplexity:
        parts.append(f"## Perplexity at context {section.context:,}\n")
        parts.append(_table(HEADERS, [table_row(result) for result in section.backends]))
        parts += [f"> **Warning**: {line}\n" for line in warnings(section)]
        parts.append("\n".join(f"- {line}" for line in protocol_lines(section)) + "\n")
    parts += [f"![{caption}]({path})\n" for caption, path in plots]
    parts += _configurations(report)
    if report.generations:
        parts.append("## Greedy continuations with the KV cache\n")
        parts.append(f"Prompt, its end: {_quote(report.generations[0].prompt_end)}\n")
        for generation in report.generations:
            parts.append(
                f"**{generation.label}**, {generation.same_tokens} of {len(generation.tokens)} tokens as the first:\n\n"
                f"{_quote(generation.continuation)}\n"
            )
    parts.append("## Model and machine\n")
    parts.append(_table(("", ""), _facts(report)))
    return "\n".join(parts)


def _configurations(report: Report) -> list[str]:
    configs = {result.label: result.config for section in report.perplexity for result in section.backends}
    shown = {label: config for label, config in configs.items() if config is not None}
    if not shown:
        return []
    names = list(dict.fromkeys(name for config in shown.values() for name in config))
    rows = [[f"`{name}`", *(_plain(config.get(name)) for config in shown.values())] for name in names]
    return ["## Configurations\n", _table(["field", *shown], rows)]


def _facts(report: Report) -> list[list[str]]:
    model, machine = report.model, report.environment
    heads = f"{model.query_heads} query heads, {model.kv_heads} kv heads, head_dim {model.head_dim}"
    revision = f" at `{model.commit or model.revision}`" if model.commit or model.revision else ""
    return [
        ["model", f"`{model.name}`{revision}"],
        ["architecture", f"{model.architecture}, {model.parameters:,} parameters, {model.layers} layers, {heads}"],
        ["dtype, device", f"{model.dtype}, {model.device}"],
        ["machine", ", ".join([machine.cpu, f"{machine.threads} threads", *machine.gpus])],
        ["versions", ", ".join(f"{name} {version}" for name, version in machine.packages.items())],
        ["Python, system", f"{machine.python}, {machine.system}"],
        ["command", f"`{report.command}`"],
        ["seed, date", f"{report.seed}, {report.created}"],
    ]


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.strip().splitlines())


def _plain(value: object) -> str:
    return MISSING if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _format(value: float | None, template: str) -> str:
    return MISSING if value is None else template.format(value)
