"""``scripts/measure_recipes.py``: valid recipes, and one report of both contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dma_eval.results import read_report
from script_files import load_script

from dma_hf import DMAConfig


@pytest.fixture
def script() -> Any:
    return load_script("measure_recipes")


def test_recipes_differ(script: Any) -> None:
    configs = [DMAConfig().with_changes(**fields) for fields in script.RECIPES.values()]
    assert len(set(configs)) == len(configs)


def test_makes_one_report(
    script: Any, model_folder: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ("mxfp4-everywhere", "mxint8-row-band-smooth")
    monkeypatch.setattr(script, "RECIPES", {name: script.RECIPES[name] for name in kept})
    monkeypatch.setattr(script, "WINDOWS", {256: 1, 128: 2})
    arguments = ["--model", model_folder, "--data", text_file, "--out", tmp_path, "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["x", *map(str, arguments)])
    script.main()
    report = read_report(tmp_path / "results.json")
    assert [(section.context, section.windows) for section in report.perplexity] == [(256, 1), (128, 2)]
    labels = ["sdpa", *(f"dma_mxfp:{name}" for name in kept)]
    assert [backend.label for backend in report.perplexity[0].backends] == labels
    assert report.perplexity[0].backends[1].failure is None
    assert (tmp_path / "report.md").is_file()


def test_stops_where_it_fails(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--model", "none.gguf", "--data", "none.txt", "--out", tmp_path]
    monkeypatch.setattr("sys.argv", ["x", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2
