"""``benchmarks/serving.py``: how it runs a server and guidellm, what it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from pathlib import Path

import pytest
import serving
from kernel_bench import command

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
if "--broken" in sys.argv:
    sys.exit("no such model")
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open("requests", "a") as file:
            file.write(json.dumps(body | {"path": self.path, "port": self.server.server_port}) + "\\n")
        self.send_error(400) if "--full" in sys.argv else self.do_GET()
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("localhost", port), Handler).serve_forever()
"""
CLIENT = """
import json, sys
names = ("backend", "data", "output")
given = {name: json.loads(sys.argv[sys.argv.index(f"--{name}") + 1]) for name in names}
with open("given", "a") as file:
    file.write(json.dumps(given) + "\\n")
all_streams = map(int, sys.argv[sys.argv.index("profile.streams") + 1].split(","))
def spread(value):
    return {"successful": {"mean": value, "percentiles": {"p50": value, "p99": 2 * value}}, "total": {"mean": value}}
def benchmark(streams):
    done = 3 if streams < 8 else 0
    return {
        "config": {"strategy": {"streams": streams}},
        "duration": 15.0,
        "metrics": {
            "request_totals": {"successful": done, "errored": given["data"].get("prefix_tokens", 0), "incomplete": 1},
            "time_to_first_token_ms": spread(20.0 * (done > 0)),
            "inter_token_latency_ms": spread(5.0 * (done > 0)),
            "output_token_count": spread(4.0),
            "output_tokens_per_second": spread(100.0),
            "requests_per_second": spread(0.2),
            "request_goodput": spread(0.1) if done else None,
        },
    }
found = [benchmark(streams) for streams in all_streams]
with open(given["output"]["path"], "w") as file:
    json.dump({"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": found}, file)
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Put stand-ins of the programs on PATH, and return the folder where they note what they get."""
    for name, code in (("dma-hf", SERVER), ("transformers", SERVER), ("guidellm", CLIENT)):
        path = tmp_path / name
        path.write_text(f"#!{sys.executable}{code}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmarks/serving.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        command.run(serving.main, serving.make_parser())
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def noted(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_server_is_started_measured_and_stopped(programs, monkeypatch):
    options = ["--json", "new/load.json", "--load", "64+4@1,8"]
    assert invoke(monkeypatch, *options, "dma-hf", "serve", "model", "--attn", "sdpa") == 0
    report = json.loads(Path("new/load.json").read_text())
    assert report["server"] == "dma-hf serve model --attn sdpa"
    assert report["command"] == f"python benchmarks/serving.py {' '.join(options)} dma-hf serve model --attn sdpa"
    assert (report["client"], report["limits"]) == ("guidellm 0.8.1", {"ttft_ms": 1000.0, "tpot_ms": 50.0})
    one, eight = report["results"]
    assert (one["streams"], one["successful"], one["tokens_per_second"], one["goodput"]) == (1, 3, 100.0, 0.1)
    assert (one["first_token_milliseconds"], one["first_token_milliseconds_p99"]) == (20.0, 40.0)
    assert (eight["between_tokens_milliseconds"], eight["goodput"]) == (None, None)  # nothing was completed
    warm_up = noted(programs / "requests")
    assert {request["path"] for request in warm_up} == {"/v1/completions"}
    assert len(warm_up) == 1 + 8
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("localhost", warm_up[0]["port"]))


@pytest.mark.parametrize(
    ("program", "data", "limit", "body"),
    [
        ("dma-hf", {"output_tokens": 4}, None, {"temperature": 0}),
        *(
            (program, {}, 4, {"temperature": 0, "generation_config": '{"eos_token_id": -1}'})
            for program in ("transformers", "{}/transformers")
        ),
    ],
)
def test_answers_have_their_whole_length(programs, monkeypatch, program, data, limit, body):
    assert invoke(monkeypatch, "--load", "64+4@1", program.format(programs), "serve", "model") == 0
    (given,) = noted(programs / "given")
    assert given["data"] == {"kind": "synthetic_text", "prompt_tokens": 64} | data
    assert (given["backend"].get("max_tokens"), given["backend"]["extras"]["body"]) == (limit, body)


def test_failed_requests_of_a_load_with_a_shared_prefix_are_told(programs, monkeypatch, capsys):
    assert invoke(monkeypatch, "--load", "5:64+4@1", "dma-hf", "serve", "model") == 1
    assert "5 requests failed" in capsys.readouterr().err
    (given,) = noted(programs / "given")
    assert (given["data"]["prefix_tokens"], given["data"]["prefix_count"]) == (5, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--load", "64@1", "dma-hf", "serve", "m"],
            "--load: expected PROMPT+NEW@STREAMS or PREFIX:PROMPT+NEW@STREAMS",
        ),
        (["dma-hf", "bench"], "expected a server as PROGRAM serve MODEL, got 'dma-hf bench'"),
        (["dma-hf", "serve", "m", "--broken"], "dma-hf serve m --broken did not start: no such model"),
        (
            ["dma-hf", "serve", "--port", "8000", "m"],
            "expected a server as PROGRAM serve MODEL, got 'dma-hf serve --port",
        ),
        (["--seconds", "inf", "dma-hf", "serve", "m"], "--seconds: expected a finite number of at least 0, got 'inf'"),
        (
            ["dma-hf", "serve", "m", "--full"],
            "the server answers no request of 1,024 tokens: HTTP Error 400: Bad Reque",
        ),
        (["nobody", "serve", "m"], "cannot start 'nobody': No such file"),
    ],
)
def test_what_cannot_be_measured_is_refused(programs, monkeypatch, capsys, arguments, message):
    assert invoke(monkeypatch, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_missing_client_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert invoke(monkeypatch, "dma-hf", "serve", "m") == 2
    assert "needs guidellm, not found on PATH: pip install guidellm" in " ".join(capsys.readouterr().err.split())
