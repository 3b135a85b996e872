"""The tables of quality in the pages are those of the committed results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dma_eval.results import read_report
from dma_eval.run_folder import write_run
from script_files import load_script

ROOT = Path(__file__).parents[2]
QUALITY = ROOT / "benchmarks/quality"


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("update_quality_docs")


def test_results_name_no_machine(script: Any) -> None:
    for path in (ROOT / "benchmarks/quality").rglob("*.json"):
        report = read_report(path)
        assert not Path(report.model.name).is_absolute()
        assert " /" not in report.command, path


def test_takes_a_run_over(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces become what is committed, with reports and plots."""
    pieces = tmp_path / "pieces"
    for name in (script.SHORT, script.LONG, script.EQUALIZED):
        (pieces / name / "one").mkdir(parents=True)
        (pieces / name / "one/results.json").write_bytes((QUALITY / name / "results.json").read_bytes())
    monkeypatch.setattr(script, "QUALITY", tmp_path)
    script.take_over(pieces)
    for name in (script.SHORT, script.LONG, script.EQUALIZED):
        assert read_report(tmp_path / name / "results.json") == read_report(QUALITY / name / "results.json")
        assert (tmp_path / name / "report.md").read_text(encoding="utf-8") == (QUALITY / name / "report.md").read_text(
            encoding="utf-8"
        )


def test_replaces_only_the_backends_that_were_measured_again(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    label, name = "dma_mxfp:kv4+cache", script.EQUALIZED
    old = read_report(QUALITY / name)
    section = old.stress[0]
    twin = section.twins[0]
    reference, measured = twin.tokens.backends[0], next(each for each in twin.tokens.backends if each.label == label)
    again = replace(twin, tokens=replace(twin.tokens, backends=[reference, replace(measured, kl_mean=0.5)]))
    write_run(replace(old, stress=[replace(section, twins=[again])]), tmp_path / "runs" / name)
    write_run(old, tmp_path / name)
    monkeypatch.setattr(script, "QUALITY", tmp_path)
    script.replace_backends(tmp_path / "runs")
    new = read_report(tmp_path / name).stress[0].twins
    assert {each.label: each.kl_mean for each in new[0].tokens.backends}[label] == 0.5
    kept = [each for each in twin.tokens.backends if each.label != label]
    assert [each for each in new[0].tokens.backends if each.label != label] == kept
    assert new[1:] == section.twins[1:]
