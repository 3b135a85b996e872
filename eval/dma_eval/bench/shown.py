"""Tables and plots of speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from dma_eval.show.pages import MISSING, Columns, Table, make_table, number, of, share
from dma_eval.show.plots import WIDTH, legend_below, line_styles, make_figure, tidy

from .results import DecodeResult, GenerateReport, GenerateResult, PrefillResult, ServeResult, SpeedResult, UrlResult

PANEL_HEIGHT = 3.6  # inches
GIB = 1 << 30
Panel = Callable[[Axes], None]
WAITING: Columns = {
    "first": of("first_token_seconds", ".2f", " s"),
    "first 99 %": of("first_token_seconds_p99", ".2f", " s"),
    "between": of("between_tokens_milliseconds", ".1f", " ms"),
    "between 99 %": of("between_tokens_milliseconds_p99", ".1f", " ms"),
}
"""Columns of how long requests wait."""


def prefill_tables(results: Sequence[PrefillResult]) -> list[Table]:
    """Return a table for each family of shapes."""
    columns: Columns = {
        "implementation": lambda r: r.label,
        "tokens": lambda r: f"{r.shape.length:,}",
        "ms": of("milliseconds", ".3f"),
        "as graph": of("graph_milliseconds", ".3f"),
        "isolated": of("sustained_milliseconds", ".3f"),
        "quantizing": of("quantize_milliseconds", ".3f"),
        "TFLOP/s": lambda r: number(r.tflops, ",.0f" if (r.tflops or 0) >= 10 else ".3f"),
        "speed": of("speedup", ".2f", "x"),
        "error": of("error", ".4f"),
        "key outliers": of("error_with_outliers", ".4f"),
        "skipped": of("skipped_share", ".1f", " %", factor=100.0),
        "extra memory": lambda r: MISSING if r.extra_bytes is None else f"{r.extra_bytes / r.input_bytes:.2f} of QKV",
    }
    tables = []
    for family, members in _families(results).items():
        is_random = members[0].shape.inputs is None
        tables.append(make_table(columns, members, f"{family}, dense random inputs" if is_random else family))
    return tables


def decode_tables(results: Sequence[DecodeResult], copy_bytes_per_second: float | None) -> list[Table]:
    """Return a table for each family of shapes, with shares of the device's copy bandwidth if it was measured."""
    columns: Columns = {
        "cache": lambda r: r.label,
        "batch": lambda r: str(r.shape.batch),
        "keys": lambda r: f"{r.shape.length:,}",
        "us": of("milliseconds", ".1f", factor=1e3),
        "as graph": of("graph_milliseconds", ".1f", factor=1e3),
        "GB/s": of("bytes_per_second", ",.1f", factor=1e-9),
        "of copy": lambda r: share(
            r.bytes_per_second / copy_bytes_per_second if r.bytes_per_second and copy_bytes_per_second else None, ".0f"
        ),
        "of 16 bit": of("bytes_ratio", ".3f"),
        "speed": of("speedup", ".2f", "x"),
    }
    return [make_table(columns, members, family) for family, members in _families(results).items()]


def generate_tables(report: GenerateReport, title: str) -> list[Table]:
    """Return the table of all runs, and that of the longest contexts if they were looked for."""
    columns: Columns = {
        "run": lambda r: r.label,
        "context": lambda r: f"{r.context:,}",
        "first token": of("first_token_seconds", ".3f", " s"),
        "step": of("step_milliseconds", ".2f", " ms"),
        "graph steps": of("graph_steps", ".0f"),
        "tokens/s": of("tokens_per_second", ",.1f"),
        "speed": of("speedup", ".2f", "x"),
        "cache": of("cache_bytes", ",.2f", " GiB", factor=1 / GIB),
        "peak": of("peak_bytes", ",.2f", " GiB", factor=1 / GIB),
    }
    reached = Table(("run", "tokens"), [[each.label, f"{each.tokens:,}"] for each in report.longest], "Longest context")
    return [make_table(columns, report.results, title), *([reached] if report.longest else [])]


def serve_table(results: Sequence[ServeResult], title: str) -> Table:
    """Return the table of all runs."""
    columns: Columns = {
        "requests": lambda r: r.requests,
        "backend": lambda r: r.label,
        "tokens/s": of("tokens_per_second", ",.1f"),
        "speed": of("speedup", ".2f", "x"),
        **WAITING,
        "at once": of("most_at_once", ",.0f"),
        "evicted": of("evicted", ",.0f"),
        "per token": of("cache_bytes_per_token", ",.1f", " KiB", factor=1 / 1024),
        "per request": of("cache_bytes_per_request", ",.1f", " MiB", factor=1 / (1 << 20)),
    }
    return make_table(columns, results, title)


