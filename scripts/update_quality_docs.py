"""Write the tables of quality in the pages from the results under benchmarks.

    python scripts/update_quality_docs.py

takes the results that are there. New runs are taken over with

    python scripts/update_quality_docs.py --run OUT

where ``OUT`` has a folder for each of those in ``benchmarks/quality``, and in it the runs that it is put together from.
``--replace OUT`` keeps what is there, and replaces only the backends that the runs measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import isclose
from pathlib import Path
from statistics import fmean
from typing import Any

from dma_eval.bench.results import DecodeReport, DecodeResult
from dma_eval.pages import MISSING, format_kl
from dma_eval.render import table
from dma_eval.results import BackendResult, PerplexitySection, Report, read_report, read_results
from dma_eval.run_folder import merge, write_run

ROOT = Path(__file__).resolve().parents[1]
QUALITY = ROOT / "benchmarks" / "quality"
SHORT, LONG, EQUALIZED = "smollm2-4096-fp32", "smollm2-8192-fp32", "smollm2-equalized-4096-fp32"
"""All backends and twins on short windows; fewer on long ones; and after the model was equalised."""
VARIANTS = "smollm2-4096-variants-fp32"
"""Variants of ``balanced`` on the short windows and all twins."""
CPU = "smollm2-4096-cpu-fp32"
"""What ``SHORT`` lacks, or has as failed: its PyTorch makes NaN of numbers that E4M3 does not hold; this saturates."""
FAR = "smollm2-32768-yarn-fp32"
"""Presets over four times the positions that the model was trained for."""
NEEDLES = ("smollm2-needles-bf16", "smollm2-needles-caches-bf16")
"""Which needles presets find, and which caches."""
SKIPPING = ROOT / "benchmarks" / "skipping"
RULES = {
    "high": "high maximum",
    "running": "running maximum",
    "length": "threshold + log(position / 8,192)",
    "rows": "high maximum, row by row",
}
"""What the rules of ``measure_skipping.py`` are called."""
DECODE = ROOT / "benchmarks" / "decode-h200.json"
PEERS = ROOT / "benchmarks" / "decode-peers-h200.json"
DECODE_SHAPE = {"batch": 1, "length": 32768, "query_heads": 32, "kv_heads": 8, "head_dim": 128}
PREFIX = "dma_mxfp:"
TWINS = ("keys x 32", "key biases", "values x 32")
"""Twins that the README shows."""
FAILED = "failed"
NAMES = {
    "sdpa": "SDPA",
    "sim_sage": "SageAttention 1 (simulated)",
    "sim_fa3_fp8": "FlashAttention-3 in FP8 (simulated)",
    "sim_fp8_cache": "FP8, one scale (simulated)",
    "sdpa+fp8": "FP8, Transformers",
    **{f"sdpa+hqq{bits}": f"HQQ, {bits} bits" for bits in (8, 4, 2)},
    **{f"sdpa+quanto{bits}": f"quanto, {bits} bits" for bits in (4, 2)},
    "dma_mxfp:block": "`balanced`, scales of blocks",
    "dma_mxfp:pv16": "`balanced`, 16-bit P·V",
    "dma_mxfp:mxfp8": '`low = "mxfp8"`, not rotated',
    "dma_mxfp:unrotated": "`balanced`, not rotated",
    "dma_mxfp:block-unrotated": "`balanced`, scales of blocks, not rotated",
    "dma_mxfp:paper-no-sink": "`paper` without a sink",
}
PROMPTS = ("sdpa", "dma_mxfp:balanced", "dma_mxfp:fp4", "dma_mxfp:paper", "sim_sage", "sim_fa3_fp8")
"""What reads a prompt at once, in the order of the README's first table."""
CACHES = {
    "dma_mxfp:kv8+cache": "dma_mxfp:kv8",
    "dma_mxfp:kv4+cache": "dma_mxfp:kv4",
    "sim_fp8_cache": "fa3:fp8",
    "sdpa+fp8": "sdpa+fp8",
    "sdpa+hqq8": "sdpa+hqq8",
    "sdpa+hqq4": "sdpa+hqq4",
    "sdpa+hqq2": "sdpa+hqq2",
    "sdpa+quanto4": "sdpa+quanto4",
    "sdpa+quanto2": "sdpa+quanto2",
}
"""Caches, and what their step is called in the results on decoding."""


