"""Write the tables of measured times in README.md and in docs from the results in benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dma_eval.pages import MISSING, number
from dma_eval.render import table

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
PREFILL_SHAPE = ("length", "batch", "head_dim", "query_heads", "kv_heads", "is_causal")
DECODE_SHAPE = ("batch", "length", "head_dim", "query_heads", "kv_heads")
USUAL_HEADS, USUAL_DIM = (32, 8), 128
CACHES = ("kv8", "kv4")
DECODE_FILES = ("decode-h200.json", "decode-wide-h200.json")
FLASH_3_FP8 = "fa3:fp8"
STEPS = {"sdpa": "SDPA", "fa3": "FA3", FLASH_3_FP8: "FA3 FP8"}
FLASH_3 = "fa3"
PREFILL_FILE = "prefill-h200.json"
REAL_FILES = ("prefill-real-32k-h100.json", "prefill-real-8kx4-h100.json")
GENERATE_FILE = "generate-h200.json"
SERVE_FILES = ("serve-h200.json", "serve-packed-h200.json", "serve-long-h200.json", "serve-many-h200.json")
BALANCED = "dma_mxfp:balanced"

Result = dict[str, Any]
ByShape = dict[tuple[Any, ...], dict[str, Result]]
"""The results of each shape by their label."""


def read(*names: str, key: str = "results") -> list[Result]:
    """Return a list of all files, one after the other."""
    return [each for name in names for each in json.loads((BENCHMARKS / name).read_text(encoding="utf-8"))[key]]


def by_shape(results: list[Result], names: tuple[str, ...]) -> ByShape:
    """Return the results of each shape, which is named by its values of ``names``."""
    shapes: ByShape = {}
    for result in results:
        shapes.setdefault(tuple(result["shape"][name] for name in names), {})[result["label"]] = result
    return shapes


def departures(head_dim: int, q_heads: int, kv_heads: int) -> list[str]:
    """Return what of a shape differs from the page's usual one."""
    parts = [f"head_dim {head_dim}"] if head_dim != USUAL_DIM else []
    return parts if (q_heads, kv_heads) == USUAL_HEADS else [*parts, f"{q_heads}/{kv_heads} heads"]


def describe_prefill(length: int, batch: int, head_dim: int, q_heads: int, kv_heads: int, is_causal: bool) -> str:
    """Return how a row names its call: the length, and what differs from the page's usual one."""
    size = f"{length // 1024}K" if batch == 1 else f"{batch} x {length // 1024}K"
    parts = [size, *departures(head_dim, q_heads, kv_heads)]
    return ", ".join(parts if is_causal else [*parts, "bidirectional"])


def describe_decode(batch: int, length: int, head_dim: int, q_heads: int, kv_heads: int) -> str:
    """Return how a row names its step: sequences and keys, and what differs from the page's usual one."""
    return ", ".join([f"{batch} x {length // 1024}K", *departures(head_dim, q_heads, kv_heads)])


def prefill_table(*, is_short: bool = False) -> str:
    """Return a row for each shape: the usual ones, then those that depart from them, each by length.

    Args:
        is_short: Leave columns out.
    """
    headers = ["", "`balanced`, ms", "over SDPA", "over FlashAttention-3", "each alone"]
    headers += ["over its FP8", "not counting its casts", "error of its FP8, `balanced`", "under key outliers"]
    if not is_short:
        headers += [
            "TFLOP/s",
            "over SageAttention",
            "its errors",
            "`paper`, `fp4` over FlashAttention-3",
            "extra memory",
        ]
    rows = []

    def order(item: tuple[tuple[Any, ...], object]) -> tuple[Any, ...]:
        length, batch, head_dim, q_heads, kv_heads, is_causal = item[0]
        return batch, head_dim != USUAL_DIM, head_dim, (q_heads, kv_heads) != USUAL_HEADS, not is_causal, length

    for shape, named in sorted(by_shape(read(PREFILL_FILE), PREFILL_SHAPE).items(), key=order):
        # All of a shape as CUDA graphs, if all could be, or all as calls: those hide their launches.
        is_graph = all(each["graph_milliseconds"] for each in named.values() if each["failure"] is None)
        times = {label: each["graph_milliseconds" if is_graph else "milliseconds"] for label, each in named.items()}
        casts = named[FLASH_3_FP8]["quantize_milliseconds"]
        times["attention alone"] = times[FLASH_3_FP8] - casts
        ours = named[BALANCED]

        def over(other: str, label: str = BALANCED, times: dict[str, float | None] = times) -> str:
            mine, theirs = times[label], times[other]
            return MISSING if mine is None or theirs is None else f"{theirs / mine:.2f}x"

        def errors(*labels: str, field: str = "error", named: dict[str, Result] = named) -> str:
            return ", ".join(number(named[label][field], ".3f") for label in labels)

        row = [describe_prefill(*shape), f"{times[BALANCED]:.{3 if times[BALANCED] < 10 else 1}f}"]
        alone = {label: each["sustained_milliseconds"] for label, each in named.items()}
        row += [over("sdpa"), over(FLASH_3), over(FLASH_3, times=alone), over(FLASH_3_FP8), over("attention alone")]
        row += [errors(FLASH_3_FP8, BALANCED), errors(FLASH_3_FP8, BALANCED, field="error_with_outliers")]
        if not is_short:
            row += [f"{ours['tflops'] * ours['milliseconds'] / times[BALANCED]:.0f}", over("sage")]
            row += [f"{errors('sage')}, {errors('sage', field='error_with_outliers')}"]
            row += [", ".join(over(FLASH_3, f"dma_mxfp:{preset}") for preset in ("paper", "fp4"))]
            row += [f"{ours['extra_bytes'] / ours['input_bytes']:.2f}"]
        rows.append(row)
    return table(headers, rows)


