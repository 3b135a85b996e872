"""The lm-eval model: scored as lm-eval's own, padding that changes nothing, and failures that are told."""

from __future__ import annotations

import re

import pytest
import torch
from dma_eval.harness import DMALM, BackendFailure
from dma_eval.load.backends import parse_backends
from dma_eval.results import low_share
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from dma_hf.integrations.internals import CACHE_ARGUMENT

CONTEXT = "the captain said upon the white sea"
PAIRS = [
    (CONTEXT, " the ship"),
    (CONTEXT, " a"),
    (CONTEXT, " the"),
    ("", " the whale and a thousand ship"),
    (" ".join(["the white whale"] * 50), " upon the water"),
    ("the", " sea"),
]


def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


@pytest.fixture
def make(loaded):
    def wrap(attn="sdpa", batch_size=4):
        lm = DMALM.of(loaded, batch_size=batch_size)
        lm.use(parse_backends([attn])[0])
        return lm

    return wrap


@pytest.fixture
def hugging_face(loaded):
    return HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=4)


@pytest.mark.parametrize("length", [1, 384, 385, 700])
@pytest.mark.parametrize(("diagonal", "sinks"), [(1, 1), (3, 0)])
@pytest.mark.parametrize("exact_until", [None, 0, 512])
@pytest.mark.parametrize("cache", [None, "int4"])
def test_low_keys_are_those_of_the_rule(length, diagonal, sinks, exact_until, cache):
    """Reports of older configurations have no ``exact_until``. A packed cache is read in codes from the start."""
    query, key = torch.arange(length)[:, None] // 128, torch.arange(length) // 128
    is_low = (key < query - diagonal) & (key >= sinks) & (query >= (0 if cache else exact_until or 0) // 128)
    start = {} if exact_until is None else {"exact_until": exact_until}
    share = low_share([length, 1], {"diagonal_tiles": diagonal, "sink_tiles": sinks, "cache": cache} | start)
    assert share == int(is_low.sum()) / (length * (length + 1) // 2 + 1)


class TestScores:
    def test_as_lm_eval_scores(self, make, hugging_face):
        requests = instances("loglikelihood", PAIRS)
        expected = hugging_face.loglikelihood(requests, disable_tqdm=True)
        for (ours, greedy), (theirs, theirs_greedy) in zip(make().loglikelihood(requests), expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
            assert greedy == theirs_greedy

    def test_rolling_as_lm_eval_scores(self, make, hugging_face, prose):
        texts = [(prose[:4000],), ("the sea",)]
        requests = instances("loglikelihood_rolling", texts)  # the first takes three windows of 512 tokens
        expected = hugging_face.loglikelihood_rolling(requests, disable_tqdm=True)
        assert make().loglikelihood_rolling(requests) == pytest.approx(expected, abs=1e-2)

    def test_generates_as_lm_eval(self, make, hugging_face):
        options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
        requests = instances("generate_until", [(CONTEXT, options), ("the", options)])
        assert make().generate_until(requests) == hugging_face.generate_until(requests, disable_tqdm=True)

    @pytest.mark.parametrize("attn", ["sdpa", "dma_mxfp:paper", "dma_mxfp:balanced+int4"])
    def test_do_not_depend_on_the_batch(self, make, prose, attn):
        """The longer prompts reach beyond the first tile and the last: only there are keys in low precision."""
        long = [(prose[:1200], " the ship"), (prose[:900], " white sea upon"), (prose[300:1400], " a whale")]
        requests = instances("loglikelihood", [*PAIRS, *long])
        alone = [score for score, _ in make(attn, batch_size=1).loglikelihood(requests)]
        together = [score for score, _ in make(attn, batch_size=9).loglikelihood(requests)]
        assert together == pytest.approx(alone, abs=1e-4)

    def test_generates_with_the_cache(self, make, prose):
        """Prompts of several lengths: padding on the left, which a cache does not store."""
        options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
        requests = instances("generate_until", [(prose[:1200], options), ("the", options)])
        lm, caches = make("dma_mxfp:balanced+int4"), []
        lm.model.register_forward_pre_hook(
            lambda module, args, inputs: caches.append(type(inputs[CACHE_ARGUMENT]).__name__), with_kwargs=True
        )
        assert lm.generate_until(requests) == make("dma_mxfp:balanced+int4").generate_until(requests)
        assert caches[0] == "DMACache"

    def test_padding_is_masked(self, make):
        """The tiny model hardly feels padding that it sees; a real one with outliers in its keys would."""
        lm, masks = make(), []
        lm.model.register_forward_pre_hook(
            lambda module, args, inputs: masks.append((inputs["input_ids"], inputs["attention_mask"])), with_kwargs=True
        )
        lm.loglikelihood(instances("loglikelihood", [(CONTEXT, " the ship"), ("the", " sea"), (CONTEXT, " a")]))
        ((ids, mask),) = masks
        lengths = sorted(len(lm.tok_encode(CONTEXT + each)) - 1 for each in (" the ship", " a"))
        lengths.insert(0, len(lm.tok_encode("the sea")) - 1)
        assert sorted(mask.sum(-1).tolist()) == lengths
        assert bool((mask.diff(dim=-1) <= 0).all())  # padding is at the end
        assert bool((ids[mask == 0] == 0).all())

    def test_one_pass_for_continuations_of_one_token(self, make):
        lm, calls = make(), []
        lm.model.register_forward_pre_hook(lambda *_: calls.append(1))
        lm.loglikelihood(instances("loglikelihood", [(CONTEXT, " the"), (CONTEXT, " a"), (CONTEXT, " sea")]))
        assert len(calls) == 1


class TestFailures:
    @pytest.fixture
    def broken(self, make):
        lm = make()
        with torch.no_grad():
            lm.model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
        return lm

    def test_log_likelihood(self, broken):
        with pytest.raises(BackendFailure, match=r"NaN or infinite logits; they begin in .* model.layers.1.mlp"):
            broken.loglikelihood(instances("loglikelihood", PAIRS))

    def test_a_continuation_beyond_the_context(self, make, prose):
        """The first of its tokens have no logits; lm-eval asserts that there is no such one."""
        with pytest.raises(BackendFailure, match=r"a continuation has [\d,]+ tokens, but the model's maximum is 512"):
            make().loglikelihood(instances("loglikelihood", [("the", f" {prose[:3000]}")]))

    @pytest.mark.parametrize(
        ("context", "continuation"), [("the wha", "le"), ("the sea", ""), ("", ""), ("", "<s>"), (" ", "sea")]
    )
    @pytest.mark.parametrize("others", [[], PAIRS])
    def test_a_sample_without_a_token_to_score_or_to_read_is_named(self, make, context, continuation, others):
        """Also among others, with whose logits it would be scored; lm-eval's own model stops without a message."""
        requests = instances("loglikelihood", [*others, (context, continuation)])
        named = re.escape(f"context ending in {context!r} with continuation {continuation!r}")
        with pytest.raises(BackendFailure, match=f"{named} has no token .*; change the sample, or its target"):
            make().loglikelihood(requests)

    def test_generation(self, broken):
        with pytest.raises(BackendFailure, match=r"NaN .* they begin in the output of model.layers.1.mlp"):
            broken.generate_until(instances("generate_until", [("the", {"until": ["\n"], "max_gen_toks": 4})]))

    def test_among_several_processes_it_is_kept_until_the_next_backend(self, broken):
        """To raise in one process would leave the others waiting for it."""
        broken._world_size = 2
        answers = broken.loglikelihood(instances("loglikelihood", PAIRS))
        assert answers == [(0.0, False)] * len(PAIRS)
        assert broken.generate_until(instances("generate_until", [("the", {"until": []})])) == [""]
        assert "model.layers.1.mlp" in broken.failure
        broken.use(parse_backends(["sdpa"])[0])
        assert broken.failure is None


def test_a_wrong_backend_of_its_command_is_one_line(model_folder, python):
    arguments = ("--model", "dma-hf", "--model_args", f"pretrained={model_folder},attn=flash", "--tasks", "arc_easy")
    done = python("-m", "dma_eval.lm_eval", *arguments, "--device", "cpu", env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: attn: unknown backend 'flash'; valid: ")


class TestArguments:
    def test_backend(self, model_folder):
        lm = DMALM(str(model_folder), attn="dma_mxfp:fp4", device="cpu", dtype="float32")
        assert (lm.model.config._attn_implementation, lm.model.config.dma_mxfp["low"]) == ("dma_mxfp", "nvfp4")
        lm = DMALM.create_from_arg_string(f"pretrained={model_folder}", {"device": "cpu", "batch_size": 2})
        assert lm.model.config.dma_mxfp["low"] == "mxint8"  # balanced is the default

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"attn_preset": "fp4"}, TypeError, "attn_preset"),
            ({"attn_implementation": "sdpa"}, ValueError, "attn_implementation=sdpa would be replaced .*; give attn="),
            ({"batch_size": "auto"}, ValueError, "batch_size must be a number, got 'auto'"),
        ],
    )
    def test_wrong(self, model_folder, arguments, error, message):
        """What lm-eval's ``hf`` takes is not overruled in silence."""
        with pytest.raises(error, match=message):
            DMALM(str(model_folder), device="cpu", **arguments)