def readme_tables() -> str:
    """What reads prompts, and caches: on the text and on twins, with bytes and speed of a step."""
    short, long = _short(), read_report(QUALITY / LONG).perplexity[0]
    first, base, longest = short["as it is"], long.backends[0], {each.label: each for each in long.backends}
    headers = [
        "",
        f"perplexity at {_context(SHORT)}",
        f"at {long.context:,}",
        "KL per token",
        *(f"KL, {name}" for name in TWINS),
    ]

    def row(label: str) -> list[str]:
        if label == base.label:
            return [_name(label), f"{first[label].perplexity:.3f}", f"{base.perplexity:.3f}", "", *[""] * len(TWINS)]
        changes = [_change(results[label]) if label in results else MISSING for results in (first, longest)]
        return [_name(label), *changes, *_kls([short[name] for name in ("as it is", *TWINS)], label)]

    prompts = table(headers, [row(label) for label in PROMPTS])
    caches = table(
        [*headers, "bytes, of 16 bit", "step at 32K"],
        [[*row(label), *_step(step)] for label, step in CACHES.items()],
    )
    return f"{prompts}\n{caches}"


def _context(name: str) -> str:
    """Tokens of a window of a run on twins."""
    return next(f"{twin.tokens.context:,}" for twin in read_report(QUALITY / name).stress[0].twins if twin.tokens)


def _short() -> dict[str, dict[str, BackendResult]]:
    """The results on short windows, with those of the other machine that are not there or failed there."""
    twins = _twins(SHORT)
    for name, others in _twins(CPU).items():
        usable = {label: each for label, each in twins[name].items() if not each.failure}
        twins[name] = twins[name] | others | usable
    return twins


def _twins(name: str) -> dict[str, dict[str, BackendResult]]:
    """The results of a run on each twin, by the names of both."""
    (stress,) = read_report(QUALITY / name).stress
    return {
        twin.name: {backend.label: backend for backend in twin.tokens.backends}
        for twin in stress.twins
        if twin.tokens is not None
    }


def _step(label: str) -> tuple[str, str]:
    """Bytes of a cache over those of 16 bits, and the speed of its step over SDPA on a preallocated one."""
    found: dict[str, DecodeResult] = {}
    for result in read_results(DecodeReport, PEERS if label.startswith("sdpa+") else DECODE).results:
        if all(getattr(result.shape, name) == value for name, value in DECODE_SHAPE.items()):
            found[result.label] = result
    if label not in found or found[label].milliseconds is None:
        return MISSING, MISSING
    ours, base = ((each.graph_milliseconds or each.milliseconds or 0) for each in (found[label], found["sdpa"]))
    ratio = found[label].bytes_ratio
    return MISSING if ratio is None else f"{ratio:.2f}", f"{base / ours:.2f}x"


def run_tables() -> str:
    """The tables of docs/guides/evaluation.md: every twin, longer windows, far positions and needles."""
    short, long, (far,) = _short(), read_report(QUALITY / LONG), read_report(QUALITY / FAR).perplexity
    balanced = f"{PREFIX}balanced"
    forms = {name: {balanced: short[name][balanced]} | twin for name, twin in _twins(VARIANTS).items()}
    columns = {f"{long.perplexity[0].context:,}": {each.label: each for each in long.perplexity[0].backends}}
    columns |= {f"{_context(LONG)}, {name}": results for name, results in _twins(LONG).items()}
    columns |= {f"{_context(EQUALIZED)}, equalized, {name}": results for name, results in _twins(EQUALIZED).items()}
    plot = QUALITY / SHORT / "stress.png"
    return "\n".join(
        [
            f"KL per token on twins, windows of {_context(SHORT)} tokens:\n\n{_kl(short)}",
            f"On longer windows, and after `equalize`:\n\n{_kl(columns)}",
            f"Forms of `balanced`, on the same twins:\n\n{_kl(forms)}",
            f"![Twins](../../{plot.relative_to(ROOT)})\n",
            f"At {far.context:,} tokens, by position:\n\n{_by_position(far)}",
            f"Needles found, by length of the prompt:\n\n{_needles()}",
        ]
    )


def _by_position(section: PerplexitySection) -> str:
    """Change of perplexity, and KL per token in each quarter of the positions."""
    edges = section.position_edges
    share = (len(edges) - 1) // 4
    quarters = [slice(begin, begin + share) for begin in range(0, 4 * share, share)]
    names = [f"KL, {edges[quarter.start]:,} to {edges[quarter.stop] - 1:,}" for quarter in quarters]
    rows = []
    for backend in section.backends[1:]:
        kls = [fmean(kl for kl in backend.position_kl[quarter] if kl is not None) for quarter in quarters]
        rows.append([_name(backend.label), _change(backend), *map(format_kl, kls)])
    return table(["", "perplexity", *names], rows)


def _needles() -> str:
    """Answers found of those asked for; the reference stands once for each set of questions."""
    sections = [section for name in NEEDLES for section in read_report(QUALITY / name).retrieval]
    rows: list[list[str]] = []
    for section in sections:
        for backend in section.backends:
            cells = [[cell for cell in backend.cells if cell.length == length] for length in section.lengths]
            found = [f"{sum(cell.correct for cell in row)}/{sum(cell.samples for cell in row)}" for row in cells]
            of = " (questions of the caches)" if rows and backend is section.backends[0] else ""
            rows.append([f"{_name(backend.label)}{of}", *found])
    return table(["", *(f"{length:,}" for length in sections[0].lengths)], rows)


