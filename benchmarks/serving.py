"""Measure a server under load with guidellm: tokens per second, first token, time between tokens, and goodput.

    python benchmarks/serving.py --json load-int4.json dma-hf serve MODEL --attn dma_mxfp:balanced+int4 \
        --continuous-batching --max-requests 256
    python benchmarks/serving.py --json load-vllm.json vllm serve MODEL
    python benchmarks/serving.py --load 1024+128@1,8,32,128 --load 3072:256+128@32 transformers serve MODEL \
        --continuous-batching

The rest of the command starts the server: ``PROGRAM serve MODEL`` and options, except ``--port``. Needs the program
``guidellm`` (``pip install guidellm==0.8.1``), which may be in another virtual environment.

A load is ``PREFIX:PROMPT+NEW@STREAMS``. Prompts are random words of PROMPT tokens, after a shared prefix of PREFIX
tokens, if any. Answers have NEW tokens. Each number of STREAMS runs for ``--seconds``: so many clients send one request
after another. Requests that are not finished at the end count for tokens per second alone. Untimed requests come first.

The time between tokens is the mean of a request. Goodput is the completed requests per second that meet both
limits. Exit code 1 if a request failed, 2 for invalid input.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from dma_eval import console
from dma_eval.environment import portable
from dma_eval.errors import UserError
from dma_eval.files import write_json
from dma_eval.results import here_and_now
from kernel_bench.command import duration, run

LOADS = ["1024+128@1,8,32,128", "3072:256+128@32"]
LIMITS = {"ttft_ms": 1000.0, "tpot_ms": 50.0}
"""Limits of goodput, by guidellm's names: the first token, and the mean time between tokens."""
START_SECONDS, STOP_SECONDS = 300, 20
UNTIMED_TOKENS = 16


@dataclass(frozen=True)
class Load:
    """Requests of one kind, by increasing concurrency."""

    prefix: int  # tokens that all prompts share
    prompt: int  # tokens of a prompt's own
    new: int
    streams: list[int]

    @classmethod
    def parse(cls, text: str) -> Load:
        """Parse ``PREFIX:PROMPT+NEW@STREAMS``, or raise a ``UserError``."""
        found = re.fullmatch(r"(?:([1-9]\d*):)?([1-9]\d*)\+([1-9]\d*)@([1-9]\d*(?:,[1-9]\d*)*)", text)
        if found is None:
            raise UserError(f"--load: expected PROMPT+NEW@STREAMS or PREFIX:PROMPT+NEW@STREAMS, got {text!r}")
        return cls(int(found[1] or 0), int(found[2]), int(found[3]), [int(each) for each in found[4].split(",")])


