"""Two processes compute the same as one: tensor parallelism, data parallelism with Accelerate, and training.

``torchrun`` starts both, because ``accelerate launch`` starts several processes on CPUs only with MPI.
"""

from __future__ import annotations

from pathlib import Path

import parallel_worker
import pytest
import torch
from parallel_worker import batched, compute, gradients, token_ids
from tiny_models import FAMILIES

import dma_hf


@pytest.mark.slow
def test_two_processes_compute_the_same_as_one(tmp_path, python):
    model = FAMILIES["llama"].build("dma_mxfp")
    dma_hf.configure(model, "balanced")
    model.save_pretrained(tmp_path)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = [Path(parallel_worker.__file__), tmp_path, tmp_path, "tensor", "batch", "data", "train"]
    done = python(*launcher, *worker)
    assert done.returncode == 0, done.stderr[-3000:]
    tensor, batch, data, train = ([torch.load(tmp_path / f"{mode}{i}.pt") for i in range(2)] for mode in worker[3:])
    expected = compute(model, token_ids())
    for result in tensor:
        assert result["q_proj_rows"] == 32  # half of the 64
        error = (result["logits"] - expected["logits"]).norm() / expected["logits"].norm()
        assert error < 1e-4  # other orders of summation, which change some quantization codes
        assert torch.equal(result["tokens"], expected["tokens"])
    assert [len(share["tokens"]) for share in data] == [2, 2]
    for name in ("logits", "tokens"):
        torch.testing.assert_close(torch.cat([share[name] for share in data]), expected[name])
    tokens = batched(model)
    assert all(torch.equal(result["tokens"], tokens) for result in batch)
    expected = gradients(model, token_ids())
    for result in train:
        for way, found in result.items():
            assert list(found) == list(expected), way
            for name, gradient in expected.items():
                assert (found[name] - gradient).norm() < 1e-4 * gradient.norm(), (way, name)
