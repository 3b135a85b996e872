"""Two processes compute the same as one: tensor parallelism, and data parallelism with Accelerate.

``torchrun`` starts both, because ``accelerate launch`` starts several processes on CPUs only with MPI.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_worker import batched, compute, token_ids
from transformers import AutoModelForCausalLM

import dma_hf

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "support" / "parallel_worker.py"


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """A tiny Llama with the preset ``balanced``, on disk."""
    from tiny_models import FAMILIES

    model = FAMILIES["llama"].build(dma_hf.NAME)
    dma_hf.configure(model, "balanced")
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def results(saved_model, tmp_path_factory):
    """What each of two processes computed, by mode."""
    modes = ["tensor", "batch", "data"]
    out = tmp_path_factory.mktemp("results")
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests" / "support")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(WORKER), str(saved_model), str(out), *modes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {mode: [torch.load(out / f"{mode}{rank}.pt") for rank in range(2)] for mode in modes}


@pytest.fixture
def model(saved_model):
    return AutoModelForCausalLM.from_pretrained(saved_model, attn_implementation=dma_hf.NAME)


@pytest.mark.slow
def test_tensor_parallel_equals_one_process(results, model):
    expected = compute(model, token_ids())
    for result in results["tensor"]:
        assert result["q_proj_rows"] == 32  # half of the 64
        error = (result["logits"] - expected["logits"]).norm() / expected["logits"].norm()
        assert error < 1e-4  # other orders of summation, which change some quantization codes
        assert torch.equal(result["tokens"], expected["tokens"])


@pytest.mark.slow
def test_tensor_parallel_continuous_batching_equals_one_process(results, model):
    expected = batched(model)
    for result in results["batch"]:
        assert torch.equal(result["tokens"], expected)


@pytest.mark.slow
def test_data_parallel_equals_one_process(results, model):
    expected = compute(model, token_ids())
    shares = results["data"]
    assert [len(share["tokens"]) for share in shares] == [2, 2]
    for name in ("logits", "tokens"):
        torch.testing.assert_close(torch.cat([share[name] for share in shares]), expected[name])
