"""In every architecture of the installed Transformers, unquantized ``dma_mxfp`` equals its own attention."""

from __future__ import annotations

import pytest
import torch
import transformers
from hf_architectures import architectures
from hf_outcomes import examine
from hf_page import PAGE, cells_of, cells_on, key_of, sample
from sampling import sampled

TEXT = PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page_cells():
    """The cells of docs/support.md; empty if it is for another version of Transformers."""
    return cells_on(TEXT) if f"Transformers {transformers.__version__} " in TEXT else {}


@pytest.mark.parametrize(
    "architecture", sampled(architectures(), sample(TEXT)), ids=lambda each: f"{each.kind}-{each.model_type}"
)
def test_every_feature_equals_transformers_own_attention_or_is_rejected(architecture, page_cells):
    """The result agrees with docs/support.md; the error of a rejected feature says why."""
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
