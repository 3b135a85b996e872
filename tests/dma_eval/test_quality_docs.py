"""The tables of quality in the pages are those of the committed results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dma_eval.results import read_report
from script_files import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("update_quality_docs")


@pytest.mark.parametrize("page", ["README.md", "docs/evaluation.md"])
def test_page_shows_the_results(script: Any, page: str) -> None:
    assert script.updated(page) == (ROOT / page).read_text(encoding="utf-8")


def test_page_without_marks(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("nothing", encoding="utf-8")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    with pytest.raises(
        ValueError, match=r"README\.md must have the marks <!-- quality --> and <!-- end quality --> once"
    ):
        script.updated("README.md")


def test_results_name_no_machine(script: Any) -> None:
    for path in (ROOT / "benchmarks/quality").rglob("*.json"):
        report = read_report(path)
        assert not Path(report.model.name).is_absolute()
        assert " /" not in report.command, path


def test_takes_a_run_over(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report, plots and a card of the results alone."""
    target = tmp_path / "smollm2"
    source = script.RUN / "results.json"
    monkeypatch.setattr(script, "RUN", target)
    script.take_over(source)
    assert read_report(target / "results.json") == read_report(source)
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in (target / "card.md").read_text(encoding="utf-8")
    assert (target / "report.md").is_file()
