"""Statistics, on arrays small enough to work out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dma_eval.load.backends import Backend
from dma_eval.load.data import Window
from dma_eval.measures.perplexity import Pass, TokenScores, position_edges, summarize, tokens_per_second
from hypothesis import given
from hypothesis import strategies as st

WINDOWS = [Window(0, 4, 1), Window(2, 6, 2)]  # positions 1, 2, 3 and 2, 3 are scored


def measured(label, nll, kl=None):
    """A backend's passes, one for each window."""
    kl = kl or [[0.0] * len(row) for row in nll]
    passes = []
    for index, (n, k) in enumerate(zip(nll, kl, strict=True)):
        scores = TokenScores(np.array(n, np.float32), np.array(k, np.float32), np.array(k) < 0.5)
        passes.append(Pass([scores], 4, [9.0, 2.0][index], is_first=index == 0, peak_memory=2 ** (30 - index)))
    return label, passes


def results(*backends, windows=WINDOWS, context=4):
    batches = list(zip(*(passes for _, passes in backends), strict=True))
    return summarize([Backend(label, label) for label, _ in backends], batches, windows, context)


@pytest.fixture
def reference():
    return measured("sdpa", [[1.0, 2.0, 3.0], [4.0, 5.0]])


@pytest.fixture
def other():
    return measured("other", [[1.5, 2.0, 3.5], [4.0, 6.0]], [[0.25, 0.0, 1.0], [0.5, 0.75]])


class TestSummarize:
    def test_by_hand(self, reference, other):
        """Differences .5, 0, .5, 0, 1: mean .4, variance (.01 + .16 + .01 + .16 + .36) / 5 = .14."""
        first, second = results(reference, other)
        assert (first.nll, first.perplexity) == pytest.approx((3, math.exp(3)))
        assert (first.change_percent, first.change_stderr, first.kl_mean, first.top1_agreement) == (0, 0, 0, 1)
        assert (first.window_nll, first.peak_memory_bytes, first.tokens_per_second) == ([2, 4.5], 2**30, 2)
        assert second.change_percent == pytest.approx(100 * (math.exp(0.4) - 1))
        assert second.change_stderr == pytest.approx(100 * math.exp(0.4) * math.sqrt(0.14 / 5))
        assert (second.kl_mean, second.kl_max, second.top1_agreement) == (0.5, 1.0, pytest.approx(2 / 5))
        assert second.kl_p99 == pytest.approx(0.75 + 0.96 * 0.25)
        assert second.position_nll == [None, 1.5, 3.0, 4.75]
        assert second.position_kl == [None, 0.25, 0.25, 0.875]

    def test_positions_share_buckets(self):
        """130 positions need buckets of 4; the first holds three scored tokens, the last two."""
        section = measured("sdpa", [[float(position) for position in range(1, 130)]])
        (result,) = results(section, windows=[Window(0, 130, 1)], context=130)
        assert result.position_nll == [2.0, *(first + 1.5 for first in range(4, 128, 4)), 128.5]

    def test_failed_backend(self, reference, other):
        other[1][0].failure = "it broke"
        first, second = results(reference, other)
        assert first.perplexity is not None
        assert (second.failure, second.perplexity, second.kl_mean, second.position_nll) == ("it broke", None, None, [])

    def test_failed_reference(self, reference, other):
        reference[1][1].failure = "it broke"
        found = results(reference, other)[1]
        assert found.perplexity == pytest.approx(math.exp(3.4))
        assert (found.change_percent, found.change_stderr, found.kl_p99, found.position_kl) == (None, None, None, [])

    def test_perplexity_beyond_a_float(self, reference):
        result = results(reference, measured("bad", [[1e4] * 3, [1e4] * 2]))[1]
        assert result.nll == 1e4
        assert (result.perplexity, result.change_percent, result.change_stderr) == (None, None, None)


@pytest.mark.parametrize(
    ("firsts", "tokens", "seconds", "expected"),
    [("1", [10], [2.0], 5), ("10", [10, 30], [9.0, 3.0], 10), ("110", [10, 10, 30], [9.0, 9.0, 3.0], 10)],
)
def test_throughput_leaves_first_passes_out(firsts, tokens, seconds, expected):
    passes = [
        Pass(tokens=n, seconds=s, is_first=first == "1") for first, n, s in zip(firsts, tokens, seconds, strict=True)
    ]
    assert tokens_per_second(passes) == expected


@pytest.mark.parametrize(("context", "expected"), [(3, [0, 1, 2, 3]), (64, [*range(65)]), (65, [*range(0, 65, 2), 65])])
def test_position_edges(context, expected):
    assert position_edges(context) == expected


@given(st.integers(2, 200_000))
def test_position_edges_cover_the_context(context):
    edges = position_edges(context)
    widths = np.diff(edges)
    assert (edges[0], edges[-1]) == (0, context)
    assert len(widths) <= 64
    assert (widths[:-1] == widths[0]).all()
    assert 0 < widths[-1] <= widths[0]
