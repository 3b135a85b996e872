"""Texts, and the windows that they are read in."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from dma_eval.config import PerplexityPart
from dma_eval.errors import UserError
from dma_eval.load.data import Tokens, Window, leading_tokens, load_text, make_windows
from dma_eval.load.models import load_model
from hypothesis import given
from hypothesis import strategies as st

ROWS = ["First row.", "Second row.", "Dritte Zeile: ä."]


@pytest.fixture
def rows_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"content": text, "number": i, "maybe": text if i else None}) for i, text in enumerate(ROWS)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


class TestLoadText:
    def test_plain_file(self, tmp_path):
        """A byte order mark is no text."""
        path = tmp_path / "book.txt"
        path.write_text("Ein Wort – ä\n\nmore\n", encoding="utf-8-sig")
        text = load_text(str(path))
        assert text.content == "Ein Wort – ä\n\nmore\n"
        assert text.sha256 == hashlib.sha256(text.content.encode()).hexdigest()
        assert (text.name, text.config, text.split, text.column) == (str(path), None, None, None)
        with pytest.raises(UserError, match=r"--column: .*book.txt is plain text, which has no columns"):
            load_text(str(path), column="content")

    def test_json_lines(self, rows_file, capfd):
        text = load_text(str(rows_file), column="content")
        assert text.content == "First row.\n\nSecond row.\n\nDritte Zeile: ä."
        assert (text.name, text.split, text.column) == (str(rows_file), "train", "content")
        assert capfd.readouterr() == ("", ""), "no progress bars"

    def test_the_case_of_a_suffix_does_not_matter(self, rows_file):
        upper = rows_file.rename(rows_file.with_suffix(".JSONL"))
        assert load_text(str(upper), column="content").content.startswith("First row.\n\nSecond")
        with pytest.raises(UserError, match=r"no such file: missing\.TXT"):
            load_text("missing.TXT")

    def test_a_name_is_no_pattern(self, rows_file):
        strange = rows_file.rename(rows_file.with_name("rows [1]*.jsonl"))
        assert load_text(str(strange), column="content").content.startswith("First row.")

    def test_csv(self, tmp_path):
        path = tmp_path / "rows.csv"
        path.write_text('text\n"a, b"\nc\n', encoding="utf-8")
        assert load_text(str(path)).content == "a, b\n\nc"

    @pytest.mark.parametrize(
        ("column", "message"),
        [
            ("text", r"has no column 'text'; it has: content, number, maybe"),
            ("number", r"column 'number' of .* holds int, not text in row 0"),
            ("maybe", r"column 'maybe' of .* holds nothing in row 0"),
        ],
    )
    def test_column_without_text(self, rows_file, column, message):
        with pytest.raises(UserError, match=message):
            load_text(str(rows_file), column=column)


def test_full_windows_begin_with_bos():
    assert Tokens(torch.arange(10), ["<s>"]).windows(3, 4).tolist() == [[0, 1, 2, 3], [0, 4, 5, 6], [0, 7, 8, 9]]
    assert Tokens(torch.arange(10), []).windows(2, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_tokens_that_the_tokenizer_adds(loaded, bos_model):
    ids = loaded.tokenize("the sea").ids
    assert ids.tolist() == loaded.tokenizer("the sea").input_ids
    assert leading_tokens(loaded.tokenizer) == []
    assert leading_tokens(load_model(str(bos_model), device="cpu").tokenizer) == [0]


@st.composite
def cuts(draw):
    context = draw(st.integers(2, 40))
    return draw(st.integers(context, 200)), context, draw(st.integers(1, context))


class TestWindows:
    def test_without_overlap(self):
        assert make_windows(10, 4, PerplexityPart()) == [Window(0, 4, 1), Window(4, 8, 1), Window(8, 10, 1)]

    def test_with_stride(self):
        assert make_windows(10, 6, PerplexityPart(stride=2)) == [Window(0, 6, 1), Window(2, 8, 4), Window(4, 10, 4)]

    def test_last_token_alone_cannot_be_predicted(self):
        assert make_windows(9, 4, PerplexityPart())[-1] == Window(4, 8, 1)

    @pytest.mark.parametrize(
        ("tokens", "options", "chosen"),
        [
            (100, {"skip_windows": 2}, range(2, 10)),
            (100, {"max_windows": 3, "skip_windows": 2}, (2, 3, 4)),
            (100, {"max_windows": 4, "spread": True}, (0, 3, 6, 9)),
            (100, {"max_windows": 3, "skip_windows": 1, "spread": True}, (1, 5, 9)),
            (100, {"max_windows": 1, "spread": True}, (0,)),
            (100, {"max_windows": 50, "spread": True}, range(10)),
            (107, {"max_windows": 4, "spread": True}, (0, 3, 6, 9)),  # none of 7 tokens
        ],
    )
    def test_skip_and_spread(self, tokens, options, chosen):
        every = make_windows(tokens, 10, PerplexityPart())
        assert make_windows(tokens, 10, PerplexityPart(**options)) == [every[index] for index in chosen]

    @given(cuts())
    def test_overlapping_windows_score_every_token_once(self, cut):
        """Of adjoining windows, the first token of each has nothing before it; of overlapping ones, only the text's."""
        tokens, context, stride = cut
        windows = make_windows(tokens, context, PerplexityPart(stride=stride))
        assert all(window.begin == index * stride for index, window in enumerate(windows))
        assert all(window.end == min(window.begin + context, tokens) for window in windows)
        scored = [token for window in windows for token in range(window.begin + window.first, window.end)]
        starts = {0} if stride < context else set(range(0, tokens, context))
        assert scored == [token for token in range(tokens) if token not in starts]
        assert len(scored) == sum(window.scored for window in windows)

    def test_after_bos(self):
        """As many tokens are read as without it, and the first of the text is predicted from it."""
        assert make_windows(10, 4, PerplexityPart(), 1) == [Window(1, 4, 1, 1), Window(4, 7, 1, 1), Window(7, 10, 1, 1)]
        assert make_windows(8, 4, PerplexityPart(), 1)[-1] == Window(7, 8, 1, 1)  # a token alone can be predicted
        with_stride = [Window(1, 6, 1, 1), Window(3, 8, 4, 1), Window(5, 10, 4, 1)]
        assert make_windows(10, 6, PerplexityPart(stride=2), 1) == with_stride
        assert make_windows(10, 4, PerplexityPart(stride=4), 1) == make_windows(10, 4, PerplexityPart(), 1)
        assert Window(4, 7, 1, 1).of(torch.arange(10)).tolist() == [0, 4, 5, 6]
        assert make_windows(10, 5, PerplexityPart(), 2)[1] == Window(5, 8, 2, 2)
        with pytest.raises(UserError, match="--context must be at least 3 tokens, got 2"):
            make_windows(10, 2, PerplexityPart(), 2)

    @given(cuts(), st.integers(1, 3))
    def test_after_bos_every_token_is_scored_once(self, cut, prefix):
        tokens, context, stride = cut
        windows = make_windows(tokens + prefix, context + prefix, PerplexityPart(stride=stride), prefix)
        read = [window.of(torch.arange(tokens + prefix)).tolist() for window in windows]
        assert all(row[:prefix] == list(range(prefix)) and len(row) <= context + prefix for row in read)
        scored = [token for row, window in zip(read, windows, strict=True) for token in row[window.first :]]
        assert scored == list(range(prefix, tokens + prefix))

    @pytest.mark.parametrize(
        ("tokens", "context", "options", "message"),
        [
            (100, 1, {}, "--context must be at least 2 tokens, got 1"),
            (100, 10, {"stride": 0}, "--stride must be from 1 to the context, 10, got 0"),
            (100, 10, {"stride": 11}, "--stride must be from 1 to the context, 10, got 11"),
            (100, 10, {"stride": 5, "skip_windows": 30}, "--skip-windows: the text has 19 windows of 10; 30 are skip"),
            (100, 10, {"spread": True}, "--spread needs --max-windows"),
            (9, 10, {}, "the text has 9 tokens, too few for one window of 10"),
        ],
    )
    def test_out_of_range(self, tokens, context, options, message):
        with pytest.raises(UserError, match=message):
            make_windows(tokens, context, PerplexityPart(**options))


def test_a_text_may_have_no_token_that_the_tokenizer_knows(loaded):
    """The measures say how many tokens they need."""

    class Silent:
        def __call__(self, text, **options):
            return {"input_ids": []}

        def convert_ids_to_tokens(self, ids):
            return ids

    tokens = replace(loaded, tokenizer=Silent()).tokenize("text")
    assert (tokens.ids.dtype, tokens.ids.shape, tokens.begins_with) == (torch.int64, (0,), [])
