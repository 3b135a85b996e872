"""What is measured, against the same numbers computed in another way."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from dma_eval.errors import UserError
from dma_eval.load.backends import Backend
from dma_eval.load.data import Window
from dma_eval.measures import perplexity
from dma_eval.measures.perplexity import (
    NonFiniteLogitsError,
    Pass,
    TokenScores,
    make_batches,
    position_edges,
    score,
    summarize,
    tokens_per_second,
)
from dma_eval.results import read_report
from dma_eval.show.pages import perplexity_page
from hypothesis import given
from hypothesis import strategies as st
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


@torch.inference_mode()
def logits_of(loaded, ids, implementation="sdpa"):
    """Logits ``[T, V]`` in fp64."""
    loaded.model.set_attn_implementation(implementation)
    return loaded.model(input_ids=ids[None]).logits[0].double()


class TestPerplexity:
    @pytest.mark.parametrize(("context", "stride"), [(128, None), (128, 48)])
    def test_against_the_loop_of_the_guide(self, loaded, prose, compared, context, stride):
        """The loop of Transformers' perplexity guide, but each token counts the same, whatever window it is in."""
        section = compared("sdpa", context=context, stride=stride)
        ids = loaded.tokenize(prose).ids
        losses = []
        scored_to = 0
        for begin in range(0, len(ids), stride or context):
            end = min(begin + context, len(ids))
            log_probs = logits_of(loaded, ids[begin:end]).log_softmax(-1)
            for token in range(max(scored_to, begin + 1), end):
                losses.append(-log_probs[token - begin - 1, ids[token]].item())
            scored_to = end
            if end == len(ids):
                break
        result = section.backends[0]
        assert section.tokens_scored == len(losses)
        assert result.nll == pytest.approx(math.fsum(losses) / len(losses), rel=1e-6)
        assert result.perplexity == pytest.approx(math.exp(math.fsum(losses) / len(losses)), rel=1e-5)

    def test_divergence_and_agreement(self, loaded, prose, compared):
        section = compared("sdpa", "dma_mxfp:paper", context=128, max_windows=3)
        ids = loaded.tokenize(prose).ids[: 3 * 128].view(3, 128)
        ours = torch.cat([logits_of(loaded, row, "dma_mxfp")[:-1] for row in ids])
        theirs = torch.cat([logits_of(loaded, row)[:-1] for row in ids])
        p, q = (torch.distributions.Categorical(logits=logits) for logits in (theirs, ours))
        kl = torch.distributions.kl_divergence(p, q)
        same = ours.argmax(-1) == theirs.argmax(-1)
        result = section.backends[1]
        assert kl.mean() > 1e-4, "precision must show for this test to say anything"
        assert result.kl_mean == pytest.approx(kl.mean().item(), rel=1e-4)
        assert result.kl_max == pytest.approx(kl.max().item(), rel=1e-3)
        assert result.kl_p99 == pytest.approx(kl.quantile(0.99).item(), rel=1e-3)
        assert result.top1_agreement == pytest.approx(same.double().mean().item())
        assert not same.all()

    def test_batches_change_nothing(self, compared):
        """The last windows are shorter and form a batch of their own."""
        single, batched = (compared("sdpa", "dma_mxfp", context=128, stride=96, batch_size=n) for n in (1, 2))
        for one, two in zip(single.backends, batched.backends, strict=True):
            assert two.window_nll == pytest.approx(one.window_nll, rel=1e-5)
            assert two.kl_mean == pytest.approx(one.kl_mean, rel=1e-3, abs=1e-9)
            assert len(two.forward_seconds) < len(one.forward_seconds)

    @pytest.mark.parametrize("second", ["sdpa", "eager", "identity"])
    def test_what_computes_the_same(self, compared, identity_file, second):
        name = f"dma_mxfp:{identity_file}" if second == "identity" else second
        sdpa, same = compared("sdpa", name, context=256, max_windows=2).backends
        tolerance = 0 if second == "sdpa" else 1e-6
        assert same.window_nll == pytest.approx(sdpa.window_nll, rel=10 * tolerance)
        assert same.change_percent == pytest.approx(0, abs=1000 * tolerance)
        assert same.kl_mean == pytest.approx(0, abs=tolerance)
        if second == "sdpa":
            assert (same.change_stderr, same.kl_max, same.top1_agreement) == (0, 0, 1)

    def test_default_context_is_the_models(self, compared):
        assert compared("sdpa", max_windows=1).context == 512
        with pytest.raises(UserError, match="--context must be at least 2 tokens, got 0"):
            compared("sdpa", context=0)


