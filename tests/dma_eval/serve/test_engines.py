"""The engines of ``dma-hf serve``: one request after another, and continuous batching."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from dma_eval.commands.serve import load
from dma_eval.errors import UserError
from dma_eval.load.models import load_model
from sampling import sampled
from serve_requests import (
    CHAT,
    NEW_TOKENS,
    TEMPLATE,
    TIMEOUT,
    Scripted,
    answer_to,
    fill_server,
    running_engine,
    serve_options,
    serving,
    status_of,
    text_of,
)
from served import DEMO_MODEL
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.cli.serving.utils import ReasoningText, ToolCall
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import GenerationOutput

import dma_hf
from dma_hf.integrations.serving import BatchTopK, BatchTopP
from dma_hf.serving import Sequential, make_app
from dma_hf.serving.engines import Answer, _TopK, _TopP
from dma_hf.serving.requests import ApiError

BATCHED = {"continuous_batching": True, "cache_gib": 0.05}
engines = pytest.mark.parametrize("options", [{}, BATCHED], ids=["alone", "batched"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "end"), sampled([("+int4", signal.SIGTERM), ("", signal.SIGINT)], lambda suffix, end: suffix == "+int4")
)
def test_continuous_batching(suffix, end, arguments, expected, question):
    """It stops within long prompts, too."""
    batched = ("--continuous-batching", "--cache-gib", 0.1, "--max-requests", 3)
    with serving(*arguments(suffix), *batched, stop=end) as client, ThreadPoolExecutor() as pool:
        body = {"prompt": question, "max_tokens": NEW_TOKENS, "temperature": 0}
        answers = list(pool.map(lambda _: client.post("/v1/completions", **body), range(3)))
        events = client.stream("/v1/completions", **body)
        stop = expected[suffix].split()[3]
        stopped = client.post("/v1/completions", **body, stop=stop)["choices"][0]
        hot = client.post("/v1/completions", **body | {"temperature": 2})["choices"][0]["text"]
        cold = client.post("/v1/completions", **body | {"temperature": 1e-300})["choices"][0]["text"]
        for field in ({"seed": 1, "temperature": 1}, {"logit_bias": {"5": 1}}, {"presence_penalty": 1}):
            assert client.refused("/v1/completions", **body | field)[1]["param"] == next(iter(field))
        refused = client.refused("/v1/completions", **body, generation_config='{"top_k": 5, "min_p": 0.1}')
        assert refused[1]["param"] == "generation_config.min_p"
        statuses = fill_server(client, 3)
    assert [status.result(TIMEOUT) for status in statuses] == [503] * 3
    assert [answer["choices"][0]["text"] for answer in answers] == [expected[suffix]] * 3
    assert "".join(event["choices"][0]["text"] for event in events) == expected[suffix]
    assert (stopped["text"], stopped["finish_reason"]) == (expected[suffix].partition(stop)[0], "stop")
    assert hot != expected[suffix] == cold


def test_late_tokens_of_cancelled_requests_do_not_fill_the_memory():
    with running_engine(**BATCHED) as (engine, gate):
        for _ in range(3):
            engine._manager.output_router.deliver(GenerationOutput("cancelled", prompt_ids=[1] * 1000))
        asyncio.run(answer_to(gate, "/v1/completions", prompt="The captain", max_tokens=2))
        assert engine._manager.get_result(timeout=0) is None


@engines
def test_settings_of_the_model_that_have_no_effect_trigger_a_warning(options, tmp_path):
    """Beams cannot be streamed, and continuous batching has no penalty of repetitions."""
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    settings |= {"num_beams": 4, "repetition_penalty": 1.8, "min_length": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))

    def say(model):
        with running_engine(model, **options) as (_, gate):
            return text_of(asyncio.run(answer_to(gate, "/v1/completions", prompt="The captain", max_tokens=10)))

    with pytest.warns(UserWarning, match="num_beams=4") as told:
        said = say(tmp_path)
    is_ignored = "repetition_penalty=1.8" in str(told[0].message)
    assert "min_length" not in str(told[0].message)
    assert (is_ignored, said == say(DEMO_MODEL)) == ((True, True) if options else (False, False))


@engines
def test_an_answer_that_ends_with_its_last_token_is_not_cut_off(options):
    async def say_twice(engine, gate):
        asked = {"prompt": "The captain", "max_tokens": 1}
        first = await answer_to(gate, "/v1/completions", **asked)
        (token,) = engine.tokenizer.encode(text_of(first), add_special_tokens=False)
        ends = json.dumps({"eos_token_id": token})
        second = await answer_to(gate, "/v1/completions", **asked, generation_config=ends)
        return [answer["choices"][0]["finish_reason"] for answer in (first, second)]

    with running_engine(**options) as (engine, gate):
        assert asyncio.run(say_twice(engine, gate)) == ["length", "stop"]


def test_an_answer_may_fill_the_room():
    async def ask(engine, gate):
        engine.room, asked = 10, {"prompt": "The captain", "ignore_eos": True}  # two tokens
        bodies = [json.dumps(asked | {"max_tokens": limit}).encode() for limit in (8, 9)]
        statuses = [await status_of(gate, "/v1/completions", "POST", body=body) for body in bodies]
        return statuses, (await answer_to(gate, "/v1/completions", **asked))["usage"]["total_tokens"]

    with running_engine() as loaded:
        assert asyncio.run(ask(*loaded)) == ([200, 400], 10)


@engines
def test_a_request_whose_client_leaves_ends(options):
    """Nothing of it is kept."""

    async def leave(model, gate):
        body, sent = {"prompt": "The captain", "max_tokens": 3000, "ignore_eos": True, "stream": True}, []
        asked = status_of(gate, "/v1/completions", "POST", body=json.dumps(body).encode(), sent=sent)
        asking = asyncio.create_task(asked)
        while len(sent) < 3:  # it has begun to answer
            await asyncio.sleep(0.01)
        asking.cancel()
        calls = None
        while calls != (calls := dma_hf.stats(model).calls):
            await asyncio.sleep(0.5)
        return calls

    with running_engine(**options) as (engine, gate):
        calls = asyncio.run(asyncio.wait_for(leave(engine.model, gate), TIMEOUT))
        gc.collect()
        assert not [each for each in gc.get_objects() if type(each) is Answer]
    assert calls < 3000


def test_a_server_decodes_in_cuda_graphs(monkeypatch):
    """On a CPU they cannot be captured."""
    captured = []

    def fail(step):
        captured.append(step)
        raise RuntimeError("there is no GPU")

    monkeypatch.setattr("dma_hf.integrations.wrapping._is_on_gpu", lambda model: True)
    monkeypatch.setattr("dma_hf.step_graph.record", fail)
    monkeypatch.setattr(torch, "Event", lambda **options: SimpleNamespace(record=int, synchronize=int))
    with running_engine() as (_, gate):
        answer = asyncio.run(answer_to(gate, "/v1/completions", prompt="The captain", max_tokens=8, ignore_eos=True))
    assert (len(captured), answer["usage"]["completion_tokens"]) == (1, 8)


def _spaced_tokenizer(kind):
    """Return a tokenizer that keeps spaces at the start of words, and whose decoder drops the one at the start."""
    words = {"▁sailed": 0, "▁The": 1, "▁captain": 2, "a": 3, "▁a": 4, "▁": 5}
    tokenizer = Tokenizer(models.BPE(words, [], ignore_merges=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    if kind == "llama2":
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("kind", ["metaspace", "llama2"])
@engines
def test_a_continuation_keeps_the_space_before_its_first_word(options, kind):
    """The answer in a chat does not continue a text."""

    async def say_both(gate):
        asked = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
        continued = await answer_to(gate, "/v1/completions", prompt="The captain", **asked)
        return text_of(continued), text_of(await answer_to(gate, "/v1/chat/completions", messages=CHAT, **asked))

    with running_engine(**options) as (engine, gate):
        engine.tokenizer = _spaced_tokenizer(kind)
        engine.tokenizer.chat_template = TEMPLATE
        torch.nn.init.zeros_(engine.model.get_output_embeddings().weight)  # so that every token is the first one
        assert asyncio.run(say_both(gate)) == (" sailed sailed", "sailed sailed")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_byte_that_is_no_text_does_not_end_an_answer(path):
    """After a line end that is a byte token, too: as one text, all of these bytes would be undecodable."""
    words = {"<0x0A>": 0, "<0xE2>": 1, "▁sailed": 2, "a": 3, "▁": 4}
    tokenizer = Tokenizer(models.BPE(words, [], byte_fallback=True))
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(decoder)
    loaded = load_model(str(DEMO_MODEL), dtype="float32", device="cpu")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template="a")
    gate = make_app(Scripted(loaded.model, wrapped, [0, 1, 2, 2]))
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": CHAT}
    assert text_of(asyncio.run(answer_to(gate, path, **asked))) == "\n sailed sailed"


def test_an_answer_whose_end_fails_neither_waits_for_ever_nor_delays_others(monkeypatch):
    def fail(streamer):
        raise KeyError("name")

    monkeypatch.setattr("dma_hf.serving.engines.CBStreamer.end", fail)
    body = json.dumps({"prompt": "The captain", "max_tokens": 2}).encode()
    with running_engine(**BATCHED) as (_, gate):
        assert asyncio.run(asyncio.wait_for(status_of(gate, "/v1/completions", "POST", body=body), 10)) == 500


def test_a_tokenizer_that_cannot_decode_streams_is_refused():
    loaded = load_model(str(DEMO_MODEL), dtype="float32", device="cpu")
    with pytest.raises(TypeError, match="tokenizer: "):
        Sequential(loaded.model, object())


def _shown(answer):
    return [answer.get_nowait() for _ in range(answer.qsize())]


def test_stop_strings_of_any_length():
    answer = Answer(["aab", "a" * 1_000_000])
    cancelled = []
    answer.on_cancel = lambda: cancelled.append(True)
    shown = []
    for text in ("xa", "a", "a", "c", "aa", "b", "more"):
        answer.put_nowait(text)
        shown.append("".join(each or "END" for each in _shown(answer)))
    assert shown == ["x", "", "", "aaac", "", "END", ""]
    assert (answer.is_stopped, cancelled) == (True, [True])


def test_text_that_has_not_been_read_is_one_piece():
    answer = Answer([])
    for item in ("a", "b", ReasoningText("c"), ReasoningText("d"), "e", None):
        answer.put_nowait(item)
    shown = _shown(answer)
    assert shown == ["ab", "cd", "e", None]
    assert [type(each) for each in shown[:3]] == [str, ReasoningText, str]


def test_a_stop_string_does_not_reach_across_a_tool_call():
    answer = Answer(["aab"])
    for item in ("xaa", ToolCall("add", "{}"), "b", ReasoningText("c"), None):
        answer.put_nowait(item)
    assert [getattr(each, "name", each) for each in _shown(answer)] == ["xaa", "add", "b", "c", None]


def test_the_end_of_an_answer():
    """Text that was held back is shown, and what comes later changes nothing."""
    answer = Answer(["aab"])
    for item in ("xaa", None, "more"):
        answer.put_nowait(item)
    answer.cancel()
    assert (_shown(answer), answer.is_cancelled) == (["xaa", None], False)
    answer, error = Answer([]), ApiError("no memory")
    answer.fail(error)
    answer.fail(ApiError("again"))
    assert (_shown(answer), answer.error, answer.is_cancelled) == ([None], error, True)


LIMITS = SimpleNamespace(top_k=1, top_p=0.5, filter_value=-torch.inf, min_tokens_to_keep=1)


def test_one_sort_keeps_the_tokens_that_two_keep():
    limits = [(k, p) for k in (1, 2, 4, 5, 99) for p in (0.0, 0.35, 0.6, 0.8, 0.99, 1.0)]
    top_k = torch.tensor([k for k, _ in limits], dtype=torch.int32)
    top_p = torch.tensor([p for _, p in limits]).view(torch.int32)
    scores = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log().expand(len(limits), -1)
    twice = BatchTopP(LIMITS)(BatchTopK(LIMITS)(scores, top_k), top_p)
    mine = _TopK(LIMITS)
    assert _TopP(LIMITS, mine)(mine(scores, top_k), top_p).equal(twice)
    assert len({*(twice > -torch.inf).sum(-1).tolist()}) == 5


def test_sums_over_a_few_sorted_rows_are_not_compiled():
    """PyTorch 2.11 and 2.12 fail to generate code for the GPU."""
    nodes, top_k = [], _TopK(LIMITS)

    def backend(module, _):
        nodes.extend(node.target for node in module.graph.nodes)
        return module.forward

    @torch.compile(backend=backend)
    def sample(scores, most, share):
        return _TopP(LIMITS, top_k)(top_k(scores.float(), most), share).softmax(-1)

    arguments = torch.randn(2, 9), torch.tensor([3, 9]).int(), torch.tensor([1.0, 0.5]).view(torch.int32)
    assert (sample(*arguments) > 0).sum(-1)[0] == 3
    assert nodes
    assert "cumsum" not in nodes


def test_a_batch_is_for_as_many_requests_as_the_server_takes():
    """For a batch with prompts, compiled code computes logits of so many."""
    with running_engine(max_requests=3, **BATCHED) as (engine, _):
        assert engine._manager.continuous_batching_config.max_requests_per_batch == 3


def test_batches_that_do_not_compile_are_an_error(monkeypatch):
    """Transformers logs what fails while it warms up."""

    def fail(*_):
        raise RuntimeError("no compiler\nlong output")

    monkeypatch.setattr(ModelRunner, "compute_batch", fail)
    with pytest.raises(UserError, match="no compiler"):
        load(serve_options(attn="dma_mxfp+int8", continuous_batching=True, cache_gib=0.1, compile=True))
