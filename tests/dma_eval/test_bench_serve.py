"""``dma-hf bench serve``: requests and their figures, on a tiny model and a CPU."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dma_eval.bench import serve
from dma_eval.bench.generate import SHAPES, build_model
from dma_eval.bench.requests import Request, parse_requests
from dma_eval.bench.results import ServeResult
from dma_eval.bench.serve import measure, parse_served
from dma_eval.errors import UserError
from dma_eval.load.backends import parse_backends

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators", reason="before Transformers 5.23")
CPU = torch.device("cpu")
SETS = ("5x40-300+6-12", "3x20+5")
ATTN = ("sdpa", "dma_mxfp")
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values, layers, kv heads, head_dim, fp32


@pytest.fixture(scope="module")
def model():
    return build_model("tiny", CPU, torch.float32)


@pytest.fixture(scope="module")
def results(model):
    return list(measure(model, parse_requests(SETS), parse_backends(ATTN), seed=0, cache_gib=None))


def test_every_set_is_answered_by_every_backend(results):
    assert [(r.requests, r.label) for r in results] == [(name, label) for name in SETS for label in ATTN]
    for result in results:
        assert result.failure is None
        assert (result.config is None) == (result.label == "sdpa")
        assert 0 < result.first_token_seconds <= result.first_token_seconds_p99 < result.seconds
        assert 0 < result.between_tokens_milliseconds <= result.between_tokens_milliseconds_p99
        assert 1 <= result.most_at_once <= int(result.requests[0])
        assert result.evicted == 0
        assert result.cache_bytes_per_token == TOKEN_BYTES
        assert result.cache_bytes >= int(result.requests[0]) * 25 * TOKEN_BYTES
        assert result.cache_bytes_per_request == 0
    for one, other in zip(results[::2], results[1::2], strict=True):
        assert (one.speedup, other.speedup) == (1.0, one.seconds / other.seconds)
    assert results[2].tokens_per_second * results[2].seconds == pytest.approx(15)


def test_requests_are_the_same_for_a_seed_and_share_no_beginning():
    (drawn_set,) = parse_requests(["40x30-60+2-9"])
    requests = drawn_set.draw(0, 256)
    assert requests == drawn_set.draw(0, 256)
    assert requests != drawn_set.draw(1, 256)
    lengths = {len(request.prompt) for request in requests}
    assert min(lengths) < 35 < 55 < max(lengths) <= 60
    assert {request.new_tokens for request in requests} == set(range(2, 10))
    assert len({tuple(request.prompt[:16]) for request in requests}) == 40
    assert all(0 <= token < 256 for request in requests for token in request.prompt)


def test_a_small_cache_admits_fewer_requests(model):
    """Room for two pages of 256 tokens."""
    gib = 2.5 * 256 * TOKEN_BYTES / (1 << 30)
    (few,) = measure(model, parse_requests(["6x200+20"]), parse_backends(["sdpa"]), seed=0, cache_gib=gib)
    assert few.failure is None
    assert few.cache_bytes == 512 * TOKEN_BYTES
    assert few.most_at_once == 2


def test_a_backend_that_fails_leaves_the_others(model, monkeypatch):
    def broken(manager, requests):
        if manager.model.config._attn_implementation == "sdpa":
            raise RuntimeError("no room")
        return answer(manager, requests)

    answer = serve._answer
    monkeypatch.setattr(serve, "_answer", broken)
    first, second = measure(model, parse_requests(SETS[1:]), parse_backends(ATTN), seed=0, cache_gib=None)
    assert (first.failure, first.seconds) == ("no room", None)
    assert second.failure is None
    assert second.speedup is None  # there is nothing to compare with


def test_a_request_that_fails_fails_the_run(model, monkeypatch):
    def fail(module, args, kwargs):
        raise ValueError("broken layer")

    hook = model.model.layers[0].register_forward_pre_hook(fail, with_kwargs=True)
    (result,) = measure(model, parse_requests(SETS[1:]), parse_backends(["sdpa"]), seed=0, cache_gib=None)
    hook.remove()
    assert "broken layer" in result.failure


def test_times_of_evicted_requests_are_left_out():
    def output(times, tokens, span):
        return SimpleNamespace(
            timestamps=times, generated_tokens=[0] * tokens, lifespan=span, error=None, is_finished=lambda: True
        )

    outputs = [output([1.0, 2.0], 2, (0.0, 2.0)), output([5.0], 3, (2.0, 5.0)), output([1.5, 3.5], 2, (1.0, 3.5))]
    manager = SimpleNamespace(add_request=lambda *_, **__: None, get_result=lambda timeout: outputs.pop())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve.time, "perf_counter", lambda: 0.5)
        figures = serve._answer(manager, [Request([1], 1)] * 3)
    assert figures["evicted"] == 1
    assert figures["seconds"] == 4.5
    assert figures["tokens_per_second"] == 7 / 4.5
    assert figures["first_token_seconds"] == 0.75
    assert figures["between_tokens_milliseconds"] == 1500
    assert figures["most_at_once"] == 2


def test_batches_are_compiled_on_request(model, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: calls.append(options) or function)
    (result,) = measure(
        model, parse_requests(["2x20+5"]), parse_backends(["dma_mxfp+int8"]),
        seed=0, cache_gib=0.01, is_compiled=True,
    )  # fmt: skip
    assert result.failure is None
    assert len(calls) == 2  # for batches with prompts, and without


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_packed_pages(name, model):
    (result,) = measure(model, parse_requests(SETS[:1]), parse_backends([f"dma_mxfp+{name}"]), seed=0, cache_gib=0.01)
    assert result.failure is None
    assert result.config["cache"] == name
    assert result.most_at_once == 5
    assert 0.98 * 0.01 * (1 << 30) < result.cache_bytes <= 1.1 * 0.01 * (1 << 30)
    assert (
        result.cache_bytes_per_token < TOKEN_BYTES * {"int8": 0.55, "int4": 0.45}[name]
    )  # head_dim 16 has much overhead
    assert result.cache_bytes_per_request >= 3 * 128 * TOKEN_BYTES  # a sink, the band, and the tile being filled


class _Engine:
    """Stands for vLLM's offline engine: it takes a second to add requests, two to the first token, a millisecond to
    others.
    """

    made: list[dict] = []  # noqa: RUF012

    def __init__(self, **options):
        self.made.append(options)
        self.config = json.loads((Path(options["model"]) / "config.json").read_text())

    def generate(self, prompts, params, use_tqdm):
        assert all(0 <= token < self.config["vocab_size"] for each in prompts for token in each["prompt_token_ids"])
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=[0] * each.max_tokens)],
                metrics=SimpleNamespace(
                    arrival_time=time.time() + 1,
                    first_token_latency=2.0,
                    first_token_ts=5.0,
                    last_token_ts=5.0 + 1e-3 * (each.max_tokens - 1),
                ),
            )
            for each in params
        ]


@pytest.mark.parametrize(("label", "dtype"), [("vllm", "auto"), ("vllm:fp8", "fp8")])
def test_vllm_answers_on_the_same_shape(model, monkeypatch, label, dtype):
    fake = SimpleNamespace(LLM=_Engine, SamplingParams=lambda **options: SimpleNamespace(**options))
    monkeypatch.setitem(sys.modules, "vllm", fake)
    one, other = measure(model, parse_requests(SETS[1:]), parse_served(["sdpa", label]), seed=0, cache_gib=0.01)
    assert (one.failure, other.failure) == (None, None)
    assert other.label == label
    assert other.first_token_seconds == pytest.approx(3.0, abs=0.5)
    assert other.between_tokens_milliseconds == pytest.approx(1.0)
    assert other.tokens_per_second * other.seconds == pytest.approx(15)
    options = _Engine.made[-1]
    assert (options["kv_cache_dtype"], options["load_format"], options["dtype"]) == (dtype, "dummy", "float32")
    assert options["kv_cache_memory_bytes"] == int(0.01 * 2**30)
    assert options["max_model_len"] == 28  # the rehearsal's eight tokens


def test_vllm_that_is_not_installed_is_a_failure_that_says_so(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    (result,) = measure(model, parse_requests(SETS[1:]), parse_served(["vllm"]), seed=0, cache_gib=None)
    assert "vLLM is not installed: pip install vllm" in result.failure
    with pytest.raises(UserError, match="vllm is given more than once"):
        parse_served(["vllm", "sdpa", "vllm"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "--requests needs at least one value"),
        (["8x20"], "--requests: expected COUNTxPROMPT.NEW, such as 32x2048.64 or 8x64-512.16, got '8x20'"),
        (["8x20+0"], "numbers are at least 1, and ranges go up, got '8x20.0'"),
        (["8x20-10+4"], "numbers are at least 1, and ranges go up, got '8x20-10.4'"),
        (["8x20+4", "8x20+4"], "8x20.4 is given more than once"),
    ],
    ids=str,
)
def test_wrong_requests(names, message):
    with pytest.raises(UserError, match=message):
        parse_requests(names)


def test_layers_of_a_shape():
    assert build_model("tiny", CPU, torch.float32, layers=1).config.num_hidden_layers == 1
    assert SHAPES["tiny"].num_hidden_layers == 2


def test_command(tmp_path, run):
    files = {"--json": tmp_path / "s.json", "--plot": tmp_path / "s.png"}
    options = ["--shape", "tiny", "--layers", 1, "--dtype", "float32", "--device", "cpu", "--requests", "3x20+4"]
    result = run("bench", "serve", *options, "--attn", *ATTN, *(x for pair in files.items() for x in pair))
    assert result.exit_code == 0, result.output
    assert "tiny, 1 layers, float32, cpu" in result.stdout
    report = json.loads(files["--json"].read_text())
    assert (report["model"], report["layers"], report["cache_gib"]) == ("tiny", 1, None)
    assert [r["label"] for r in report["results"]] == list(ATTN)
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")


def test_a_run_that_fails_shows_in_the_exit_code(run, monkeypatch):
    """Though the other backends answered."""
    done = ServeResult(label="sdpa", config=None, requests="3x20+4")
    failed = replace(done, label="eager", failure="no room")
    monkeypatch.setattr(serve, "measure", lambda *arguments, **options: iter([done, failed]))
    result = run("bench", "serve", "--device", "cpu", "--layers", 1, "--requests", "3x20+4", "--attn", "sdpa", "eager")
    assert result.exit_code == 1
    assert "no room" in result.stderr
    assert "tiny, 1 layers" in result.stdout  # by default, on a CPU


@pytest.mark.slow
def test_a_local_model(run, model_folder):
    options = ["--model", model_folder, "--dtype", "float32", "--device", "cpu", "--requests", "3x20+4"]
    result = run("bench", "serve", *options, "--attn", "dma_mxfp:paper")
    assert result.exit_code == 0, result.output
    assert "dma_mxfp:paper" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "x", "--shape", "tiny"], "--model excludes --shape and --layers"),
        (["--requests", "20"], "--requests: expected COUNTxPROMPT+NEW"),
        (["--attn", "flash9"], "--attn: unknown backend 'flash9'"),
        (["--shape", "tiny", "--requests", "2x20000+4"], "2x20000+4 has 20004 tokens, and the model 16384 positions"),
        (["--shape", "tiny", "--cache-gib", "1e-9"], "--cache-gib: expected at least 6.1e-05"),
        (["--cache-gib", "-1"], "'--cache-gib': Input should be greater than or equal to 0, got '-1'"),
    ],
    ids=str,
)
def test_wrong_command_lines(arguments, message, run, refused):
    assert message in refused(run("bench", "serve", "--device", "cpu", *arguments))