class TestInterruption:
    """Ctrl-C in the third of four windows, in the second backend's pass."""

    @pytest.fixture
    def passes(self, monkeypatch):
        """The backends of all forward passes; the sixth is interrupted."""
        seen = []
        forward = perplexity._forward

        def counted(model, backend, *others):
            seen.append(backend.label)
            if len(seen) == 6:
                raise KeyboardInterrupt
            return forward(model, backend, *others)

        monkeypatch.setattr(perplexity, "_forward", counted)
        return seen

    def test_shows_and_writes_what_is_done(self, ppl, passes, tmp_path):
        result = ppl("--max-windows", 4, "--json", tmp_path / "r.json")
        assert result.exit_code == 130
        assert "dma_mxfp:balanced" in result.stdout
        assert "interrupted: these are the results of 2 of 4 windows" in result.stderr
        section = read_report(tmp_path / "r.json").perplexity[0]
        assert (section.windows, section.windows_left, section.tokens_scored) == (2, 2, 2 * 127)
        assert [len(backend.window_nll) for backend in section.backends] == [2, 2]

    def test_nothing_done(self, ppl, passes, tmp_path):
        passes += [""] * 4
        result = ppl("--json", tmp_path / "r.json")
        assert (result.exit_code, result.stderr) == (130, "Error: interrupted; use --out FOLDER to resume\n")

    def test_resumes_after_finished_windows(self, ppl, passes, tmp_path):
        ppl("--max-windows", 4, "--seed", 1, "--attn", "sdpa", "--json", tmp_path / "sdpa.json", code=0)
        passes.clear()
        out = ("--max-windows", 4, "--out", tmp_path / "run")
        assert ppl(*out).exit_code == 130
        passes.clear()
        passes += [""] * 6  # no interruption
        result = ppl(*out, code=0)
        assert passes[6:] == ["sdpa", "dma_mxfp:balanced"] * 2
        assert "2 of 4 windows: taken from the folder" in result.stderr
        section = read_report(tmp_path / "run/results.json").perplexity[0]
        assert (section.windows, section.windows_left) == (4, 0)
        timed = section.backends[0].forward_seconds[1::2]  # the first pass of each process is slow for that
        assert section.backends[0].tokens_per_second == pytest.approx(2 * 128 / sum(timed))
        assert section.backends[0].nll == read_report(tmp_path / "sdpa.json").perplexity[0].backends[0].nll
        assert "taken from the folder" in ppl(*out).stderr
        assert len(passes) == 6 + 4

    def test_another_model_under_the_same_name(self, ppl, model_folder, passes, tmp_path):
        """As when training goes on, or ``equalize`` wrote to the folder."""
        passes += [""] * 6
        shutil.copytree(model_folder, tmp_path / "model")
        command = ("-m", tmp_path / "model", "--attn", "sdpa", "--out", tmp_path / "run")
        assert ppl(*command).exit_code == 0
        model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
        model.lm_head.weight.data *= 2
        model.save_pretrained(tmp_path / "model")
        before = read_report(tmp_path / "run/results.json").perplexity[0].backends[0].nll
        assert "taken from the folder" not in ppl(*command).stderr
        assert read_report(tmp_path / "run/results.json").perplexity[0].backends[0].nll != before
        assert "taken from the folder" in ppl(*command).stderr


