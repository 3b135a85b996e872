"""The figures of the pages: ``scripts/draw_figures.py`` draws all except one, whose page names its commit."""

from __future__ import annotations

import pytest
import typer
from PIL import Image
from script_files import load_script
from snippets import PAGES, ROOT

FIGURES = ROOT / "docs" / "figures"


@pytest.fixture(scope="module")
def script():
    return load_script("draw_figures")


def test_every_figure_has_a_name_and_is_shown(script):
    names = {path.stem for path in FIGURES.glob("*.png")}
    assert names == {*script.FIGURES, "skipping"}
    shown = "".join(page.read_text(encoding="utf-8") for page in (*PAGES, *(ROOT / "benchmarks").glob("*.md")))
    assert all(f"figures/{name}.png)" in shown for name in names)


def test_figures_are_drawn_at_the_size_of_the_committed_ones(script, tmp_path):
    names = ["rule", "formats", "transforms", "speed-loss", "prefill"]
    script.main(names, out=tmp_path / "new")
    for name in names:
        with Image.open(tmp_path / "new" / f"{name}.png") as drawn, Image.open(FIGURES / f"{name}.png") as committed:
            assert drawn.size == committed.size


def test_a_wrong_name_is_refused(script, tmp_path):
    message = "unknown figure 'chart'; valid: rule, formats, transforms, speed-loss, prefill$"
    with pytest.raises(typer.BadParameter, match=message):
        script.main(["chart"], out=tmp_path)
