"""A model computes the same on two GPUs as on one: pipeline, tensor and data parallelism."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_worker import compute, token_ids
from tiny_models import FAMILIES
from transformers import AutoModelForCausalLM

import dma_hf

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 4, "vocab_size": 128}


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """A small bf16 Llama with the preset ``balanced``, on disk."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = FAMILIES["llama"].build(dma_hf.NAME, **SIZES)
    dma_hf.configure(model, "balanced")
    folder = tmp_path_factory.mktemp("model")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def on_one_gpu(saved_model):
    return compute(_load(saved_model, device_map={"": 0}), token_ids())


def _load(folder, **options):
    options |= {"attn_implementation": dma_hf.NAME, "dtype": torch.bfloat16}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def _same(actual, expected):
    """Within bf16 rounding, because tensor parallelism sums in another order."""
    error = (actual["logits"] - expected["logits"]).norm() / expected["logits"].norm()
    assert error < 0.02, f"relative error {error:.2e}"


@pytest.mark.parametrize("placement", ["second", "by layer", "auto"])
def test_layers_may_be_on_either_gpu_or_both(placement, saved_model, on_one_gpu):
    """The kernels run on the device of the tensors, while the first is current."""
    ends = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    options = {
        "second": {"device_map": {"": 1}},
        "by layer": {"device_map": ends | {f"model.layers.{i}": i // 2 for i in range(4)}},
        "auto": {"device_map": "auto", "max_memory": {0: "2MiB", 1: "1GiB"}},  # too little for the whole model
    }[placement]
    torch.cuda.set_device(0)
    model = _load(saved_model, **options)
    result = compute(model, token_ids())
    assert len({parameter.device for parameter in model.parameters()}) >= (1 if placement == "second" else 2)
    assert torch.equal(result["logits"], on_one_gpu["logits"])
    assert torch.equal(result["tokens"], on_one_gpu["tokens"])


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
    worker = ROOT / "tests" / "support" / "parallel_worker.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = [str(ROOT / folder) for folder in (".", "kernels", "tests/support")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    command = [*launcher, *map(str, (worker, saved_model, tmp_path)), mode]
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