def test_progress_is_shown_without_a_terminal(ppl, monkeypatch):
    monkeypatch.setattr("dma_eval.console.SECONDS_BETWEEN_LINES", 0.0)
    result = ppl("--max-windows", 3, "--batch-size", 2, "-c", 512, "--attn", "sdpa", "dma_mxfp:paper")
    steps = [line.partition(" s so far")[0].rpartition(", ")[0] for line in result.stderr.splitlines()]
    shown = zip(["sdpa", "dma_mxfp:paper"] * 2, (2, 4, 5, 6), strict=True)
    assert steps == [f"Measuring: {label}, {done} of 6" for label, done in shown]


class TestChoiceOfWindows:
    def test_skip_and_spread(self, ppl, tmp_path):
        result = ppl("--attn", "sdpa", "--skip-windows", 3, "--spread", "--json", tmp_path / "r.json", code=0)
        assert "2 windows of 128 tokens (non-overlapping, the first 3 skipped, spread over the text)" in result.stdout
        section = read_report(tmp_path / "r.json").perplexity[0]
        assert (section.skip_windows, section.spread, section.windows) == (3, True, 2)

    def test_rows_that_cannot_be_true_are_warned_of(self, compared):
        """A text may repeat itself. Rounding makes no model much better; attention that sees the next token does."""
        section = compared("sdpa", "eager", "dma_mxfp:paper", context=512, max_windows=1)
        reference, low, better = section.backends

        def warnings(*backends):
            return perplexity_page(replace(section, backends=backends)).warnings

        assert warnings(reference, low, better) == []
        (line,) = warnings(replace(reference, perplexity=1.83))
        assert line.startswith("a perplexity of 1.83 is implausibly low for prose")
        low, better = replace(low, perplexity=1.375, change_percent=-95.9), replace(better, change_percent=-20.5)
        why = "less perplexity than sdpa, which is implausible: it may see the tokens that it predicts"
        assert warnings(reference, low, better) == [f"eager has 95.9 % {why}", f"dma_mxfp:paper has 20.5 % {why}"]
        low = replace(low, perplexity=1.9, change_percent=-0.5)
        (line,) = warnings(replace(reference, perplexity=1.91), low)
        assert line.startswith("a perplexity of 1.91 is implausibly low for prose")
        failed, low = replace(reference, failure="NaN", perplexity=None), replace(low, change_percent=None)
        _, line = warnings(failed, low)
        assert line.startswith("a perplexity of 1.90 is implausibly low for prose")


class TestScore:
    LOGITS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 1.0]])
    IDS = torch.tensor([1, 0, 2])

    def test_without_a_reference(self):
        scores = score(self.LOGITS, self.IDS, Window(0, 3, 1))
        expected = [math.log(math.exp(2) + 2) - 2, math.log(math.exp(3) + 2)]
        assert scores.nll == pytest.approx(expected, rel=1e-6)
        assert scores.kl.tolist() == [0, 0]
        assert scores.agree.tolist() == [True, True]

    def test_scores_from_first_on(self):
        scores = score(self.LOGITS, self.IDS, Window(0, 3, 2), self.LOGITS[[0, 2, 1]])
        assert scores.nll == pytest.approx([math.log(math.exp(3) + 2)], rel=1e-6)
        reference, backend = self.LOGITS[2].double().softmax(-1), self.LOGITS[1].double().log_softmax(-1)
        assert scores.kl == pytest.approx([torch.nn.functional.kl_div(backend, reference, reduction="sum").item()])
        assert scores.agree.tolist() == [False]

    def test_chunks_change_nothing(self, monkeypatch):
        generator = torch.Generator().manual_seed(0)
        logits, reference = torch.randn(2, 50, 7, generator=generator)
        ids = torch.randint(7, (50,), generator=generator)
        whole = score(logits, ids, Window(0, 50, 5), reference)
        monkeypatch.setattr(perplexity, "CHUNK_ELEMENTS", 7 * 8)
        chunked = score(logits, ids, Window(0, 50, 5), reference)
        for name in ("nll", "kl", "agree"):
            np.testing.assert_array_equal(getattr(chunked, name), getattr(whole, name))

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_not_finite(self, value):
        logits = self.LOGITS.clone()
        logits[1, 2] = value
        with pytest.raises(NonFiniteLogitsError, match="NaN or infinite logits, first at position 1 of a window"):
            score(logits, self.IDS, Window(0, 3, 1))


