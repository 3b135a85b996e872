"""``dma-hf serve --replicas``: two replicas of the demo model on Ray Serve, asked by OpenAI's client."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from urllib.request import ProxyHandler, build_opener

import openai
import psutil
import pytest
import torch
import yaml
from dma_eval.commands import serve
from dma_eval.commands.serve import ServeOptions
from dma_eval.errors import UserError
from dma_eval.load.backends import activate, parse_backends
from dma_eval.load.models import load_model
from sampling import sampled
from serve_requests import answer_to, status_of
from served import DEMO_MODEL, ROOT, served

KEY = "secret"
REQUESTS, CLIENTS, PROMPTS, NEW_TOKENS, LONG = 60, 8, 10, 6, 200
MAX_REQUESTS, MAX_QUEUED = 8, 8
DIED = "the replica that computed this answer has died; send the request again"
STOP_SECONDS, TIMEOUT = 20, 120


@pytest.fixture(scope="module")
def expected():
    """Prompts, with what one process says after them."""
    words = (DEMO_MODEL.parent / "heldout.txt").read_text(encoding="utf-8").split()
    loaded = load_model(str(DEMO_MODEL), dtype="float32", device="cpu")
    activate(loaded.model, parse_backends(["dma_mxfp"])[0])

    def say(prompt):
        inputs = loaded.tokenizer(prompt, return_tensors="pt")
        ids = loaded.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        return loaded.tokenizer.decode(ids[0, inputs.input_ids.shape[-1] :], skip_special_tokens=True)

    prompts = [" ".join(words[100 * i : 100 * i + 8 + 5 * i]) for i in range(PROMPTS)]
    return {prompt: say(prompt) for prompt in prompts}


class Server:
    """A server's process, and how to ask it."""

    def __init__(self, process, address):
        self.process, self.address = process, address
        self.client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT)
        self.open = build_opener(ProxyHandler({})).open

    def get(self, path):
        with self.open(self.address + path, timeout=TIMEOUT) as response:
            return response.read().decode()

    def replicas(self):
        """Return the processes that hold the model."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in children if "ServeReplica:dma-hf:Model" in " ".join(each.cmdline())]

    def complete(self, prompt, **options):
        asked = {"model": str(DEMO_MODEL), "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0} | options
        return self.client.completions.create(**asked)


@contextmanager
def _serving(folder, *arguments, launcher=()):
    """Run the command, and keep its log in a folder."""
    options = ("--dtype", "float32", *arguments)
    with served(DEMO_MODEL, *options, log=folder / "log", launcher=launcher, DMA_HF_API_KEY=KEY) as (process, address):
        yield Server(process, address)


@pytest.fixture(scope="module")
def ray():
    return pytest.importorskip("ray", reason="the extra 'ray' is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory, ray):
    limits = ("--max-requests", MAX_REQUESTS, "--max-queued", MAX_QUEUED)
    with _serving(tmp_path_factory.mktemp("served"), "--replicas", 2, *limits) as server:
        yield server


def _until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_requests_survive_the_loss_of_a_replica(server, expected):
    """Requests of all kinds; those that stream from the lost replica end with an error, all others are right."""
    errors = []
    prompts = list(expected)

    def ask(number):
        prompt = prompts[number % PROMPTS]
        kind = ("whole", "stream", "cancel")[number % 3]
        try:
            if kind == "whole":
                assert server.complete(prompt).choices[0].text == expected[prompt]
            elif kind == "stream":
                pieces = server.complete(prompt, stream=True)
                assert "".join(piece.choices[0].text for piece in pieces) == expected[prompt]
            else:
                with server.complete(prompt, stream=True, max_tokens=LONG) as stream:
                    assert expected[prompt].startswith(next(iter(stream)).choices[0].text)
        except openai.APIError as error:
            errors.append((kind, error.message))

    def listen(started):
        try:
            for _ in server.complete("The captain", stream=True, max_tokens=LONG):
                started.set()
        except openai.APIError as error:
            errors.append(("stream", error.message))

    with ThreadPoolExecutor(CLIENTS) as pool:
        started = [threading.Event(), threading.Event()]
        asked = [pool.submit(ask, number) for number in range(REQUESTS // 4)]
        asked += [pool.submit(listen, each) for each in started]
        asked += [pool.submit(ask, number) for number in range(REQUESTS // 4, REQUESTS - 2)]
        assert all(each.wait(TIMEOUT) for each in started)
        lost = server.replicas()[0]
        lost.kill()
        for each in asked:
            each.result(TIMEOUT)
    assert {message for _, message in errors} == {DIED}
    assert "whole" not in {kind for kind, _ in errors}  # another replica has answered them
    assert len(errors) <= MAX_REQUESTS
    _until(lambda: len(server.replicas()) == 2 and '"replicas":2' in server.get("/health"))
    assert lost.pid not in [each.pid for each in server.replicas()]


@pytest.mark.slow
def test_requests_without_the_key_or_beyond_the_queue_are_refused(server):
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="wrong", max_retries=0).models.list()
    assert [each.id for each in server.client.models.list()] == [str(DEMO_MODEL)]

    def ask(number):
        try:
            return len(server.complete("The captain", max_tokens=4).choices)
        except openai.RateLimitError as error:
            return error.code

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(64)))
    assert set(answers) == {1, "rate_limit_exceeded"}
    assert answers.count(1) >= MAX_REQUESTS


@pytest.mark.slow
def test_a_server_that_is_stopped_ends_open_requests(server):
    stream = iter(server.complete("The captain", stream=True, max_tokens=3000))
    assert next(stream)
    ray = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match=DIED):
        list(stream)
    assert server.process.wait(TIMEOUT) == 0
    _, alive = psutil.wait_procs(ray, timeout=5)
    assert alive == []


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
@pytest.mark.parametrize("how", sampled(["interrupted", "killed"], "killed".__eq__))
def test_tensor_parallel_processes_answer_and_end_together(tmp_path, expected, how):
    options = ("--continuous-batching", "--cache-gib", 0.05)
    with _serving(tmp_path, *options, launcher=TORCHRUN) as server, ThreadPoolExecutor(CLIENTS) as pool:
        answers = pool.map(lambda prompt: server.complete(prompt).choices[0].text, expected)
        assert list(answers) == list(expected.values())
        ranks = psutil.Process(server.process.pid).children()
        assert len(ranks) == 2
        if how == "killed":
            ranks[1].kill()
        else:
            server.process.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(ranks, STOP_SECONDS)
        assert alive == []


def test_processes_of_torchrun_need_continuous_batching(run, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for options in ((), ("--continuous-batching", "--replicas", 2), ("--continuous-batching", "--device-map", "auto")):
        assert "torchrun: " in refused(run("serve", DEMO_MODEL, *options))


def test_one_replica_does_without_ray(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails
    monkeypatch.setattr("dma_hf.serving.app.run", lambda *arguments, **options: None)
    monkeypatch.setattr(serve, "_end_process", lambda: 0)
    run("serve", DEMO_MODEL, "--device", "cpu", "--port", "0", "--replicas", 1, code=0)


def test_other_processes_get_absolute_paths(tmp_path, monkeypatch):
    mine = tmp_path / "mine.toml"
    mine.write_text('low = "mxfp4"\n')
    monkeypatch.chdir(DEMO_MODEL.parent)
    args = ServeOptions(model=DEMO_MODEL.name, attn=f"dma_mxfp:{os.path.relpath(mine)}+int8")
    found = serve._absolute(args)
    assert found.model == str(DEMO_MODEL)
    assert os.path.samefile(found.attn.removeprefix("dma_mxfp:").removesuffix("+int8"), mine)
    assert os.path.isabs(found.attn.removeprefix("dma_mxfp:"))
    other = ServeOptions(model="org/name", attn="dma_mxfp:fp4+int4")
    assert serve._absolute(other) == other


@pytest.mark.usefixtures("ray")
def test_a_replica_has_its_own_random_numbers_and_the_name_of_the_command(run, monkeypatch):
    """Otherwise both would give the same samples. As without replicas, a relative path is no other one in requests."""

    def note(application, **options):
        model = application._bound_deployment.init_args[0]._bound_deployment
        makers.append(model.init_args[0])
        raise OSError("enough")

    def load(rank):
        context = SimpleNamespace(rank=SimpleNamespace(rank=rank))
        monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
        _, gate = makers[0]()
        (model,) = asyncio.run(answer_to(gate, "/v1/models", method="GET"))["data"]
        return torch.initial_seed(), model["id"]

    makers = []
    monkeypatch.setattr("dma_hf.serving.replicas.running", note)
    monkeypatch.chdir(DEMO_MODEL.parent)
    run("serve", DEMO_MODEL.name, "--replicas", 2, "--device", "cpu", "--port", 0, "--seed", 2**32 - 1)
    monkeypatch.chdir("/")
    assert [load(rank) for rank in (0, 1)] == [(2**32 - 1, DEMO_MODEL.name), (0, DEMO_MODEL.name)]


def _built(arguments):
    """Build an application, and return the settings of its replicas."""
    (model,) = serve.build_application(arguments)._bound_deployment.init_args[:1]
    return model._bound_deployment._deployment_config, model._bound_deployment.init_args[0].args[0]


@pytest.mark.usefixtures("ray")
def test_the_manifest_for_kubernetes_names_an_application():
    manifest = yaml.safe_load((ROOT / "docs" / "guides" / "rayservice.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == f"{serve.__name__}:{serve.build_application.__name__}"
    scaling = _built(application["args"])[0].autoscaling_config
    (workers,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (scaling.min_replicas, scaling.max_replicas)


@pytest.mark.usefixtures("ray")
def test_the_application_takes_options_as_texts():
    """As `serve run` of Ray passes them."""
    texts = {"model": "org/name", "replicas": "2", "continuous_batching": "true", "gpus_per_replica": "2"}
    config, args = _built(texts)
    assert config.num_replicas == 2
    assert serve.build_application(texts | {"api_key": KEY})._bound_deployment.init_args[1] == KEY
    assert (args.continuous_batching, args.device_map) == (True, "auto")
    with pytest.raises(ValueError, match=r": replica; valid: .*replicas, "):
        _built({"model": "org/name", "replica": 2})


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn": "sdpa+hqq4"}, r"--attn: a server cannot keep the cache \+hqq4"),
        ({"api_key": ""}, "--api-key: "),
        ({"cache_gib": "1"}, "--cache-gib is for --continuous-batching"),
        ({"replicas": "2", "max_replicas": "1"}, "--max-replicas: "),
    ],
    ids=str,
)
def test_the_application_refuses_what_the_command_refuses(options, message, monkeypatch):
    """Otherwise an empty key would leave the server open."""
    monkeypatch.delenv("DMA_HF_API_KEY", raising=False)
    with pytest.raises(UserError, match=message):
        _built({"model": "org/name"} | options)


def _replica(application, seconds_per_part=0.0):
    """A replica that answers with this application."""
    from dma_hf.serving.replicas import PARTS_PER_SECOND, Model

    return Model(lambda: (SimpleNamespace(is_alive=True), application), seconds_per_part * PARTS_PER_SECOND)


@pytest.mark.usefixtures("ray")
def test_the_gateway_shows_the_model_while_all_replicas_are_busy():
    """As a single process does, once it has seen it."""
    from dma_hf.serving.replicas import Gateway

    async def application(scope, receive, send):
        status = 200 if scope["path"] == "/v1/models" else 404
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"id": "tiny"}'})

    def answer(request, body):
        asked.append(request["path"])
        return _replica(application).answer(request, body)

    async def ask():
        model = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=answer))
        gate = Gateway(model, KEY, "UNSET").__serve_build_asgi_app__()
        twice = [path for path in ("/v1/models", "/v1/models/other") for _ in range(2)]
        return [*[await status_of(gate, path, key=KEY) for path in twice], await status_of(gate, "/v1/models")]

    asked = []
    assert asyncio.run(ask()) == [200, 200, 404, 404, 401]
    assert asked == ["/v1/models", "/v1/models/other", "/v1/models/other"]


@pytest.mark.usefixtures("ray")
def test_an_answer_that_is_cancelled_ends_in_the_replica():

    async def cancel():
        began, ended = asyncio.Event(), []

        async def application(scope, receive, send):
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        asking = asyncio.ensure_future(anext(_replica(application).answer({}, b"")))
        await began.wait()
        asking.cancel()
        await asyncio.wait({asking})
        return ended == [True]

    assert asyncio.run(cancel())


@pytest.mark.usefixtures("ray")
def test_tokens_that_a_busy_replica_generates_meanwhile_are_sent_together():

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for index in range(9):
            await send({"type": "http.response.body", "body": b"%d" % index, "more_body": index < 8})
            await asyncio.sleep(0.001)

    async def failing(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("it failed")

    async def read(seconds_per_part):
        return [part async for part in _replica(application, seconds_per_part).answer({}, b"")]

    async def read_first_of_failing():
        return await anext(_replica(failing).answer({}, b""))

    alone, busy = asyncio.run(read(0.001)), asyncio.run(read(0.5))
    for parts in (alone, busy):
        first, *others = (message for part in parts for message in part)
        assert first["type"] == "http.response.start"
        assert len(parts[0]) > 1  # another replica can take over until a text is sent
        assert b"".join(message["body"] for message in others) == b"012345678"
    assert len(busy) == 2 < len(alone)
    with pytest.raises(RuntimeError, match="it failed"):  # no part without a text
        asyncio.run(read_first_of_failing())


@pytest.mark.usefixtures("ray")
def test_a_cluster_that_is_missing_is_named(run, refused):
    cluster = ("serve", DEMO_MODEL, "--ray-address", "127.0.0.1:1")
    assert "--ray-address: " in refused(run(*cluster))
    assert "--port: " in refused(run(*cluster, "--port", 0))


@pytest.mark.usefixtures("ray")
def test_a_gpu_that_is_missing_is_named(run, refused, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    message = refused(run("serve", DEMO_MODEL, "--replicas", 2, "--device", "cuda"))
    assert "--device: 'cuda' does not exist: 0 CUDA devices found" in message


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("options", [(), ("--device", "cpu"), ("--device-map", "auto")], ids=str)
def test_replicas_on_a_machine_without_gpus_ask_for_none(run, monkeypatch, options):
    def note(application, **_):
        model = application._bound_deployment.init_args[0]._bound_deployment
        asked.append(model.ray_actor_options["num_gpus"])
        raise OSError("enough")

    asked = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("dma_hf.serving.replicas.running", note)
    assert "enough" in run("serve", DEMO_MODEL, "--replicas", 2, "--port", 0, *options).output
    assert asked == [0]


@pytest.mark.usefixtures("ray")
def test_a_local_ray_that_does_not_start_is_not_blamed_on_the_address(run, refused, monkeypatch):
    def fail(*_, **options):
        raise OSError("no processes left")

    monkeypatch.setattr("dma_hf.serving.replicas.running", fail)
    assert refused(run("serve", DEMO_MODEL, "--replicas", 2)).endswith("Ray did not start: no processes left")


def test_ray_that_is_missing_is_named(run, refused, monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "ray" else name)
    assert "--replicas needs ray, " in refused(run("serve", DEMO_MODEL, "--replicas", 2))