def url_table(results: Sequence[UrlResult], title: str) -> Table:
    """Return the table of all sets of requests and rates."""
    columns: Columns = {
        "requests": lambda r: r.requests,
        "rate": lambda r: "all at once" if r.rate is None else f"{r.rate:g}/s",
        "completed": lambda r: str(r.completed),
        "errors": lambda r: str(sum(r.errors.values())),
        "prompt tokens": lambda r: f"{r.prompt_tokens:,}",
        "new tokens": lambda r: f"{r.new_tokens:,}",
        "tokens/s": of("tokens_per_second", ",.1f"),
        **WAITING,
    }
    return Table(tuple(columns), [[cell(result) for cell in columns.values()] for result in results], title)


def place_of(result: Any) -> str:
    """Return what a result was measured on: its shape, context or set of requests."""
    if isinstance(result, GenerateResult):
        return f"{result.context:,} tokens"
    return result.requests if isinstance(result, ServeResult) else str(result.shape)


def failures(results: Sequence[SpeedResult]) -> list[str]:
    """Return what did not run, or cannot be a CUDA graph, and why, once for all shapes that share the reason."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        graph = getattr(result, "graph_failure", None)
        for what, reason in (("did not run", result.failure), ("cannot be a CUDA graph", graph)):
            if reason is not None:
                reasons.setdefault((result.label, what, reason), []).append(place_of(result))
    return [
        f"{label} {what}: {reason} ({places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''})"
        for (label, what, reason), places in reasons.items()
    ]


def plot_prefill(results: Sequence[PrefillResult], title: str, path: Path) -> None:
    """Draw the speed of every implementation over the length, a panel for each family of shapes of several lengths.

    If there is none, each family has a panel. Short calls are drawn as CUDA graphs: called from Python, some of them
    take as long as their launches.
    """
    every = _families(results)
    families = {name: of for name, of in every.items() if len({r.shape.length for r in of}) > 1} or every
    panels = {name.replace(", inputs of", "\ninputs of"): partial(_lines, results=of) for name, of in families.items()}
    columns = min(len(panels), 2)
    _draw(panels, title, path, columns=columns, height=PANEL_HEIGHT * -(-len(panels) // columns) + 0.6)


def plot_serve(results: Sequence[ServeResult], title: str, path: Path) -> None:
    """Draw what was measured of each set of requests as bars, one for each backend."""
    panels: dict[str, Panel] = {
        "New tokens per second": partial(_bars, results=results, field="tokens_per_second"),
        "Seconds to the first token": partial(_bars, results=results, field="first_token_seconds"),
        "Milliseconds between tokens": partial(_bars, results=results, field="between_tokens_milliseconds"),
        "Most requests at once": partial(_bars, results=results, field="most_at_once"),
    }
    _draw(panels, title, path, columns=len(panels), width=2 * WIDTH)


def _families(results: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the results of each family of shapes."""
    names = dict.fromkeys(r.shape.family for r in results)
    return {name: [r for r in results if r.shape.family == name] for name in names}


def _tflops(result: PrefillResult) -> float | None:
    """Return the TFLOP/s of a call: as a CUDA graph, where that was measured."""
    if result.tflops is None or result.milliseconds is None:
        return None
    return result.tflops * result.milliseconds / (result.graph_milliseconds or result.milliseconds)


def _draw(
    panels: Mapping[str, Panel], title: str, path: Path, *, columns: int, height: float = 4.2, width: float = WIDTH
) -> None:
    """Draw each panel below its heading, with one legend."""
    figure = make_figure(title, height, width)
    axes = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flatten()
    for ax, (heading, draw) in zip(axes, panels.items(), strict=False):
        draw(ax)
        ax.set_title(heading, fontsize=10)
        tidy(ax)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    legend_below(figure, axes[0])
    figure.savefig(path)


def _lines(ax: Axes, results: Sequence[PrefillResult]) -> None:
    """Draw a line for each implementation over the number of tokens."""
    for label, (color, line) in line_styles(r.label for r in results).items():
        points = sorted((r.shape.length, y) for r in results if r.label == label and (y := _tflops(r)) is not None)
        if points:
            ax.plot(*zip(*points, strict=True), line, color=color, marker="o", markersize=4, label=label)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sorted({r.shape.length for r in results}))
    tokens = FuncFormatter(lambda value, _: f"{value:.0f}" if round(value) % 1024 else f"{value / 1024:.0f}K")
    ax.xaxis.set_major_formatter(tokens)
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel("Tokens")
    ax.set_ylabel("TFLOP/s, quantization counted", fontsize=9)


def _bars(ax: Axes, results: Sequence[ServeResult], field: str) -> None:
    """Draw a bar for each backend on each set of requests."""
    sets, styles = list(dict.fromkeys(r.requests for r in results)), line_styles(r.label for r in results)
    width = 0.8 / len(styles)
    for index, (label, (color, _)) in enumerate(styles.items()):
        bars = {sets.index(r.requests): getattr(r, field) or 0 for r in results if r.label == label}
        places = [place + (index - (len(styles) - 1) / 2) * width for place in bars]
        ax.bar(places, list(bars.values()), width, color=color, label=label)
    ax.set_xticks(range(len(sets)), sets, fontsize=8)
