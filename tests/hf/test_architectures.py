"""Every architecture of the installed Transformers: ``dma_mxfp`` that quantizes nothing equals its own attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from hf_architectures import architectures
from hf_outcomes import examine
from hf_page import cells_of, cells_on, key_of

PAGE = Path(__file__).parents[2] / "docs" / "support.md"


@pytest.fixture(scope="module")
def page_cells():
    """What docs/support.md says; nothing if it is about another version of Transformers."""
    text = PAGE.read_text(encoding="utf-8")
    return cells_on(text) if f"Transformers {transformers.__version__} " in text else {}


@pytest.mark.parametrize("architecture", architectures(), ids=lambda each: f"{each.kind}-{each.model_type}")
def test_equals_transformers_own_attention(architecture, page_cells):
    """In every feature that its kind has, or refuses with an error that says why; docs/support.md says which."""
    with torch.no_grad():
        record = examine(architecture)
    assert record.failures == {}
    if page_cells:
        on_page = {name: cell for name, cell in page_cells.get(key_of(record), {}).items() if cell}
        assert {name: on_page.get(name) for name in cells_of(record)} == cells_of(record), (
            f"docs/support.md is out of date: python scripts/support_table.py ({record.skipped})"
        )
        assert bool(record.skipped) == (not on_page), record.skipped
    if record.skipped:
        pytest.skip(record.skipped)