@contextmanager
def serving(command: list[str], log: Path) -> Iterator[str]:
    """Start a server, yield its address when it is healthy, and stop it. An error has the end of its log."""
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://localhost:{port}"
    with log.open("w") as output:
        try:
            server = subprocess.Popen(
                [*command, "--port", str(port)], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise UserError(f"cannot start {command[0]!r}: {error.strerror}") from error
    try:
        end = time.monotonic() + START_SECONDS
        while not is_healthy(url):
            if server.poll() is not None or time.monotonic() > end:
                raise UserError(f"{shlex.join(command)} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        try:
            server.terminate()
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def is_healthy(url: str) -> bool:
    try:
        return bool(urlopen(f"{url}/health", timeout=5).status == 200)
    except (OSError, HTTPException):
        return False


def warm_up(url: str, model: str, load: Load) -> None:
    """Send as many requests at once as the load does. The first calls of a server compile, capture and allocate.

    Raises:
        UserError: The server refuses one, or is gone. The message has the server's.
    """

    def ask(number: int) -> None:
        body = {"model": model, "prompt": f"{number}" + " word" * load.prompt, "max_tokens": UNTIMED_TOKENS}
        headers = {"Content-Type": "application/json"}
        try:
            urlopen(Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)).read()
        except (OSError, HTTPException) as error:
            said = error.read().decode(errors="replace") if isinstance(error, HTTPError) else ""
            raise UserError(
                f"the server answers no request of {load.prompt:,} tokens: {error}: {said[:2000]}"
            ) from error

    for streams in load.streams:
        with ThreadPoolExecutor(streams) as pool:
            list(pool.map(ask, range(streams)))


def client_command(url: str, server: list[str], load: Load, seconds: float, out: Path) -> list[str]:
    """Return the command of guidellm that sends a load to a server."""
    program, _, model, *_ = server
    data = {"kind": "synthetic_text", "prompt_tokens": load.prompt}
    data |= {"prefix_tokens": load.prefix, "prefix_count": 1} if load.prefix else {}
    body: dict[str, Any] = {"temperature": 0}
    backend: dict[str, Any] = {"kind": "openai_http", "target": url, "model": model, "extras": {"body": body}}
    backend["request_format"] = "/v1/completions"
    if Path(program).name == "transformers":  # refuses ignore_eos
        body["generation_config"] = '{"eos_token_id": -1}'
        backend["max_tokens"] = load.new
    else:
        data["output_tokens"] = load.new  # sets ignore_eos
    options = {
        "backend": backend,
        "tokenizer": {"kind": "hf_auto", "model": model},
        "data": data,
        "profile": {"kind": "concurrent"},
        "constraint": {"kind": "max_duration", "seconds": seconds},
        "metrics": {"kind": "generative", "slo": LIMITS},
        "output": {"kind": "json", "path": str(out)},
    }
    given = [part for name, value in options.items() for part in (f"--{name}", json.dumps(value))]
    streams = ",".join(map(str, load.streams))
    return ["guidellm", "run", *given, "--override", "profile.streams", streams, "--disable-console"]


def summarize(load: Load, benchmark: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a benchmark of guidellm. Times and goodput are null if no request was completed."""
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    times: dict[str, float | None] = {}
    for name, metric in (("first_token", "time_to_first_token_ms"), ("between_tokens", "inter_token_latency_ms")):
        found = metrics[metric]["successful"]["percentiles"] if totals["successful"] else {}
        times |= {f"{name}_milliseconds": found.get("p50"), f"{name}_milliseconds_p99": found.get("p99")}
    goodput = metrics["request_goodput"]
    return {
        "prefix_tokens": load.prefix,
        "prompt_tokens": load.prompt,
        "new_tokens": load.new,
        "streams": benchmark["config"]["strategy"]["streams"],
        "seconds": benchmark["duration"],
        **{name: totals[name] for name in ("successful", "errored", "incomplete")},
        "new_tokens_of_an_answer": metrics["output_token_count"]["successful"]["mean"],
        "tokens_per_second": metrics["output_tokens_per_second"]["total"]["mean"],
        "requests_per_second": metrics["requests_per_second"]["successful"]["mean"],
        **times,
        "goodput": goodput and goodput["successful"]["mean"],
    }


def main(args: argparse.Namespace) -> int:
    loads = [Load.parse(text) for text in args.load or LOADS]
    if len(args.server) < 3 or args.server[1] != "serve" or args.server[2].startswith("-"):
        raise UserError(f"expected a server as PROGRAM serve MODEL, got {shlex.join(args.server)!r}")
    if shutil.which("guidellm") is None:
        raise UserError("it needs guidellm, not found on PATH: pip install guidellm")
    report = here_and_now() | {"server": shlex.join(map(portable, args.server)), "limits": LIMITS, "results": []}
    with TemporaryDirectory() as folder, serving(args.server, Path(folder) / "log") as url:
        warm_up(url, args.server[2], loads[0])
        for load in loads:
            out = Path(folder) / "client.json"
            try:
                subprocess.run(client_command(url, args.server, load, args.seconds, out), check=True)
            except subprocess.CalledProcessError as error:
                raise UserError(f"guidellm failed with exit code {error.returncode}; its messages are above") from error
            found = json.loads(out.read_text(encoding="utf-8"))
            report["client"] = f"guidellm {found['metadata']['guidellm_version']}"
            for benchmark in found["benchmarks"]:
                report["results"].append(summarize(load, benchmark))
                console.print_line(json.dumps(report["results"][-1]))
            if args.json is not None:
                write_json(report, args.json)
    failed = sum(each["errored"] for each in report["results"])
    if failed:
        console.print_error(f"{failed} requests failed")
    return int(failed > 0)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results, after every load")
    parser.add_argument("--load", action="append", metavar="LOAD", help=f"default: {' and '.join(LOADS)}")
    parser.add_argument("--seconds", type=duration, default=15, help="how long each number of streams is measured")
    parser.add_argument("server", nargs=argparse.REMAINDER, metavar="PROGRAM serve MODEL ...")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server stops too
    run(main, make_parser())
