"""Whether the Hub answers, and what a command does if it does not."""

from __future__ import annotations

import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub
import pytest
from dma_eval.errors import UserError
from dma_eval.load import hub


@pytest.fixture(autouse=True)
def online(monkeypatch, tmp_path):
    """As on a machine that sets no variable, with a cache that holds one model."""
    for name in hub.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--tiny" / "snapshots").mkdir(parents=True)


@pytest.fixture
def closed(monkeypatch):
    """No server at the Hub's address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")


@pytest.fixture
def answering(monkeypatch):
    """A server that answers every request by an error."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


@pytest.mark.usefixtures("answering")
def test_a_hub_that_answers_changes_nothing(capsys):
    hub.check_inputs("org/unknown")
    assert hub.OFFLINE[0] not in os.environ
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize("inputs", [("org/tiny",), (".", __file__, "org/text"), (None, None, "org/text")])
def test_without_a_network_the_cache_is_used(inputs, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    hub.check_inputs(*inputs)
    assert os.environ[hub.OFFLINE[0]] == "1"
    told = " ".join(capsys.readouterr().err.split())
    assert "cannot be reached (Connection refused); the Hub's cache is used" in told


def test_an_address_that_is_none_is_shown(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "hub.example")
    message = r"--model: cannot load 'tiny': .*cache has no such model, and hub\.example .* reached \(unknown url type"
    with pytest.raises(UserError, match=message):
        hub.check_inputs("tiny")


@pytest.mark.parametrize("variable", hub.OFFLINE)
def test_a_variable_that_forbids_the_network_is_named(variable, monkeypatch):
    monkeypatch.setenv(variable, "true")
    hub.check_inputs("org/tiny")
    with pytest.raises(UserError, match=f"and {variable} is set$"):
        hub.check_inputs("org/unknown")
