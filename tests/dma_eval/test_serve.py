"""``dma-hf serve``: the command, in a process of its own, over HTTP, with the demo model and a chat template."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import pytest
from dma_eval.backends import activate, parse_backends
from dma_eval.commands import serve
from dma_eval.models import load_model

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators", reason="before Transformers 5.23")
ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "eval" / "dma_eval" / "assets" / "demo_model"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
COARSE = 'low = "mxfp4"\nhigh = "mxfp4"\nshared_scale = "block"\nscale_rounding = "floor"\npv = "bf16"\n'
"""Loses so much that its words are not SDPA's."""
NEW_TOKENS = 16
TIMEOUT = 60  # seconds


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

    def __init__(self, address: str) -> None:
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
        return [json.loads(line.removeprefix("data: ")) for line in lines if line]

    def _post(self, path, body):
        headers = {"Content-Type": "application/json"}
        return self._open(Request(self._address + path, json.dumps(body).encode(), headers), timeout=TIMEOUT)


@contextmanager
def _serving(*arguments):
    """Run the command at any free port; at the end it must stop by itself when it is interrupted."""
    path = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "eval"))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}
    command = [sys.executable, "-m", "dma_eval", "serve", "--port", "0", "--host", "127.0.0.1", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()  # ends with the process too
        assert " at http://127.0.0.1:" in line, line + process.stderr.read()
        yield Client(line.split()[-1].removesuffix("/v1"))
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, told
        assert "Traceback" not in told
    finally:
        process.kill()
        process.communicate()


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


def _arguments(folder, suffix=""):
    return (folder, "--dtype", "float32", "--attn", f"dma_mxfp:{folder / 'coarse.toml'}{suffix}")


@pytest.fixture(scope="module")
def client(folder):
    """Of a server that answers from a packed cache."""
    with _serving(*_arguments(folder, "+int4")) as client:
        yield client


@pytest.fixture
def asked(question):
    return {"messages": [{"role": "user", "content": question}], "max_tokens": NEW_TOKENS, "temperature": 0}


def test_an_answer_is_that_of_the_backend_and_its_cache(client, expected, asked):
    answer = client.post("/v1/chat/completions", **asked)
    assert answer["choices"][0]["message"]["content"] == expected["+int4"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == NEW_TOKENS


def test_an_answer_in_pieces(client, expected, asked):
    events = client.stream("/v1/chat/completions", **asked)
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert sum(map(bool, pieces)) > NEW_TOKENS / 2
    assert "".join(pieces) == expected["+int4"]
    assert events[-1]["usage"]["completion_tokens"] == NEW_TOKENS


def test_a_stop_string_ends_an_answer(client, expected, asked):
    stop = expected["+int4"].split()[3]
    upto = expected["+int4"].partition(stop)[0] + stop
    assert upto != expected["+int4"]
    (choice,) = client.post("/v1/chat/completions", **asked, stop=[stop])["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (upto, "stop")
    events = client.stream("/v1/chat/completions", **asked, stop=stop)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == upto


def test_plain_text(client, expected, question):
    body = {"prompt": question, "max_tokens": NEW_TOKENS, "temperature": 0}
    assert client.post("/v1/completions", **body)["choices"][0]["text"] == expected["+int4"]
    events = client.stream("/v1/completions", **body)
    assert "".join(event["choices"][0]["text"] for event in events) == expected["+int4"]


def test_a_request_that_cannot_be_computed_is_told_why(client, question):
    with pytest.raises(HTTPError) as refused:
        client.post("/v1/completions", prompt=question, max_tokens=-3)
    assert refused.value.code == 400
    assert "must be greater than 0, but is -3" in json.load(refused.value)["detail"]


def test_responses(client, expected, question):
    answer = client.post("/v1/responses", input=question, max_output_tokens=NEW_TOKENS, temperature=0, stream=False)
    assert answer["output"][0]["content"][0]["text"] == expected["+int4"]


def test_the_model_is_the_only_one(client, folder, asked):
    (entry,) = client.get("/v1/models")["data"]
    assert entry["id"] == str(folder)
    with pytest.raises(HTTPError) as refusal:
        client.post("/v1/chat/completions", **asked, model="another")
    assert refusal.value.code == 400
    assert "pinned to" in refusal.value.read().decode()
    assert client.stream("/load_model", model=str(folder))[0]["status"] == "ready"  # as `transformers chat` begins
    assert client.stream("/load_model", model="another")[0]["status"] == "error"


def test_the_model_stays_after_a_reset(client, expected, asked):
    """Transformers' own manager would load it again, with SDPA."""
    assert client.post("/reset") == {"status": "ok"}
    assert client.post("/v1/chat/completions", **asked)["choices"][0]["message"]["content"] == expected["+int4"]
    assert client.get("/health") == {"status": "ok"}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", "+int4"])
def test_continuous_batching(suffix, folder, expected, question):
    arguments = (*_arguments(folder, suffix), "--continuous-batching", "--cache-gib", 0.1)
    with _serving(*arguments) as client, ThreadPoolExecutor() as pool:
        body = {"prompt": question, "max_tokens": NEW_TOKENS, "temperature": 0}
        answers = list(pool.map(lambda _: client.post("/v1/completions", **body), range(3)))
        events = client.stream("/v1/completions", **body)
        for path in ("/v1/completions", "/v1/chat/completions"):
            with pytest.raises(HTTPError) as refusal:
                client.post(path, **body, stop=["."])
            assert "continuous batching has no stop strings" in refusal.value.read().decode()
    assert [answer["choices"][0]["text"] for answer in answers] == [expected[suffix]] * 3
    assert "".join(event["choices"][0]["text"] for event in events) == expected[suffix]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./nowhere"], "no such folder: ./nowhere"),
        ([DEMO_MODEL, "--attn", "dma_mxfp:kv9"], "--attn: unknown preset 'kv9'; valid: balanced"),
        ([DEMO_MODEL, "--attn", "flash9"], "--attn: unknown backend 'flash9'; valid: "),
        ([DEMO_MODEL, "--attn", "sdpa+int4"], "--attn: 'sdpa' takes no setting, got 'sdpa+int4'"),
        ([DEMO_MODEL, "--cache-gib", "1"], "--cache-gib is for --continuous-batching"),
        ([DEMO_MODEL, "--port", "99999"], "--port: expected at least 0, at most 65535, got 99999"),
        ([DEMO_MODEL, "--host", "no.such.host.invalid", "--port", "0"], "cannot listen at no.such.host.invalid:0: "),
        ([], "required: NAME|FOLDER|FILE.gguf"),
    ],
    ids=str,
)
def test_wrong_command_lines(arguments, message, run, refused):
    assert message in refused(run("serve", *arguments))


def test_a_port_in_use(run, refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", DEMO_MODEL, "--host", "127.0.0.1", "--port", port)
    assert f"--port: cannot listen at 127.0.0.1:{port}: Address already in use; choose another" in refused(result)


def test_a_model_without_chat_template_is_told_of(run, monkeypatch):
    monkeypatch.setattr("dma_eval.serving.serve", lambda *arguments, **options: None)
    result = run("serve", DEMO_MODEL, "--device", "cpu", "--port", "0")
    assert result.exit_code == 0
    assert "has no chat template, which /v1/chat/completions needs" in " ".join(result.stderr.split())


def test_packages_that_are_missing_are_named(run, refused, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    message = refused(run("serve", DEMO_MODEL))
    assert "serve needs uvicorn, not installed here: pip install 'dma-hf[serve]'" in message


def test_an_older_transformers(run, refused, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "5.17.0")
    assert "serve needs Transformers 5.23 or later, found 5.17.0" in refused(run("serve", DEMO_MODEL))