def _kl(columns: Mapping[str, Mapping[str, BackendResult]]) -> str:
    """KL per token of every backend, in one column for each set of results."""
    found = dict.fromkeys(label for column in columns.values() for label in column if label != "sdpa")
    labels = [label for label in dict.fromkeys([*PROMPTS, *CACHES, *NAMES, *found]) if label in found]
    return table(("", *columns), [[_name(label), *_kls(columns.values(), label)] for label in labels])


def _kls(columns: Iterable[Mapping[str, BackendResult]], label: str) -> list[str]:
    """KL per token of a backend in each set of results."""
    found = [column.get(label) for column in columns]
    return [MISSING if each is None else FAILED if each.failure else format_kl(each.kl_mean) for each in found]


def skipping_tables() -> str:
    """The tables of docs/concepts/skipping.md: thresholds, twins, lost mass, other rules and estimates."""
    results = [each for path in sorted(SKIPPING.glob("*.json")) for each in json.loads(path.read_text())["results"]]
    lengths = sorted({each["length"] for each in results})

    def found(**fields: Any) -> list[dict[str, Any]]:
        return [each for each in results if all(each[name] == value for name, value in fields.items())]

    def cells(rows: Iterable[Mapping[str, Any]], show: Callable[[Mapping[str, Any]], str]) -> list[str]:
        """One cell a length."""
        shown = {row["length"]: show(row) for row in rows}
        return [shown.get(length, MISSING) for length in lengths]

    def skipped_and_kl(row: Mapping[str, Any]) -> str:
        return f"{100 * row['skipped']:.0f} %, {format_kl(row['kl'])}"

    def lost(row: Mapping[str, Any]) -> str:
        return f"{row['lost_mean']:.1e}, {row['lost_p999']:.1e}"

    def thresholds(**fields: Any) -> list[float | None]:
        values = {each["threshold"] for each in found(**fields)}
        return sorted(values, key=lambda t: -math.inf if t is None else -t)

    headers = ["threshold", *(f"{length:,}" for length in lengths)]
    plain = {"twin": "as it is", "kind": "high"}
    parts = []
    for preset in ("balanced", "fp4"):
        rows = [
            ["off" if t is None else f"{t:g}", *cells(found(preset=preset, threshold=t, **plain), skipped_and_kl)]
            for t in thresholds(preset=preset, **plain)
        ]
        parts.append(f"`{preset}`: share of low tiles skipped, and KL per token:\n\n{table(headers, rows)}")
    rows = [
        [f"{t:g}", *cells(found(preset="balanced", threshold=t, **plain), lost)]
        for t in thresholds(preset="balanced", **plain)
        if t is not None
    ]
    parts.append(f"`balanced`: probability lost by a row, mean and 99.9th percentile:\n\n{table(headers, rows)}")
    for preset in ("balanced", "fp4"):
        own = {"preset": preset, "kind": "high"}
        tried = thresholds(**own)
        names = dict.fromkeys((each["length"], each["twin"]) for each in found(**own))
        rows = []
        for length, twin in sorted(names, key=lambda name: name[0]):
            by_threshold = {each["threshold"]: each for each in found(length=length, twin=twin, **own)}
            kls = [format_kl(by_threshold[t]["kl"]) if t in by_threshold else MISSING for t in tried]
            rows.append([f"{length:,}, {twin}", *kls])
        header = ["", *("off" if t is None else f"t = {t:g}" for t in tried)]
        parts.append(f"`{preset}` on twins: KL per token:\n\n{table(header, rows)}")
    rows = [
        [
            f"{RULES[kind]}, {t:g}",
            *cells(found(preset="balanced", kind=kind, threshold=t, twin="as it is"), skipped_and_kl),
        ]
        for kind in RULES
        for t in thresholds(preset="balanced", kind=kind, twin="as it is")
        if t is not None
    ]
    rules = table(["rule, threshold", *headers[1:]], rows)
    parts.append(f"`balanced` under other rules: share of low tiles skipped, and KL per token:\n\n{rules}")
    kinds = [kind for kind in dict.fromkeys(each["kind"] for each in results) if kind not in RULES]
    estimates = [
        [kind, *(f"t = {each['threshold']:g}: {skipped_and_kl(each)}" for each in found(kind=kind))] for kind in kinds
    ]
    width = max((len(row) for row in estimates), default=1)
    parts.append(
        "`balanced`, unchanged model, tiles skipped by an estimate before the product of queries and keys:\n\n"
        + table(["estimate", *[""] * (width - 1)], [row + [MISSING] * (width - len(row)) for row in estimates])
    )
    return "\n".join(parts)


