"""``dma-hf bench serve --url``, against a server that answers in known pieces and refuses some requests."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import fmean, stdev

import pytest

pytest.importorskip("openai")
from dma_eval.bench.requests import parse_requests
from dma_eval.bench.serve_url import Answer, Target, arrival_times, summarize

FIRST_SECONDS, BETWEEN_SECONDS = 0.1, 0.02


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def _answer(self, status, kind, body):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.server.raw_models is not None:
            self._answer(200, "application/json", self.server.raw_models)
            return
        models = [{"id": name, "object": "model", "created": 0, "owned_by": ""} for name in self.server.models]
        self._answer(200, "application/json", json.dumps({"object": "list", "data": models}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append((time.perf_counter(), body))
            is_refused = body["max_tokens"] == self.server.refused_tokens
        if self.server.raw is not None:
            self.wfile.write(self.server.raw)
            return
        if is_refused:
            self._answer(429, "application/json", b'{"error": {"message": "too many requests", "type": "x"}}')
            return
        self._answer(200, "text/event-stream", b"")
        time.sleep(FIRST_SECONDS)
        for index in range(body["max_tokens"]):
            time.sleep(BETWEEN_SECONDS if index else 0)
            self._send({"choices": [{"index": 0, "text": "word "}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"], "total_tokens": 0}
        self._send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, fields):
        event = {"id": "1", "object": "text_completion", "created": 0, "model": "served"} | fields
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.models, server.bodies, server.lock, server.refused_tokens = ["served"], [], threading.Lock(), None
    server.raw = server.raw_models = None
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def measure(run, server, model_folder, tmp_path):
    """Measure the server; returns the command's result, and the JSON file."""

    def measured(*arguments):
        file = tmp_path / "served.json"
        url = f"http://127.0.0.1:{server.server_port}/v1"
        result = run("bench", "serve", "--url", url, "--tokenizer", model_folder, "--json", file, *arguments)
        return result, json.loads(file.read_text()) if file.exists() else None

    return measured


def test_times_and_tokens(measure, server):
    result, report = measure("--requests", "6x10-20+5")
    assert result.exit_code == 0, result.output
    (measured,) = report["results"]
    assert (report["model"], measured["rate"], measured["completed"], measured["errors"]) == ("served", None, 6, {})
    assert measured["new_tokens"] == 30
    bodies = [body for _, body in server.bodies[-6:]]
    assert measured["prompt_tokens"] == sum(len(body["prompt"]) for body in bodies)
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in bodies)
    assert measured["first_token_seconds"] >= FIRST_SECONDS
    assert measured["seconds"] >= FIRST_SECONDS + 4 * BETWEEN_SECONDS
    assert measured["tokens_per_second"] == pytest.approx(30 / measured["seconds"])
    assert "served at http" in result.stdout


def test_making_prompts_is_not_timed(measure, monkeypatch):
    def make_slowly(self, ids):
        time.sleep(0.3)
        return f"a prompt of {len(ids)} tokens"

    monkeypatch.setattr(Target, "_text", make_slowly)
    result, report = measure("--requests", "6x5+1")
    assert result.exit_code == 0, result.output
    assert report["results"][0]["seconds"] < 6 * 0.3


def test_figures_of_answers():
    (requests,) = parse_requests(["3x5+2"])
    answers = [
        Answer(0.0, [0.5, 0.6, 0.9], prompt_tokens=5, new_tokens=4),
        Answer(1.0, [1.7, 2.0], prompt_tokens=5, new_tokens=2),
        Answer(2.0, [], error="refused"),
    ]
    result = summarize(requests, 1.0, answers)
    assert (result.completed, result.errors, result.prompt_tokens, result.new_tokens) == (2, {"refused": 1}, 10, 6)
    assert (result.seconds, result.tokens_per_second) == (2.0, 3.0)
    assert result.first_token_seconds == pytest.approx(0.6)
    assert result.between_tokens_milliseconds == pytest.approx(300)


def test_the_time_before_the_first_request_is_not_counted():
    (requests,) = parse_requests(["2x5+2"])
    result = summarize(requests, 0.1, [Answer(10.0, [10.5, 11.0], new_tokens=2), Answer(11.5, [12.0], new_tokens=2)])
    assert (result.seconds, result.tokens_per_second) == (2.0, 2.0)