def test_batches_have_windows_of_equal_length():
    long, short = [Window(i, i + 4, 1) for i in range(5)], Window(5, 7, 1)
    assert make_batches([*long, short], 2) == [long[:2], long[2:4], long[4:], [short]]


def _nan_attention(module, query, *arguments, **options):
    output, _ = sdpa_attention_forward(module, query, *arguments, **options)
    return (output * math.nan if module.layer_idx == 1 else output), None


def _raising_attention(module, *arguments, **options):
    raise RuntimeError("no kernel image is available\n\nadvice that does not fit a table")


@pytest.fixture
def broken(monkeypatch):
    """Attention implementations that give NaN in the second layer, and that raise; gone after the test."""
    for name, function in (("nan_attention", _nan_attention), ("raising_attention", _raising_attention)):
        monkeypatch.setitem(AttentionInterface._global_mapping, name, function)
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, sdpa_mask)


@pytest.mark.usefixtures("broken")
class TestFailure:
    NAN = (
        "NaN or infinite logits, first at position 0 of a window; they begin in the output of model.layers.1.self_attn"
    )

    def test_others_continue(self, compared):
        sdpa, nan, raising, eager = compared(
            *("sdpa", "nan_attention", "raising_attention", "eager"), context=128, max_windows=2
        ).backends
        assert nan.failure.startswith(self.NAN)
        assert raising.failure == "no kernel image is available"
        assert nan.perplexity is None
        assert nan.window_nll == []
        assert sdpa.failure is None
        assert eager.failure is None
        assert len(eager.window_nll) == 2
        assert eager.kl_mean == pytest.approx(0, abs=1e-6)


class TestFallbacks:
    """A head_dim above 256 is beyond the backend; SDPA takes its place where the configuration allows."""

    def test_are_counted_or_errors(self, compared, identity_file, monkeypatch):
        monkeypatch.setattr("dma_hf.support.MAX_HEAD_DIM", 16)
        identity_file.write_text('on_unsupported = "sdpa"\n', encoding="utf-8")
        names = ("sdpa", f"dma_mxfp:{identity_file}", "dma_mxfp:balanced")
        with pytest.warns(UserWarning, match="does not support this head_dim"):
            sdpa, fallen, refused = compared(*names, context=128, max_windows=2).backends
        assert sdpa.fallbacks == refused.fallbacks == {}
        assert fallen.fallbacks == {"this head_dim": 2 * 2}, "two layers, two windows"
        assert fallen.kl_mean == pytest.approx(0, abs=1e-6)
        assert "does not support this head_dim: query has 32" in refused.failure


WINDOWS = [Window(0, 4, 1), Window(2, 6, 2)]  # positions 1, 2, 3 and 2, 3 are scored


def passes_of(label, nll, kl=None):
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
    return passes_of("sdpa", [[1.0, 2.0, 3.0], [4.0, 5.0]])


@pytest.fixture
def other():
    return passes_of("other", [[1.5, 2.0, 3.5], [4.0, 6.0]], [[0.25, 0.0, 1.0], [0.5, 0.75]])


class TestSummary:
    """Statistics, on arrays small enough to work out by hand."""

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
        section = passes_of("sdpa", [[float(position) for position in range(1, 130)]])
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
        result = results(reference, passes_of("bad", [[1e4] * 3, [1e4] * 2]))[1]
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