def real_table() -> str:
    """Return a row for each implementation: its speed over FlashAttention-3 on a model's own inputs."""
    shapes = by_shape(read(*REAL_FILES), PREFILL_SHAPE)
    columns = [describe_prefill(*shape).replace(f", {shape[3]}/{shape[4]} heads", "") for shape in shapes]
    labels = list(dict.fromkeys(label for named in shapes.values() for label in named))

    def cell(named: dict[str, Result], label: str) -> str:
        result, base = named.get(label), named[FLASH_3]
        if result is None or result["failure"] is not None:
            return MISSING
        ratios = (base[key] / result[key] for key in ("milliseconds", "sustained_milliseconds"))
        skipped = "" if result["skipped_share"] is None else f", {100 * result['skipped_share']:.0f} %"
        return "{:.2f}x, {:.2f}x".format(*ratios) + skipped

    rows = []
    for label in labels:
        errors = [named[label]["error"] for named in shapes.values() if label in named]
        row = [describe_implementation(label), *(cell(named, label) for named in shapes.values())]
        rows.append([*row, number(errors[0], ".4f")])
    return table(["over FlashAttention-3", *columns, "error"], rows)


def describe_implementation(label: str) -> str:
    """Return the name of an implementation of ``bench prefill``; ``dma_mxfp:t6`` is a file with a threshold alone."""
    _, _, setting = label.partition("dma_mxfp:")
    threshold = re.fullmatch(r"t(\d+)", setting)
    if threshold:
        return f"`balanced`, `skip_threshold = {threshold[1]}`"
    return "`balanced`, nothing skipped" if setting == "off" else f"`{setting or label}`"


def device_time(result: Result | None) -> float | None:
    """Return the milliseconds of a call: as a CUDA graph, without the host's work, where that was measured."""
    if result is None:
        return None
    time: float | None = result["graph_milliseconds"] or result["milliseconds"]
    return time


def times_faster(named: dict[str, Result], ours: str, other: str) -> str:
    """Return how many times faster than ``other`` a call is."""
    mine, theirs = device_time(named.get(ours)), device_time(named.get(other))
    if mine is None or theirs is None:
        return MISSING
    ratio = theirs / mine
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def decode_table() -> str:
    """Return a row for each shape: times of a step, those of the others over ours, and what the caches take."""
    headers = ["sequences x keys", *(f"{name}, us" for name in STEPS.values())]
    for cache in CACHES:
        headers += [f"`{cache}`, us", f"{', '.join(STEPS.values())} over it", "of 16 bit"]
    rows = []
    for shape, named in sorted(
        by_shape(read(*DECODE_FILES), DECODE_SHAPE).items(), key=lambda item: (item[0][2], item[0])
    ):
        row = [describe_decode(*shape), *(_microseconds(named[label]) for label in STEPS)]
        for cache in CACHES:
            label = f"dma_mxfp:{cache}"
            ratios = ", ".join(times_faster(named, label, other) for other in STEPS)
            row += [_microseconds(named[label]), ratios, f"{named[label]['bytes_ratio']:.2f}"]
        rows.append(row)
    return table(headers, rows)


