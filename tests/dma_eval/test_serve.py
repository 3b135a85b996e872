"""``dma-hf serve``: the command, in a process of its own, over HTTP, with the demo model and a chat template."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import openai
import pytest
import torch
from dma_eval.commands import serve
from dma_eval.commands.serve import ServeOptions, load
from dma_eval.errors import UserError
from dma_eval.load.backends import activate, parse_backends
from dma_eval.load.models import load_model
from sampling import sampled
from served import DEMO_MODEL, served
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.cli.serving.utils import ReasoningText
from transformers.generation.continuous_batching.requests import GenerationOutput

import dma_hf
from dma_hf import DMAConfig
from dma_hf.integrations.serving import BatchTopK, BatchTopP, DirectStreamer
from dma_hf.serving import Engine, Sequential, make_app
from dma_hf.serving.engines import Answer, _TopK, _TopP
from dma_hf.serving.gate import Gate
from dma_hf.serving.requests import ApiError

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
COARSE = 'low = "mxfp4"\nhigh = "mxfp4"\nshared_scale = "block"\nscale_rounding = "floor"\npv = "bf16"\n'
"""Loses so much that its words are not SDPA's."""
NEW_TOKENS = 8
TIMEOUT = 60  # seconds
STOP_SECONDS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "coarse.toml").write_text(COARSE)
    return folder


@pytest.fixture(scope="module")
def question(folder):
    """A prompt of several tiles, after which every backend goes on in its own words."""
    return (DEMO_MODEL.parent / "heldout.txt").read_text(encoding="utf-8")[5000:7000].strip()


class Client:
    """Talks to a server at an address."""

    def __init__(self, address):
        self._address = address
        self._open = build_opener(ProxyHandler({})).open

    def get(self, path):
        with self._open(self._address + path, timeout=TIMEOUT) as response:
            return json.load(response)

    def post(self, path, **body):
        with self._post(path, body) as response:
            return json.load(response)

    def stream(self, path, **body):
        """Return the events of an answer in pieces."""
        with self._post(path, body | {"stream": True}) as response:
            lines = [line.decode().strip() for line in response]
        events = [line.removeprefix("data: ") for line in lines if line]
        if path.startswith("/v1/c"):
            assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def refused(self, path, **body):
        """Return the status and the error that a request is refused with."""
        with pytest.raises(HTTPError) as refused:
            self.post(path, **body)
        with refused.value as response:
            error = json.load(response)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return response.code, error

    def _post(self, path, body):
        timeout = body.pop("timeout", TIMEOUT)
        return self._open(self._address + path, json.dumps(body).encode(), timeout=timeout)


@contextmanager
def _serving(*arguments, stop=signal.SIGINT):
    """Run the command; it must draw no bars of libraries, and stop by itself when interrupted."""
    with TemporaryDirectory() as folder, served(*arguments, log=Path(folder) / "log") as (process, address):
        yield Client(address)
        process.send_signal(stop)
        code = process.wait(STOP_SECONDS)
        told = (Path(folder) / "log").read_text()
    assert code == 0, told
    assert not [bad for bad in ("Traceback", "it/s", "100%") if bad in told], told


@pytest.fixture(scope="module")
def expected(folder, question):
    """What ``generate`` says with each backend."""
    loaded = load_model(str(folder), dtype="float32", device="cpu")
    inputs = loaded.tokenizer(question, return_tensors="pt")

    def say(name):
        activate(loaded.model, parse_backends([name])[0])
        ids = loaded.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        return loaded.tokenizer.decode(ids[0, inputs.input_ids.shape[-1] :], skip_special_tokens=True)

    said = {suffix: say(f"dma_mxfp:{folder / 'coarse.toml'}{suffix}") for suffix in ("", "+int4")}
    assert len({say("sdpa"), *said.values()}) == 3
    return said


def _options(model=DEMO_MODEL, **options):
    return ServeOptions(**{"model": str(model), "dtype": "float32", "device": "cpu"} | options)


def _arguments(folder, suffix=""):
    return (folder, "--dtype", "float32", "--attn", f"dma_mxfp:{folder / 'coarse.toml'}{suffix}")


@pytest.fixture(scope="module")
def client(folder):
    """Of a server that answers from a packed cache."""
    with _serving(*_arguments(folder, "+int4")) as client:
        yield client


