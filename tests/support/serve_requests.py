"""Send requests to ``dma-hf serve``: to its process over HTTP, or to its application in this process."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import pytest
import torch
import uvicorn
from dma_eval.commands.serve import ServeOptions, load
from served import DEMO_MODEL, served

from dma_hf.integrations.serving import DirectStreamer
from dma_hf.serving import Engine

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CHAT = [{"role": "user", "content": "The captain"}]
NEW_TOKENS = 8
TIMEOUT = 60  # seconds
STOP_SECONDS = 5


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
def serving(*arguments, stop=signal.SIGINT):
    """Run the command; it must draw no bars of libraries, and stop by itself when interrupted."""
    with TemporaryDirectory() as folder, served(*arguments, log=Path(folder) / "log") as (process, address):
        yield Client(address)
        process.send_signal(stop)
        code = process.wait(STOP_SECONDS)
        told = (Path(folder) / "log").read_text()
    assert code == 0, told
    assert not [bad for bad in ("Traceback", "it/s", "100%") if bad in told], told


def text_of(event):
    (choice,) = event["choices"]
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content", "")


def fill_server(client, most):
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


def serve_options(model=DEMO_MODEL, **options):
    return ServeOptions(**{"model": str(model), "dtype": "float32", "device": "cpu"} | options)


@contextmanager
def running_engine(model=DEMO_MODEL, **options):
    """An engine and its application in this process."""
    engine, gate = load(serve_options(model, attn="dma_mxfp+int4", **options))
    try:
        yield engine, gate
    finally:
        if "continuous_batching" in options:
            engine.close()


async def status_of(gate, path, method="GET", key=None, *, scheme="Bearer", body=b"", sent=None):
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

    headers = [] if key is None else [(b"authorization", f"{scheme} {key}".encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
    await gate(scope, receive, send)
    return status


async def answer_to(gate, path, method="POST", **body):
    """Send a request that succeeds, and return its answer."""
    sent = []
    assert await status_of(gate, path, method, body=json.dumps(body).encode(), sent=sent) == 200
    return json.loads(sent[-1]["body"])


@contextmanager
def listening(gate):
    """Serve an application in a thread, and return the base address for OpenAI's client."""
    server = uvicorn.Server(uvicorn.Config(gate, log_level="critical", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join(TIMEOUT)


class Scripted(Engine):
    """Says the same to every request: a text, or tokens."""

    def __init__(self, model, tokenizer, said="Aye"):
        super().__init__(model, tokenizer)
        self._said = said

    def start(self, answer, ids, config, body, parser):
        loop = asyncio.get_running_loop()
        self._attach(DirectStreamer(self.tokenizer.backend_tokenizer, loop, answer, parser), answer, body)
        answer.streamer.put(torch.tensor([ids]))
        said = self._said
        for token in self.tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else said:
            answer.streamer.put(torch.tensor([token]))
        answer.streamer.end()
