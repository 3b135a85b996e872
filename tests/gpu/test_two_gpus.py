"""A model computes the same on two GPUs as on one: pipeline, tensor and data parallelism."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dma_eval.results import read_report
from parallel_worker import compute, token_ids
from tiny_models import FAMILIES
from tiny_tasks import write_tiny_tasks
from transformers import AutoModelForCausalLM

import dma_hf

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "support" / "parallel_worker.py"
DEMO_MODEL = ROOT / "eval" / "dma_eval" / "assets" / "demo_model"
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 4, "vocab_size": 128}


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """A small bf16 Llama with the preset ``balanced``, on disk."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = FAMILIES["llama"].build("dma_mxfp", **SIZES)
    dma_hf.configure(model, "balanced")
    folder = tmp_path_factory.mktemp("model")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def on_one_gpu(saved_model):
    return compute(_load(saved_model, device_map={"": 0}), token_ids())


def _load(folder, **options):
    options |= {"attn_implementation": "dma_mxfp", "dtype": torch.bfloat16}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def _same(actual, expected):
    """Within bf16 rounding, because tensor parallelism sums in another order."""
    error = (actual["logits"] - expected["logits"]).norm() / expected["logits"].norm()
    assert error < 0.02, f"relative error {error:.2e}"


def test_the_kernels_run_on_the_tensors_device(saved_model, on_one_gpu):
    """The second GPU, while the first is current."""
    torch.cuda.set_device(0)
    result = compute(_load(saved_model, device_map={"": 1}), token_ids())
    assert torch.equal(result["logits"], on_one_gpu["logits"])
    assert torch.equal(result["tokens"], on_one_gpu["tokens"])


def test_layers_may_be_on_two_gpus(saved_model, on_one_gpu):
    ends = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    model = _load(saved_model, device_map=ends | {f"model.layers.{i}": i // 2 for i in range(4)})
    assert {parameter.device.index for parameter in model.parameters()} == {0, 1}
    result = compute(model, token_ids())
    assert torch.equal(result["logits"], on_one_gpu["logits"])
    assert torch.equal(result["tokens"], on_one_gpu["tokens"])


def test_device_map_auto_may_use_both_gpus(saved_model, on_one_gpu):
    room = {0: "2MiB", 1: "1GiB"}  # too little for the whole model, so both are used
    model = _load(saved_model, device_map="auto", max_memory=room)
    result = compute(model, token_ids())
    assert len({parameter.device for parameter in model.parameters()}) >= 2
    assert torch.equal(result["logits"], on_one_gpu["logits"])


@torch.no_grad()
def _assert_chosen(model, tokens):
    """Check by a forward pass that each generated token is the best, within bf16 rounding."""
    cache = dma_hf.DMACache(model.config, "int4")
    parts = [token_ids(), *tokens[:, :-1].split(1, dim=1)]
    logits = [model(part.to(model.device), past_key_values=cache).logits[:, -1].float().cpu() for part in parts]
    for at, each in enumerate(logits):
        below = each.max(-1).values - each.gather(-1, tokens[:, at : at + 1])[:, 0]
        assert (below < 0.1 * each.std()).all()


@pytest.mark.parametrize("mode", ["tensor", "batch", "data"])
def test_two_processes_compute_the_same_as_one(mode, saved_model, on_one_gpu, tmp_path):
    """One process per GPU: tensor parallelism, with and without continuous batching, and data parallelism."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests" / "support")))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(WORKER), str(saved_model), str(tmp_path), mode]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((paths, os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"{mode}{rank}.pt") for rank in range(2))
    if mode == "tensor":
        assert first["q_proj_rows"] == 128  # half of the 256
        _same(first, on_one_gpu)
        assert torch.equal(first["tokens"], second["tokens"])
    elif mode == "batch":
        assert torch.equal(first["tokens"], second["tokens"])
        _assert_chosen(_load(saved_model, device_map={"": 0}), first["tokens"])
    else:
        together = {name: torch.cat((first[name], second[name])) for name in ("logits", "tokens")}
        _same(together, on_one_gpu)


def test_accelerate_launch_splits_lm_eval_samples(tmp_path):
    """Two processes of ``dma-hf lm-eval`` share the samples."""
    pytest.importorskip("lm_eval")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = ["-m", "dma_eval", "lm-eval", "-m", str(DEMO_MODEL), "--dtype", "bfloat16", "--limit", "9"]
    arguments += ["--tasks", "tiny_choice,tiny_answer", "--include-path", str(write_tiny_tasks(tmp_path / "tasks"))]
    arguments += ["--attn", "sdpa", "dma_mxfp:balanced", "--out"]
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "eval")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((paths, os.environ.get("PYTHONPATH", "")))}
    accuracies = []
    for name, start in (("one", []), ("two", launch)):
        command = [sys.executable, *start, *arguments, str(tmp_path / name)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        section = read_report(tmp_path / name / "results.json").tasks[0]
        assert section.processes == len(accuracies) + 1
        accuracies.append([backend.mean_accuracy for backend in section.backends])
    assert accuracies[1] == pytest.approx(
        accuracies[0], abs=0.12
    )  # one of nine answers, because other batches round differently in bf16


def test_models_can_run_on_two_streams(saved_model, on_one_gpu):
    """Two models at the same time, each on its own stream."""
    models = [_load(saved_model, device_map={"": 0}) for _ in range(2)]
    ids = token_ids().to("cuda:0")
    streams = [torch.cuda.Stream() for _ in models]
    logits = []
    torch.cuda.synchronize()
    with torch.no_grad():
        for _ in range(3):
            for model, stream in zip(models, streams, strict=True):
                with torch.cuda.stream(stream):
                    logits.append(model(ids).logits)
    torch.cuda.synchronize()
    for each in logits:
        assert torch.equal(each.float().cpu(), on_one_gpu["logits"])