BLOCKS: dict[str, tuple[str, Callable[[], str]]] = {}
"""By page: the mark of its block, ``<!-- mark -->`` to ``<!-- end mark -->``, and what stands there."""


def updated(page: str) -> str:
    """The text of a page with its tables made anew.

    Raises:
        ValueError: The page has not one pair of marks.
    """
    mark, make = BLOCKS[page]
    pattern = re.compile(rf"(?<=<!-- {mark} -->\n).*?(?=<!-- end {mark} -->)", re.DOTALL)
    block = f"\n{make()}\n"
    text, count = pattern.subn(lambda _: block, (ROOT / page).read_text(encoding="utf-8"))
    if count != 1:
        raise ValueError(f"{page} must have the marks <!-- {mark} --> and <!-- end {mark} --> once")
    return text


def take_over(run: Path) -> None:
    """Put the pieces in each folder below ``run`` together in the folder of that name in ``QUALITY``."""
    for folder in sorted(path for path in run.iterdir() if path.is_dir()):
        pieces = [_shortened(read_report(path)) for path in sorted(folder.rglob("results.json"))]
        shutil.rmtree(QUALITY / folder.name, ignore_errors=True)
        write_run(merge(pieces), QUALITY / folder.name)


def replace_backends(run: Path) -> None:
    """Replace the backends that the runs below ``run`` measured again, in the folders of the same names.

    Raises:
        ValueError: A run has no such twin or windows, or its reference gives another perplexity.
    """
    for folder in sorted(path for path in run.iterdir() if path.is_dir()):
        new = merge([_shortened(read_report(path)) for path in sorted(folder.rglob("results.json"))])
        report = read_report(QUALITY / folder.name / "results.json")
        perplexity = list(report.perplexity)
        for section in new.perplexity:
            index = [each.context for each in perplexity].index(section.context)
            perplexity[index] = _with_backends(perplexity[index], section)
        twins = {twin.name: twin for twin in report.stress[0].twins} if report.stress else {}
        for twin in (twin for section in new.stress for twin in section.twins):
            if twin.tokens is not None and twin.name in twins:
                old = twins[twin.name]
                assert old.tokens is not None
                twins[twin.name] = replace(old, tokens=_with_backends(old.tokens, twin.tokens))
        stress = [replace(section, twins=list(twins.values())) for section in report.stress]
        command = " && ".join(dict.fromkeys((report.command, new.command)))
        write_run(replace(report, perplexity=perplexity, stress=stress, command=command), QUALITY / folder.name)


def _with_backends(section: PerplexitySection, new: PerplexitySection) -> PerplexitySection:
    """A section with the backends of another on the same windows in place of its own of the same labels."""
    first, again = section.backends[0].nll, new.backends[0].nll
    if (section.context, section.windows) != (new.context, new.windows) or not isclose(first, again, rel_tol=1e-5):
        raise ValueError(f"the runs read other windows: {section.windows} x {section.context}, {first} against {again}")
    found = {each.label: each for each in new.backends[1:]}
    return replace(section, backends=[found.get(each.label, each) for each in section.backends])


def _shortened(report: Report) -> Report:
    """A report without the folders of the machine that made it, and the speeds of pieces that shared it."""
    model = replace(report.model, name=Path(report.model.name).name)
    return replace(
        report,
        model=model,
        command=re.sub(r"(?<= )/\S*/", "", report.command),
        part_seconds={},
        perplexity=[_untimed(section) for section in report.perplexity],
        stress=[
            replace(
                section,
                twins=[replace(twin, tokens=twin.tokens and _untimed(twin.tokens)) for twin in section.twins],
            )
            for section in report.stress
        ],
    )


def _untimed(section: PerplexitySection) -> PerplexitySection:
    backends = [replace(each, tokens_per_second=None, peak_memory_bytes=None) for each in section.backends]
    return replace(section, backends=backends)


def _name(label: str) -> str:
    return NAMES.get(label) or f"`{label.removeprefix(PREFIX)}`"


def _change(result: BackendResult) -> str:
    change = result.change_percent
    return FAILED if change is None else f"{change:+.1f} %" if abs(change) >= 10 else f"{change:+.2f} %"


def main() -> None:
    """Take a run over, if one is given, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a folder of folders of runs")
    parser.add_argument("--replace", type=Path, help="likewise, of backends that were measured again")
    arguments = parser.parse_args()
    if arguments.run is not None:
        take_over(arguments.run)
    if arguments.replace is not None:
        replace_backends(arguments.replace)
    for page in BLOCKS:
        (ROOT / page).write_text(updated(page), encoding="utf-8")


if __name__ == "__main__":
    main()
