"""Limits of ``dma-hf serve``: keys, too many requests, the end of the process, and wrong command lines."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import signal
import socket

import pytest
from dma_eval.commands import serve
from dma_eval.commands.serve import load
from dma_eval.errors import UserError
from dma_eval.load.backends import activate, parse_backends
from dma_eval.load.models import load_model
from sampling import sampled
from serve_requests import CHAT, TIMEOUT, fill_server, serve_options, serving, status_of
from served import DEMO_MODEL

from dma_hf import DMAConfig
from dma_hf.serving.gate import Gate


@pytest.mark.slow
@pytest.mark.parametrize("stop", sampled([signal.SIGINT, signal.SIGTERM], signal.SIGINT.__eq__))
def test_the_server_stops_whatever_runs(arguments, stop):
    """Within a long prompt, and with another request waiting."""
    with serving(*arguments("+int4"), "--max-requests", 2, stop=stop) as client:
        statuses = fill_server(client, 2)
    assert [status.result(TIMEOUT) for status in statuses] == [503, 503]


async def answer_all(scope, receive, send):
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
        gate = Gate(answer_all, api_key="secret", most=2)
        statuses = [await status_of(gate, path, method, key)]
        others = [asyncio.create_task(status_of(gate, path, method, key, body=None)) for _ in range(2)]
        await asyncio.sleep(0)
        statuses += [await status_of(gate, "/v1/responses", "POST", "secret"), await status_of(gate, "/health")]
        for other in others:
            other.cancel()
        await asyncio.wait(others)
        return [*statuses, await status_of(gate, "/v1/responses", "POST", "secret")]

    assert asyncio.run(asyncio.wait_for(ask(), TIMEOUT)) == [status, status_of_next, 200, 200]


def test_a_server_that_stops_cancels_what_answers():
    ended = []

    async def answer_never(scope, receive, send):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("answer")

    async def ask():
        gate = Gate(answer_never)
        asking = asyncio.create_task(status_of(gate, "/v1/models"))
        await asyncio.sleep(0.01)
        gate.close()
        status = await asking
        return status, [*ended]

    assert asyncio.run(asyncio.wait_for(ask(), TIMEOUT)) == (503, ["answer"])


@pytest.mark.parametrize(("scheme", "status"), [("bearer", 200), ("BEARER", 200), ("Basic", 401), ("", 401)])
def test_the_scheme_of_a_key_has_no_case(scheme, status):
    """RFC 9110, section 11.1."""
    assert (
        asyncio.run(status_of(Gate(answer_all, api_key="secret"), "/v1/models", key="secret", scheme=scheme)) == status
    )


@pytest.mark.parametrize("key", ["", " ", "secret\n"])
def test_a_key_that_no_header_can_carry_is_refused(key):
    """Such as that of a file with a line end: every request would be refused."""
    with pytest.raises(ValueError, match="api_key: "):
        Gate(answer_all, api_key=key)


def test_a_client_that_keeps_its_body_back_frees_its_place(monkeypatch):
    """Such as one that lost its network: its connection stays open."""
    monkeypatch.setattr("dma_hf.serving.gate.BODY_SECONDS", 0.01)

    async def ask():
        gate = Gate(answer_all, most=1)
        return [await status_of(gate, "/v1/completions", "POST", body=body) for body in (None, b"")]

    assert asyncio.run(asyncio.wait_for(ask(), TIMEOUT)) == [408, 200]


def test_stopping_ends_open_requests_whether_they_have_begun_to_answer_or_not():
    async def application(scope, receive, send):
        if scope["path"] == "/v1/responses":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await asyncio.Event().wait()

    async def stop():
        gate, sent = Gate(application), []
        asked = [asyncio.create_task(status_of(gate, path, sent=sent)) for path in ("/v1/completions", "/v1/responses")]
        await asyncio.sleep(0.01)
        gate.close()
        statuses = await asyncio.wait_for(asyncio.gather(*asked), TIMEOUT)
        return [*statuses, await status_of(gate, "/v1/models")], sent

    statuses, sent = asyncio.run(stop())
    assert statuses == [503, 200, 503]
    events = [message["body"] for message in sent if b"shutting down" in message.get("body", b"")]
    whole, event = (json.loads(body.removeprefix(b"data: ")) for body in events)
    assert (whole["error"]["type"], event["type"]) == ("server_error", "error")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache-gib", "1"], "--cache-gib is for --continuous-batching"),
        (["--compile"], "--compile is for --continuous-batching"),
        (["--attn", "sdpa+fp8"], "--attn: a server cannot keep the cache +fp8"),
        (["--api-key", ""], "--api-key: expected a key"),
        (["--api-key", "secret\n"], "--api-key: expected no spaces"),
        (["--host", ""], "--host: "),
        (["--gpus-per-replica", "2"], "--gpus-per-replica is for --replicas"),
        (
            ["--replicas", "2", "--gpus-per-replica", "2", "--device", "cuda"],
            "--gpus-per-replica: with several GPUs the layers are spread over them; leave out --device",
        ),
        (["--max-queued", "5"], "--max-queued is for --replicas"),
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
    result = run("serve", DEMO_MODEL, "--device", "cpu", "--port", "0", code=0)
    assert "has no chat template" in " ".join(result.stderr.split())
    assert asyncio.run(status_of(gates[0], "/v1/models")) == 401
    body = json.dumps({"messages": CHAT}).encode()
    assert asyncio.run(status_of(gates[0], "/v1/chat/completions", "POST", "secret", body=body)) == 400


@pytest.mark.parametrize(
    ("attn", "preset", "cache"),
    [("dma_mxfp", "fp4", "int8"), ("dma_mxfp+int4", "fp4", "int4"), ("dma_mxfp:balanced", "balanced", None)],
)
def test_a_name_without_a_preset_keeps_the_settings_in_config_json(tmp_path, attn, preset, cache):
    saved = load_model(str(DEMO_MODEL), dtype="float32", device="cpu")
    activate(saved.model, parse_backends(["dma_mxfp:fp4+int8"])[0])
    saved.model.save_pretrained(tmp_path)
    saved.tokenizer.save_pretrained(tmp_path)
    engine, _ = load(serve_options(tmp_path, attn=attn))
    assert DMAConfig(**engine.model.config.dma_mxfp) == DMAConfig.from_preset(preset, cache=cache)


def test_an_invalid_section_in_config_json_is_an_error(tmp_path):
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dma_mxfp": {"low": "fp5"}}))
    with pytest.raises(UserError, match=r"cannot serve .* with dma_mxfp: .*fp5"):
        load(serve_options(tmp_path))


def test_packages_that_are_missing_are_named(run, refused, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert "serve needs uvicorn, " in refused(run("serve", DEMO_MODEL))