def test_requests_come_at_the_rate(measure):
    result, report = measure("--requests", "12x5+1", "--rate", 20, 1000)
    assert result.exit_code == 0, result.output
    for measured, rate in zip(report["results"], (20, 1000), strict=True):
        assert measured["rate"] == rate
        times = arrival_times(12, rate, seed=0)
        assert measured["seconds"] > times[-1] - times[0] + FIRST_SECONDS / 2  # the first may be sent late


def test_times_of_arrival_are_random():
    times = arrival_times(5000, 4.0, seed=1)
    assert times == sorted(times) == arrival_times(5000, 4.0, seed=1) != arrival_times(5000, 4.0, seed=2)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 4, rel=0.1)
    assert stdev(gaps) == pytest.approx(1 / 4, rel=0.1)  # as in a Poisson process
    assert arrival_times(3, math.inf, seed=1) == [0, 0, 0]


def test_the_same_requests_come_each_time(measure, server):
    measure("--requests", "3x5-9+2")
    measure("--requests", "3x5-9+2")
    prompts = [sorted(body["prompt"] for _, body in server.bodies[first : first + 3]) for first in (8, 19)]
    assert prompts[0] == prompts[1]


def test_refused_requests_are_counted(measure, server):
    server.refused_tokens = 3
    result, report = measure("--requests", "4x5+3", "4x5+2")
    assert result.exit_code == 1
    refused, answered = report["results"]
    assert (refused["completed"], sum(refused["errors"].values()), refused["seconds"]) == (0, 4, None)
    assert "too many requests" in next(iter(refused["errors"]))
    assert (answered["completed"], answered["errors"]) == (4, {})
    assert "4 requests failed" in " ".join(result.stderr.split())
    result, _ = measure("--requests", "1x5+3")
    assert "1 request failed" in " ".join(result.stderr.split())


EVENT = b'data: {"choices": [{"index": 0, "text": "word"}]}\n\n'


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"Content-Type: text/event-stream\r\n\r\n" + EVENT, "the answer ends without its usage"),
        (b"Content-Type: text/event-stream\r\n\r\ndata: {\n\n", "Expecting property name"),
        (b"Content-Type: text/event-stream\r\n\r\ndata: [1]\n\n", "'list' object"),
        (b'Content-Type: text/event-stream\r\n\r\ndata: {"choices": null}\n\n', "'NoneType' object"),
        (b"Content-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n" + EVENT, "Connection error"),
        (b'Content-Type: application/json\r\n\r\n{"choices": [{"text": "word"}]}', "the answer has no text"),
    ],
    ids=["early end", "no JSON", "list", "null", "cut off", "no stream"],
)
def test_answers_in_another_form_are_errors(measure, server, raw, message):
    server.raw = b"HTTP/1.0 200 OK\r\n" + raw
    result, report = measure("--requests", "2x5+2")
    assert result.exit_code == 1
    (measured,) = report["results"]
    (error,) = measured["errors"]
    assert message in error
    assert (measured["completed"], measured["errors"][error]) == (0, 2)


@pytest.mark.parametrize("models", [b"{", b"[]", b'"model"', b'{"data": [5]}'], ids=str)
def test_models_in_another_form_are_an_error(measure, server, refused, models):
    server.raw_models = models
    assert "/v1/models: " in refused(measure()[0])


def test_a_model_that_the_server_lacks(measure, server, refused):
    assert "--model: the server has no 'other'; it has served" in refused(measure("--model", "other")[0])
    server.models = ["one", "two"]
    assert "--url: the server has 2 models; choose one by --model" in refused(measure()[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9/v1"], "--url: no server at http://127.0.0.1:9/v1"),
        (["--url", "http://127.0.0.1:9/v1", "--layers", "2"], "--url excludes --layers"),
        (
            ["--url", "http://127.0.0.1:9/v1", "--attn", "sdpa", "--dtype", "float16", "--device", "cpu"],
            "--url excludes --attn, --dtype, --device: the server has its own model",
        ),
        (["--url", "http://127.0.0.1:9/v1", "--extra-body", "[]"], "--extra-body: expected a JSON object, got '[]'"),
        (["--url", "http://127.0.0.1:9/v1", "--requests", "x"], "--requests: expected COUNTxPROMPT+NEW"),
        (["--rate", "2"], "--rate: only with --url"),
        (["--extra-body", "{}"], "--extra-body: only with --url"),
    ],
    ids=str,
)
def test_wrong_command_lines(arguments, message, run, refused):
    assert message in refused(run("bench", "serve", *arguments))