def decode_summary() -> str:
    """Return the README's table: the speed of caches over SDPA on one of 16 bits."""
    shapes = by_shape(read(*DECODE_FILES), DECODE_SHAPE)
    sizes = [(1, 8192), (1, 32768), (1, 131072), (8, 32768), (64, 4096)]
    named = {size: shapes[*size, USUAL_DIM, *USUAL_HEADS] for size in sizes}
    headers = ["over SDPA", *(f"{batch} x {length // 1024}K" for batch, length in sizes), "bytes at 1 x 128K"]
    labels = {f"dma_mxfp:{cache}": f"`{cache}`" for cache in CACHES} | {FLASH_3_FP8: "FlashAttention-3, FP8 cache"}
    rows = [
        [
            name,
            *(times_faster(each, label, "sdpa") for each in named.values()),
            f"{named[1, 131072][label]['bytes_ratio']:.2f} of 16 bit",
        ]
        for label, name in labels.items()
    ]
    return table(headers, rows)


def generate_table() -> str:
    """Return a row for each run: its times, and what the cache takes."""
    headers = ["attention and cache", "tokens of the prompt", "first token", "a step", "over the first", "the cache"]
    rows = []
    for result in read(GENERATE_FILE):
        row = [f"`{result['label']}`", f"{result['context']:,}", number(result["first_token_seconds"], ".3f", " s")]
        row += [number(result["step_milliseconds"], ".2f", " ms"), number(result["speedup"], ".2f", "x")]
        rows.append([*row, number(result["cache_bytes"] / 2**30, ".2f", " GiB")])
    return table(headers, rows)


def serve_table(*, is_short: bool = False) -> str:
    """Return a row for each set of requests and backend; of what several files have, that of the last one.

    Args:
        is_short: Leave columns out, and sets of packed pages alone.
    """
    headers = ["requests x tokens", "backend", "new tokens/s", "over the first"]
    headers += ["first token, median (99 %)", "between tokens"]
    if not is_short:
        headers += ["layers", "pages", "most at once", "a token, a request takes"]
    found = {}
    for name in SERVE_FILES:
        report = json.loads((BENCHMARKS / name).read_text(encoding="utf-8"))
        found |= {(each["requests"], each["label"]): (report, each) for each in report["results"]}
    unpacked = {requests for requests, label in found if "+" not in label}
    first: dict[str, float | None] = {}
    rows = []
    for (requests, label), (report, result) in found.items():
        if is_short and requests not in unpacked:
            continue
        count, _, lengths = requests.partition("x")
        speed = result["tokens_per_second"]
        reference = first.setdefault(requests, speed)
        row = [f"{count} x ({lengths.replace('+', ' + ')})", describe_pages(label), number(speed, ",.0f")]
        row.append(number(speed and reference and speed / reference, ".2f", "x"))
        for what, form, unit in (
            ("first_token_seconds", ".2f", " s"),
            ("between_tokens_milliseconds", ".1f", " ms"),
        ):
            median, high = (number(result[what + end], form, unit) for end in ("", "_p99"))
            row.append(f"{median} ({high})")
        token, request = result["cache_bytes_per_token"], result["cache_bytes_per_request"]
        sizes = [number(token and token / 1024, ".1f", " KiB")]
        sizes += [number(request / 2**20, ".1f", " MiB")] if request else []
        more = [
            str(report["layers"]),
            f"{report['cache_gib']:g} GiB",
            number(result["most_at_once"], ".0f"),
            ", ".join(sizes),
        ]
        rows.append(row if is_short else [*row, *more])
    return table(headers, rows)


def describe_pages(label: str) -> str:
    """Return the name of a backend of ``bench serve``: its attention, and what its pages hold."""
    attention, _, pages = label.partition("+")
    return "SDPA" if attention == "sdpa" else f"`{attention.partition(':')[2] or 'balanced'}`, {pages or '16 bits'}"


def _microseconds(result: Result) -> str:
    time = device_time(result)
    return number(None if time is None else 1e3 * time, ".0f")


BLOCKS: dict[str, dict[str, Callable[[], str]]] = {}
"""By page and mark what stands between ``<!-- mark -->`` and ``<!-- end -->``."""


def updated(page: str) -> str:
    """Return the text of a page with its tables made anew.

    Raises:
        ValueError: The page has not one pair of each mark.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    for mark, make in BLOCKS[page].items():
        start, end = f"<!-- {mark} -->", "<!-- end -->"
        block = f"{start}\n\n{make()}\n{end}"
        pattern = re.compile(rf"{re.escape(start)}\n.*?{re.escape(end)}", re.DOTALL)
        text, count = pattern.subn(lambda _, block=block: block, text)
        if count != 1:
            raise ValueError(f"{page} must have the marks {start} and {end} once")
    return text


def main() -> None:
    """Write the pages."""
    for page in BLOCKS:
        (ROOT / page).write_text(updated(page), encoding="utf-8")


if __name__ == "__main__":
    main()
