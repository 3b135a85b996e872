"""Write the tables of quality in README.md and docs/evaluation.md from the results under benchmarks/quality.

    python scripts/update_quality_docs.py

takes the results that are there. A new run of ``scripts/measure_quality.py`` is taken over with

    python scripts/update_quality_docs.py --run OUT

which makes its report and its model card again in ``benchmarks/quality`` first, without the answers to single samples.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

from dma_eval.card import make_card
from dma_eval.markdown import table
from dma_eval.pages import MISSING, fidelity_page, format_kl, task_page
from dma_eval.results import BackendResult, PerplexitySection, Report
from dma_eval.run_folder import read_run, write_run
from dma_eval.task_summary import accuracy

ROOT = Path(__file__).resolve().parents[1]
QUALITY = ROOT / "benchmarks" / "quality"
RUN = QUALITY / "smollm2-135m-bf16"
BASE_MODEL, LICENSE = "HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"
PREFIX = "dma_mxfp:"


def perplexity_table() -> str:
    """The README's table: every preset in fp32 at both contexts."""
    short, long = (_sections(QUALITY / f"smollm2-{context}-fp32.json")[context] for context in (2048, 8192))
    headers = ("", "perplexity at 8,192", "KL per token", "top-1", "perplexity at 2,048")
    rows = []
    for index, backend in enumerate(long.backends):
        other = short.backends[index]
        assert backend.label == other.label
        if index == 0:
            rows.append(["SDPA", f"{backend.perplexity:.3f}", "", "", f"{other.perplexity:.3f}"])
        else:
            agreement = f"{100 * (backend.top1_agreement or 0):.1f} %"
            rows.append([_name(backend.label), _change(backend), format_kl(backend.kl_mean), agreement, _change(other)])
    return table(headers, rows)


def run_tables() -> str:
    """The tables of docs/evaluation.md: a summary of the run, and the accuracy in every task."""
    report = read_run(RUN)
    parts = [table(*_summary(report))]
    for section in report.tasks:
        labels = [backend.label for backend in section.backends]
        rows = []
        for task in section.tasks:
            metric = accuracy(task)
            if metric is None:
                continue
            values = {value.label: value for value in metric.values}
            row = [f"{task.name.removeprefix('local_')}, {task.samples:,}"]
            for label in labels:
                value = values[label]
                text = MISSING if value.value is None else f"{100 * value.value:.2f} %"
                if value.difference is not None and value.low is not None and value.high is not None:
                    star = "" if value.low <= 0 <= value.high else "*"
                    text = f"{100 * value.difference:+.2f} [{100 * value.low:+.2f}, {100 * value.high:+.2f}]{star}"
                row.append(text)
            rows.append(row)
        parts.append(table(("accuracy, samples", *map(_name, labels)), rows))
    for fidelity in report.fidelity:
        page = fidelity_page(fidelity)
        parts += [f"{each.caption}:\n\n{table(each.headers, each.rows)}" for each in page.tables[2:]]
    plots = [name for name in ("tasks.png", "heads.png") if (RUN / name).is_file()]
    parts += [f"![{name.removesuffix('.png').capitalize()}](../{(RUN / name).relative_to(ROOT)})\n" for name in plots]
    return "\n".join(parts)


BLOCKS = {"README.md": ("quality", perplexity_table), "docs/evaluation.md": ("quality run", run_tables)}
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
    """Make the report and the card of a run in ``RUN``."""
    report = read_run(run)
    for old in RUN.glob("*.png"):
        old.unlink()
    write_run(report, RUN)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "card.md"
        make_card(report, base_model=BASE_MODEL, license_name=LICENSE).save(path)
        (RUN / "card.md").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")


def _summary(report: Report) -> tuple[tuple[str, ...], list[list[str]]]:
    """Headers and rows of a table with one row for each backend."""
    contexts = {section.context: {each.label: each for each in section.backends} for section in report.perplexity}
    reference = report.perplexity[0].backends[0]
    headers = ["", *(f"perplexity at {context:,}" for context in contexts), "KL per token", "top-1"]
    longest = contexts[max(contexts)]
    summaries = {row[0]: row[1:] for section in report.tasks for row in task_page(section).tables[0].rows}
    if summaries:
        headers += ["mean accuracy", "points", "flips", "significant drops"]
    rows = []
    for label, backend in longest.items():
        if label == reference.label:
            row = [_name(label), *(f"{results[label].perplexity:.3f}" for results in contexts.values()), "", ""]
        else:
            changes = [
                f"{_change(results[label])} ± {results[label].change_stderr:.2f}" for results in contexts.values()
            ]
            agreement = f"{100 * (backend.top1_agreement or 0):.1f} %"
            row = [_name(label), *changes, format_kl(backend.kl_mean), agreement]
        rows.append(row + (summaries[label][:4] if summaries else []))
    return tuple(headers), rows


def _sections(path: Path) -> dict[int, PerplexitySection]:
    return {section.context: section for section in read_run(path).perplexity}


def _name(label: str) -> str:
    return f"`{label.removeprefix(PREFIX)}`" if label.startswith(PREFIX) else "SDPA"


def _change(result: BackendResult) -> str:
    change = result.change_percent
    return MISSING if change is None else f"{change:+.1f} %" if abs(change) >= 10 else f"{change:+.2f} %"


def main() -> None:
    """Take a run over, if one is given, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a folder that scripts/measure_quality.py wrote")
    arguments = parser.parse_args()
    if arguments.run is not None:
        take_over(arguments.run)
    for page in BLOCKS:
        (ROOT / page).write_text(updated(page), encoding="utf-8")


if __name__ == "__main__":
    main()