@pytest.fixture
def asked(question):
    """The body of a request for the words in ``expected``, for each route."""
    common = {"max_tokens": NEW_TOKENS, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": question}]}
    return {"/v1/chat/completions": chat | common, "/v1/completions": {"prompt": question} | common}


def _text(event):
    (choice,) = event["choices"]
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content", "")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_answer_is_that_of_the_backend_and_its_cache(client, expected, asked, path):
    """Also in pieces, with the usage if it is asked for: once, or so far in every piece."""
    body, options = asked[path], {"include_usage": True}
    whole = client.post(path, **body)
    assert _text(whole) == expected["+int4"]
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", NEW_TOKENS)
    plain = client.stream(path, **body)
    assert sum(bool(_text(event)) for event in plain) > NEW_TOKENS / 2
    assert "".join(map(_text, plain)) == expected["+int4"]
    assert not any("usage" in event for event in plain)
    reasons = [None] * (len(plain) - 1) + ["length"]
    assert [event["choices"][0]["finish_reason"] for event in plain] == reasons
    *events, last = client.stream(path, **body, stream_options=options)
    assert [event["usage"] for event in events] == [None] * len(plain)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    *events, _ = client.stream(path, **body, stream_options=options | {"continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert (counts, counts[-1]) == (sorted(counts), NEW_TOKENS)


def test_a_stop_string_ends_an_answer(client, expected, asked):
    path, body = "/v1/chat/completions", asked["/v1/chat/completions"]
    stop = expected["+int4"].split()[3]
    upto = expected["+int4"].partition(stop)[0]
    assert upto
    whole = client.post(path, **body, stop=[stop])
    assert (_text(whole), whole["choices"][0]["finish_reason"]) == (upto, "stop")
    assert "".join(map(_text, client.stream(path, **body, stop=stop))) == upto


CHAT = [{"role": "user", "content": "The captain"}]
CALL = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
NESTED = json.loads('{"a":' * 900 + "1" + "}" * 900)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *(("chat/completions", {"messages": messages}, param) for messages, param in [
            ([], "messages"),
            (["hello"], "messages[0]"),
            ([{"role": "robot", "content": "hello"}], "messages[0].role"),
            ([{"role": "user"}], "messages[0].content"),
            ([{"role": "user", "content": ""}], "messages"),
            ([{"role": "user", "content": "hello", "name": "Ann"}], "messages[0].name"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
            ([{"role": "tool", "content": "5"}], "messages[0].tool_call_id"),
        ]),
        *(("chat/completions", {"messages": CHAT, **fields}, next(iter(fields))) for fields in [
            {"n": 2},
            {"tools": [{"type": "function", "function": {"name": "add"}}]},
            {"tool_choice": "required"},
            {"temperature": -1},
            {"frequency_penalty": 3},
            {"logit_bias": {"4096": 1}},
            {"max_completion_tokens": 5000},
            {"stop": list("abcde")},
            {"stream_options": {"include_usage": True}},
            {"top_k": 5},
            {"generation_config": "{"},
            {"generation_config": "[" * 100_000},
        ]),
        *(("responses", {"input": "word", "generation_config": text}, f"generation_config.{name}") for text, name in [
            ('{"num_beams": 2}', "num_beams"),
            ('{"eos_token_id": "x"}', "eos_token_id[0]"),
            ('{"temperature": NaN}', "temperature"),
        ]),
        ("responses", {"input": "word", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        *(("chat/completions", {"messages": CHAT, "chat_template_kwargs": options}, param) for options, param in [
            ({"padding": 1}, "chat_template_kwargs.padding"),
            (NESTED, None),
        ]),
        *(("completions", fields, param) for fields, param in [
            ({}, "prompt"),
            ({"prompt": ""}, "prompt"),
            ({"prompt": ["one", "two"]}, "prompt"),
            ({"prompt": "word " * 5000}, "prompt"),
            ({"prompt": "word " * 1_000_000}, "prompt"),
            ({"prompt": "word", "logit_bias": {"9" * 5000: 1}}, f"logit_bias.{'9' * 5000}"),
            ({"prompt": "word", "logit_bias": {"-1": 1}}, "logit_bias.-1"),
            ({"prompt": "word", "max_tokens": 0}, "max_tokens"),
            ({"prompt": "word", "logprobs": 0}, "logprobs"),
        ]),
        *(("responses", fields, param) for fields, param in [
            ({}, "input"),
            ({"input": ""}, "input"),
            ({"input": [{"role": "user"}]}, "input[0].content"),
            ({"input": [{"role": "tool", "content": "5"}]}, "input[0].role"),
            ({"input": [{"type": "reasoning"}]}, "input"),
            ({"input": "word", "tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"input": "word", "max_output_tokens": 5000}, "max_output_tokens"),
        ]),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_is_not_honoured_is_refused_by_name(client, path, body, param):
    status, error = client.refused(f"/v1/{path}", **body)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)


def test_fields_that_change_nothing_are_accepted(client, expected, asked):
    same = {
        "n": 1,
        "repetition_penalty": 1.0,
        "logprobs": False,
        "response_format": {"type": "text"},
        "stop": None,
        "user": "ann",
    }
    assert _text(client.post("/v1/completions", **asked["/v1/completions"], **same)) == expected["+int4"]


def test_bodies_methods_and_routes_that_there_are_not(client):
    for body in (b"{", b"5"):
        with pytest.raises(HTTPError) as refused:
            client._open(client._address + "/v1/completions", body, timeout=TIMEOUT)
        assert (refused.value.code, json.load(refused.value)["error"]["param"]) == (400, None)
    with pytest.raises(HTTPError) as refused:
        client.get("/v1/completions")
    assert (refused.value.code, refused.value.headers["Allow"]) == (405, "POST")
    assert client.refused("/v1/embeddings", input="word")[0] == 404


def test_sampling(client, question):
    def say(prompt="The captain", **choice):
        return client.post("/v1/completions", prompt=prompt, max_tokens=8, **choice)["choices"][0]["text"]

    hot = {"temperature": 2, "seed": 1}
    assert say(**hot) == say(**hot)
    assert say(**hot) != say(**hot | {"seed": 2})
    assert say(**hot, top_p=0) == say(temperature=0) == say()
    assert (
        say(temperature=1e-300, seed=1) == say(generation_config='{"do_sample": true, "temperature": 1e-300}') == say()
    )
    assert say(logit_bias={"5": 100}) == say(logit_bias={"5": 100}, presence_penalty=2) != say()
    assert say(question, logit_bias={"5": 3.5}, frequency_penalty=2) != say(question, logit_bias={"5": 3.5})


def test_an_answer_that_ignores_its_end(client):
    """The bias makes the token that ends an answer the first choice."""
    eos = load_model(str(DEMO_MODEL), dtype="float32", device="cpu").model.generation_config.eos_token_id
    body = {"prompt": "The captain", "max_tokens": 3, "temperature": 0, "logit_bias": {str(eos): 100}}
    assert client.post("/v1/completions", **body)["usage"]["completion_tokens"] == 1
    assert client.post("/v1/completions", **body, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_a_client_that_leaves_frees_its_request(client):
    """Otherwise the next answer would wait for 3,000 tokens, which take minutes."""
    body = {"prompt": "The captain", "max_tokens": 3000}
    with pytest.raises(TimeoutError):
        client.post("/v1/completions", **body, timeout=0.5)
    assert client.post("/v1/completions", prompt="The captain", max_tokens=2, timeout=20)["usage"]
    with client._post("/v1/completions", body | {"stream": True}) as response:
        assert response.readline().startswith(b"data: ")
    assert client.post("/v1/completions", prompt="The captain", max_tokens=2, timeout=20)["usage"]


def test_the_openai_client(client, expected, question):
    asked = openai.OpenAI(base_url=f"{client._address}/v1", api_key="none", max_retries=0)
    (model,) = asked.models.list().data
    answer = asked.responses.create(model=model.id, input=question, max_output_tokens=NEW_TOKENS)
    assert answer.output_text == expected["+int4"]
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    *_, last = asked.responses.create(model=model.id, input="word", max_output_tokens=1, stream=True)
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    with pytest.raises(openai.BadRequestError) as refused:
        asked.completions.create(model=model.id, prompt="word " * 5000)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


def _occupied(client, most):
    """Send as many requests as the server takes, with long prompts, and return their statuses as futures."""

    def ask():
        code = 429
        while code == 429:  # while the request below has the last place
            with pytest.raises(HTTPError) as refused:
                client.post("/v1/completions", prompt="word " * 4000, max_tokens=50)
            code = refused.value.code
            time.sleep(0.1)
        return code

    pool = ThreadPoolExecutor(most)
    statuses = [pool.submit(ask) for _ in range(most)]
    code, end = None, time.monotonic() + TIMEOUT
    while code is None and time.monotonic() < end:  # until all of them have arrived
        time.sleep(0.5)
        try:
            client.post("/v1/completions", prompt="word", max_tokens=2)
        except HTTPError as error:
            code = error.code
    assert code == 429
    assert client.get("/health") == {"status": "ok"}
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize("stop", sampled([signal.SIGINT, signal.SIGTERM], signal.SIGINT.__eq__))
def test_the_server_stops_whatever_runs(folder, stop):
    """Within a long prompt, and with another request waiting."""
    with _serving(*_arguments(folder, "+int4"), "--max-requests", 2, stop=stop) as client:
        statuses = _occupied(client, 2)
    assert [status.result(TIMEOUT) for status in statuses] == [503, 503]


def test_the_model_is_the_only_one(client, folder):
    (entry,) = client.get("/v1/models")["data"]
    assert entry["id"] == str(folder)
    assert (entry["status"], entry["dtype"], entry["max_model_len"]) == ({"value": "loaded"}, "float32", 4096)
    assert entry["attention"].endswith("+int4")
    assert client.get(f"/v1/models/{folder}") == entry
    status, error = client.refused("/v1/completions", prompt="word", model="another")
    assert (status, error["code"], error["param"]) == (400, "model_not_found", "model")
    assert client.stream("/load_model", model=str(folder))[0]["status"] == "ready"  # as `transformers chat` begins
    assert client.stream("/load_model", model="another")[0]["status"] == "error"
    assert client.refused("/load_model", model=5)[1]["param"] == "model"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "end"), sampled([("+int4", signal.SIGTERM), ("", signal.SIGINT)], lambda suffix, end: suffix == "+int4")
)
def test_continuous_batching(suffix, end, folder, expected, question):
    """It stops within long prompts, too."""
    arguments = (*_arguments(folder, suffix), "--continuous-batching", "--cache-gib", 0.1, "--max-requests", 3)
    with _serving(*arguments, stop=end) as client, ThreadPoolExecutor() as pool:
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
        statuses = _occupied(client, 3)
    assert [status.result(TIMEOUT) for status in statuses] == [503] * 3
    assert [answer["choices"][0]["text"] for answer in answers] == [expected[suffix]] * 3
    assert "".join(event["choices"][0]["text"] for event in events) == expected[suffix]
    assert (stopped["text"], stopped["finish_reason"]) == (expected[suffix].partition(stop)[0], "stop")
    assert hot != expected[suffix] == cold


@contextmanager
def _loaded(**options):
    """An engine and its application in this process."""
    engine, gate = load(_options(attn="dma_mxfp+int4", **options))
    try:
        yield engine, gate
    finally:
        if "continuous_batching" in options:
            engine.close()


BATCHED = {"continuous_batching": True, "cache_gib": 0.05}
engines = pytest.mark.parametrize("options", [{}, BATCHED], ids=["alone", "batched"])


def test_late_tokens_of_cancelled_requests_do_not_fill_the_memory():
    with _loaded(**BATCHED) as (engine, gate):
        for _ in range(3):
            engine._manager.output_router.deliver(GenerationOutput("cancelled", prompt_ids=[1] * 1000))
        asyncio.run(_answer(gate, "/v1/completions", prompt="The captain", max_tokens=2))
        assert engine._manager.get_result(timeout=0) is None


async def _ask(gate, path, method="GET", key=None, *, body=b"", sent=None):
    """Send a request, wait for the answer, and return its status. With the body ``None`` the client keeps it back."""
    messages = [] if body is None else [{"type": "http.request", "body": body}]
    status = None

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message):
        nonlocal status
        status = message.get("status", status)
        if sent is not None:
            sent.append(message)

    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
    await gate(scope, receive, send)
    return status


async def _answer(gate, path, **body):
    """Send a request that succeeds, and return its answer."""
    sent = []
    assert await _ask(gate, path, "POST", body=json.dumps(body).encode(), sent=sent) == 200
    return json.loads(sent[-1]["body"])


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("completions", {"prompt": "The captain", "max_tokens": 2}, None),
        ("chat/completions", {"messages": CHAT, "max_tokens": 2}, "org/tiny"),
        ("responses", {"input": "The captain", "max_output_tokens": 2}, "org/tiny"),
    ],
)
def test_a_model_that_is_loaded_already_is_served(folder, path, body, name):
    """As the guide shows it for Python. Transformers would add a revision to the name."""
    loaded = load_model(str(folder), dtype="float32", device="cpu")
    gate = make_app(Sequential(loaded.model, loaded.tokenizer), name=name)
    assert asyncio.run(_answer(gate, f"/v1/{path}", **body))["model"] == (name or str(folder))


@engines
def test_an_answer_that_ends_with_its_last_token_is_not_cut_off(options):
    async def say_twice(engine, gate):
        asked = {"prompt": "The captain", "max_tokens": 1}
        first = await _answer(gate, "/v1/completions", **asked)
        (token,) = engine.tokenizer.encode(_text(first), add_special_tokens=False)
        ends = json.dumps({"eos_token_id": token})
        second = await _answer(gate, "/v1/completions", **asked, generation_config=ends)
        return [answer["choices"][0]["finish_reason"] for answer in (first, second)]

    with _loaded(**options) as (engine, gate):
        assert asyncio.run(say_twice(engine, gate)) == ["length", "stop"]


def test_an_answer_may_fill_the_room():
    async def ask(engine, gate):
        engine.room, asked = 10, {"prompt": "The captain", "ignore_eos": True}  # two tokens
        bodies = [json.dumps(asked | {"max_tokens": limit}).encode() for limit in (8, 9)]
        statuses = [await _ask(gate, "/v1/completions", "POST", body=body) for body in bodies]
        return statuses, (await _answer(gate, "/v1/completions", **asked))["usage"]["total_tokens"]

    with _loaded() as loaded:
        assert asyncio.run(ask(*loaded)) == ([200, 400], 10)


@engines
def test_a_request_whose_client_leaves_ends(options):
    """Nothing of it is kept."""

    async def leave(model, gate):
        body, sent = {"prompt": "The captain", "max_tokens": 3000, "ignore_eos": True, "stream": True}, []
        asking = asyncio.create_task(_ask(gate, "/v1/completions", "POST", body=json.dumps(body).encode(), sent=sent))
        while len(sent) < 3:  # it has begun to answer
            await asyncio.sleep(0.01)
        asking.cancel()
        calls = None
        while calls != (calls := dma_hf.stats(model).calls):
            await asyncio.sleep(0.5)
        return calls

    with _loaded(**options) as (engine, gate):
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
    with _loaded() as (_, gate):
        answer = asyncio.run(_answer(gate, "/v1/completions", prompt="The captain", max_tokens=8, ignore_eos=True))
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
        continued = await _answer(gate, "/v1/completions", prompt="The captain", **asked)
        return _text(continued), _text(await _answer(gate, "/v1/chat/completions", messages=CHAT, **asked))

    with _loaded(**options) as (engine, gate):
        engine.tokenizer = _spaced_tokenizer(kind)
        engine.tokenizer.chat_template = TEMPLATE
        torch.nn.init.zeros_(engine.model.get_output_embeddings().weight)  # so that every token is the first one
        assert asyncio.run(say_both(gate)) == (" sailed sailed", "sailed sailed")


def test_an_answer_whose_end_fails_neither_waits_for_ever_nor_delays_others(monkeypatch):
    def fail(streamer):
        raise KeyError("name")

    monkeypatch.setattr("dma_hf.serving.engines.CBStreamer.end", fail)
    body = json.dumps({"prompt": "The captain", "max_tokens": 2}).encode()
    with _loaded(**BATCHED) as (_, gate):
        assert asyncio.run(asyncio.wait_for(_ask(gate, "/v1/completions", "POST", body=body), 10)) == 500


async def _answer_all(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body"})


@pytest.mark.parametrize(
    ("method", "path", "key", "status", "status_of_next"),
    [
        ("GET", "/health", None, 200, 200),
        ("HEAD", "/health", None, 200, 200),
        ("POST", "/health", None, 401, 200),
        ("GET", "/v1/models", None, 401, 200),
        ("GET", "/v1/models", "secret", 200, 200),
        ("POST", "/v1/completions", "wrong", 401, 200),
        ("POST", "/v1/completions", "secret", 200, 429),
    ],
)
def test_all_but_reading_health_needs_the_key_and_requests_that_generate_are_limited(
    method, path, key, status, status_of_next
):
    async def ask():
        gate = Gate(_answer_all, api_key="secret", most=2)
        statuses = [await _ask(gate, path, method, key)]
        others = [asyncio.create_task(_ask(gate, path, method, key, body=None)) for _ in range(2)]
        await asyncio.sleep(0)
        statuses += [await _ask(gate, "/v1/responses", "POST", "secret"), await _ask(gate, "/health")]
        for other in others:
            other.cancel()
        await asyncio.wait(others)
        return [*statuses, await _ask(gate, "/v1/responses", "POST", "secret")]

    assert asyncio.run(asyncio.wait_for(ask(), TIMEOUT)) == [status, status_of_next, 200, 200]


def test_a_client_that_keeps_its_body_back_frees_its_place(monkeypatch):
    """Such as one that lost its network: its connection stays open."""
    monkeypatch.setattr("dma_hf.serving.gate.BODY_SECONDS", 0.01)

    async def ask():
        gate = Gate(_answer_all, most=1)
        return [await _ask(gate, "/v1/completions", "POST", body=body) for body in (None, b"")]

    assert asyncio.run(asyncio.wait_for(ask(), TIMEOUT)) == [408, 200]


def test_stopping_ends_open_requests_whether_they_have_begun_to_answer_or_not():
    async def application(scope, receive, send):
        if scope["path"] == "/v1/responses":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await asyncio.Event().wait()

    async def stop():
        gate, sent = Gate(application), []
        asked = [asyncio.create_task(_ask(gate, path, sent=sent)) for path in ("/v1/completions", "/v1/responses")]
        await asyncio.sleep(0.01)
        gate.close()
        statuses = await asyncio.wait_for(asyncio.gather(*asked), TIMEOUT)
        return [*statuses, await _ask(gate, "/v1/models")], sent

    statuses, sent = asyncio.run(stop())
    assert statuses == [503, 200, 503]
    events = [message["body"] for message in sent if b"shutting down" in message.get("body", b"")]
    whole, event = (json.loads(body.removeprefix(b"data: ")) for body in events)
    assert (whole["error"]["type"], event["type"]) == ("server_error", "error")


def test_an_answer_is_cancelled_when_its_request_ends():
    cancelled = []

    async def application(scope, receive, send):
        scope["state"]["answer"] = SimpleNamespace(cancel=lambda: cancelled.append(scope["path"]))
        await _answer_all(scope, receive, send)

    asyncio.run(_ask(Gate(application), "/v1/completions"))
    assert cancelled == ["/v1/completions"]


def test_a_tokenizer_that_cannot_decode_streams_is_refused():
    loaded = load_model(str(DEMO_MODEL), dtype="float32", device="cpu")
    with pytest.raises(TypeError, match="tokenizer: "):
        Sequential(loaded.model, object())


class Scripted(Engine):
    """Says the same to every request."""

    def __init__(self, model, tokenizer, said="Aye"):
        super().__init__(model, tokenizer)
        self._said = said

    def start(self, answer, ids, config, body, parser):
        loop = asyncio.get_running_loop()
        answer.streamer = DirectStreamer(self.tokenizer.backend_tokenizer, loop, answer, parser)
        answer.streamer.put(torch.tensor([ids]))
        for token in self.tokenizer.encode(self._said, add_special_tokens=False):
            answer.streamer.put(torch.tensor([token]))
        answer.streamer.end()


def _asked_for_tools(folder, said, *, end="<|im_start|>assistant{{ '\\n' }}", **fields):
    """Ask a model that answers ``said`` and whose prompts end with ``end``. Return the status and the answer."""
    loaded = load_model(str(folder), dtype="float32", device="cpu")
    loaded.tokenizer.chat_template = "{% if tools %}{{ tools }}{% endif %}" + TEMPLATE + end
    loaded.model.config.model_type = "qwen3"  # whose response template Transformers knows
    tools = [{"type": "function", "function": {"name": "add"}}]
    body = {"messages": CHAT, "tools": tools, "max_tokens": 100} | fields
    gate, sent = make_app(Scripted(loaded.model, loaded.tokenizer, said)), []
    return asyncio.run(_ask(gate, "/v1/chat/completions", "POST", body=json.dumps(body).encode(), sent=sent)), sent


def _say(*arguments, **fields):
    """Return the message of an answer, joined from pieces if it is streamed, and why it ended."""
    status, sent = _asked_for_tools(*arguments, **fields)
    assert status == 200
    text = b"".join(message.get("body", b"") for message in sent).decode()
    if not fields.get("stream"):
        (choice,) = json.loads(text)["choices"]
        return choice["message"], choice["finish_reason"]
    choices = [json.loads(event[6:])["choices"][0] for event in text.split("\n\n") if event.startswith("data: {")]
    deltas = [choice["delta"] for choice in choices]
    message = {name: "".join(each.get(name, "") for each in deltas) for name in ("content", "reasoning_content")}
    calls = [call for each in deltas for call in each.get("tool_calls", ())]
    return message | {"tool_calls": calls}, choices[-1]["finish_reason"]


ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("is_streamed", [False, True])
def test_reasoning_and_tool_calls_are_parsed(folder, is_streamed):
    message, reason = _say(folder, f"<think>one and one</think>\n{ADD}", stream=is_streamed)
    assert (message["reasoning_content"], reason) == ("one and one", "tool_calls")
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]


@pytest.mark.parametrize("wrong", ['{"name": add}', '{"name": "add"}', '{"foo": 1}', "[1]", '"add"'])
@pytest.mark.parametrize("end", ["</tool_call>", ""])
def test_a_malformed_tool_call_is_text(folder, wrong, end):
    """Small models write them often. The answer must not fail, and later calls are still calls."""
    later = f" and {ADD}" if end else ""
    message, reason = _say(folder, f"So <tool_call>{wrong}{end}{later}")
    assert message["content"] == f"So{wrong}" + " and" * bool(later)
    assert (len(message.get("tool_calls", ())), reason) == ((1, "tool_calls") if later else (0, "stop"))


def test_an_answer_that_is_cut_off_after_a_tool_call_says_so(folder):
    message, reason = _say(folder, f"{ADD}\n<tool_call>", max_tokens=20)
    assert (len(message["tool_calls"]), reason) == (1, "length")


def test_a_chat_format_that_the_parser_does_not_know_leaves_the_text_as_it_is(folder):
    """Transformers chooses the parser by the model type. DeepSeek-R1-Distill-Qwen has another chat format than Qwen."""
    message, reason = _say(folder, ADD, end="Assistant:", tools=None)
    assert (message["content"], reason) == (ADD, "stop")
    status, sent = _asked_for_tools(folder, ADD, end="Assistant:")
    assert (status, json.loads(sent[-1]["body"])["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("first", [{"role": "developer", "content": "Be kind."}, CALL], ids=["message", "call"])
def test_instructions_replace_nothing_of_the_input(folder, monkeypatch, first):
    loaded, seen = load_model(str(folder), dtype="float32", device="cpu"), []
    apply = loaded.tokenizer.apply_chat_template

    def note(messages, **options):
        seen.extend((each["role"], each["content"]) for each in messages)
        return apply(messages, **options)

    monkeypatch.setattr(loaded.tokenizer, "apply_chat_template", note)
    body = {"input": [first, {"role": "user", "content": "Hello"}], "instructions": "Be brief."}
    gate = make_app(Scripted(loaded.model, loaded.tokenizer))
    assert asyncio.run(_ask(gate, "/v1/responses", "POST", body=json.dumps(body).encode())) == 200
    begun = ("assistant", "") if first is CALL else ("system", "Be kind.")
    assert seen == [("system", "Be brief."), begun, ("user", "Hello")]


def test_an_input_that_begins_with_a_call_is_refused(folder):
    """Transformers would take all of it for the parts of one message, and drop them."""
    loaded = load_model(str(folder), dtype="float32", device="cpu")
    loaded.tokenizer.chat_template = "{{ messages }}"
    body = {"input": [CALL, {"role": "user", "content": "Hello"}]}
    gate = make_app(Scripted(loaded.model, loaded.tokenizer))
    assert asyncio.run(_ask(gate, "/v1/responses", "POST", body=json.dumps(body).encode())) == 400


def test_others_are_answered_while_a_prompt_is_tokenized(folder, monkeypatch):
    loaded, is_free = load_model(str(folder), dtype="float32", device="cpu"), threading.Event()
    apply = loaded.tokenizer.apply_chat_template

    def wait(*arguments, **options):
        assert is_free.wait(TIMEOUT)
        return apply(*arguments, **options)

    async def ask():
        monkeypatch.setattr(loaded.tokenizer, "apply_chat_template", wait)
        gate, body = make_app(Scripted(loaded.model, loaded.tokenizer)), {"messages": CHAT, "max_tokens": 100}
        asking = asyncio.create_task(_ask(gate, "/v1/chat/completions", "POST", body=json.dumps(body).encode()))
        await asyncio.sleep(0)
        health = await _ask(gate, "/health")
        is_waiting = not asking.done()
        is_free.set()
        return health, is_waiting, await asking

    assert asyncio.run(ask()) == (200, True, 200)


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


def test_one_sort_keeps_the_tokens_that_two_keep():
    given = SimpleNamespace(top_k=1, top_p=0.5, filter_value=-torch.inf, min_tokens_to_keep=1)
    limits = [(k, p) for k in (1, 2, 4, 5, 99) for p in (0.0, 0.35, 0.6, 0.8, 0.99, 1.0)]
    top_k = torch.tensor([k for k, _ in limits], dtype=torch.int32)
    top_p = torch.tensor([p for _, p in limits]).view(torch.int32)
    scores = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log().expand(len(limits), -1)
    twice = BatchTopP(given)(BatchTopK(given)(scores, top_k), top_p)
    mine = _TopK(given)
    assert _TopP(given, mine)(mine(scores, top_k), top_p).equal(twice)
    assert len({*(twice > -torch.inf).sum(-1).tolist()}) == 5


def test_batches_that_do_not_compile_are_an_error(monkeypatch):
    def fail(manager):
        raise RuntimeError("no compiler\nlong output")

    monkeypatch.setattr("dma_hf.integrations.manager.DMAManager.warmup", fail)
    with pytest.raises(UserError, match="no compiler"):
        load(_options(attn="dma_mxfp+int8", continuous_batching=True, cache_gib=0.1, compile=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache-gib", "1"], "--cache-gib is for --continuous-batching"),
        (["--compile"], "--compile is for --continuous-batching"),
        (["--api-key", ""], "--api-key: "),
        (["--replicas", "3", "--max-replicas", "2"], "--max-replicas: "),
    ],
    ids=str,
)
def test_wrong_command_lines(arguments, message, run, refused):
    assert message in refused(run("serve", DEMO_MODEL, *arguments))


def test_a_port_in_use(run, refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", DEMO_MODEL, "--host", "127.0.0.1", "--port", port)
    assert f"--port: cannot listen at 127.0.0.1:{port}: Address already in use; " in refused(result)


def test_the_key_comes_from_the_environment_and_a_missing_chat_template_triggers_a_warning(run, monkeypatch):
    gates = []
    monkeypatch.setattr("dma_hf.serving.app.run", lambda gate, *arguments, **options: gates.append(gate))
    monkeypatch.setattr(serve, "_end_process", lambda: 0)
    monkeypatch.setenv("DMA_HF_API_KEY", "secret")
    result = run("serve", DEMO_MODEL, "--device", "cpu", "--port", "0")
    assert result.exit_code == 0
    assert "has no chat template" in " ".join(result.stderr.split())
    assert asyncio.run(_ask(gates[0], "/v1/models")) == 401
    body = json.dumps({"messages": CHAT}).encode()
    assert asyncio.run(_ask(gates[0], "/v1/chat/completions", "POST", "secret", body=body)) == 400


@pytest.mark.parametrize(
    ("attn", "preset", "cache"),
    [("dma_mxfp", "fp4", "int8"), ("dma_mxfp+int4", "fp4", "int4"), ("dma_mxfp:balanced", "balanced", None)],
)
def test_a_name_without_a_preset_keeps_the_settings_in_config_json(tmp_path, attn, preset, cache):
    saved = load_model(str(DEMO_MODEL), dtype="float32", device="cpu")
    activate(saved.model, parse_backends(["dma_mxfp:fp4+int8"])[0])
    saved.model.save_pretrained(tmp_path)
    saved.tokenizer.save_pretrained(tmp_path)
    engine, _ = load(_options(tmp_path, attn=attn))
    assert DMAConfig(**engine.model.config.dma_mxfp) == DMAConfig.from_preset(preset, cache=cache)


def test_an_invalid_section_in_config_json_is_an_error(tmp_path):
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dma_mxfp": {"low": "fp5"}}))
    with pytest.raises(UserError, match=r"cannot serve .* with dma_mxfp: .*fp5"):
        load(_options(tmp_path))


def test_packages_that_are_missing_are_named(run, refused, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert "serve needs uvicorn, " in refused(run("serve", DEMO_MODEL))
