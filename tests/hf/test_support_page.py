"""docs/support.md lists the installed Transformers' architectures, and no fewer run than before."""

from __future__ import annotations

import pytest
import transformers
from hf_architectures import Architecture, architectures
from hf_outcomes import FAILS, FALLBACK, REFUSED, UPSTREAM, WORKS, Outcome, Record
from hf_page import KIND_TITLES, OF_CACHES, PAGE, cells_of, cells_on, key_of, page

WORKING_AT_LEAST = {"decoder": 153, "encoder-decoder": 30, "multimodal": 74, "encoder": 28, "tower": 96}
"""Architectures with only equal cells, by kind. Fewer is a regression."""

PACKED_DECODERS_AT_LEAST = {"packed cache": 135, "generate_batch": 91, "packed pages": 88}
"""Decoders with an equal cell, by column. Transformers' own `generate_batch` fails for half of them."""

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_lists_every_architecture():
    if f"Transformers {transformers.__version__} " not in TEXT:
        pytest.skip("the page is about another version of Transformers")
    for kind, table in zip(KIND_TITLES, TEXT.split("## ")[1:], strict=True):
        expected = {each.model_type for each in architectures() if each.kind == kind}
        assert {line.split("`")[1] for line in table.splitlines() if line.startswith(("| `", "- `"))} == expected


def test_no_fewer_architectures_work_than_before():
    assert FAILS not in TEXT
    for kind, least in WORKING_AT_LEAST.items():
        rows = [cells for (title, _), cells in cells_on(TEXT).items() if title == KIND_TITLES[kind]]
        statuses = [{cell for name, cell in cells.items() if cell and name not in OF_CACHES} for cells in rows]
        assert sum("yes" in found <= {"yes", "upstream"} for found in statuses) >= least
        if kind == "decoder":
            for name, packed in PACKED_DECODERS_AT_LEAST.items():
                assert sum(cells[name] == "yes" for cells in rows) >= packed


def test_a_written_page_is_read_back():
    first, second = (Architecture(name, f"{name.title()}Model", "decoder") for name in ("first", "second"))
    features = {
        "forward": Outcome(WORKS),
        "padded batch": Outcome(FALLBACK, "does not support position_bias: a | b"),
        "static cache": Outcome(UPSTREAM, "ValueError: <no>"),
        "generate": Outcome(REFUSED, "KeyError: 'dma_mxfp'"),
    }
    records = [Record(first, features=features), Record(second, skipped="no inputs:\nValueError: pixel | values")]
    written = page(records, "1.2.3")
    cells = cells_on(written)
    assert list(cells) == [key_of(records[0])]
    assert {name: cell for name, cell in cells[key_of(records[0])].items() if cell} == cells_of(records[0])
    assert "- `second`: no inputs: ValueError: pixel / values" in written
    assert "| Causal language models | 2 | 1 | 0 | 1 | 1 |" in written
