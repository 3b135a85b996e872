"""Tensor parallelism in a replica: several processes, each of which holds a share of every layer.

The replica is rank 0. Transformers' continuous batching sends its requests to the other ranks, which run the same
steps. All ranks are on one node. They talk over its loopback interface and between its GPUs.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from tempfile import TemporaryDirectory

import ray
import torch
from torch import distributed

from dma_eval.load.models import parse_device

from .app import load
from .jobs import Batched
from .settings import Settings

JOIN_SECONDS = 600.0  # also the longest wait for a rank that loads its weights
GRACE_SECONDS = 2.0  # for rank 0 to say why its model does not load, if the others fail first


class Rank:
    """A rank of a replica other than 0."""

    def run(self, settings: Settings, rank: int, store: str) -> None:
        """Compute with the other ranks until one of them fails."""
        _join(settings, rank, store)
        *_, engine = load(settings)
        assert isinstance(engine, Batched)
        engine.follow()


def start_ranks(settings: Settings) -> None:
    """Start the other ranks, and join them as rank 0.

    If one of them ends, this process ends too. Ray then replaces the replica with all its ranks.

    Raises:
        ValueError: The settings lack continuous batching, which keeps the ranks in step.
    """
    if not settings.continuous_batching:
        raise ValueError("tensor_parallel needs continuous_batching")
    folder = TemporaryDirectory()
    store = f"{folder.name}/store"
    make = ray.remote(Rank).options(num_cpus=1, num_gpus=settings.gpus_per_rank)
    ranks = [make.remote() for _ in range(1, settings.tensor_parallel)]
    runs = [each.run.remote(settings, rank, store) for rank, each in enumerate(ranks, 1)]

    def watch() -> None:
        ray.wait(runs)
        time.sleep(GRACE_SECONDS)
        folder.cleanup()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    _join(settings, 0, store)


def _join(settings: Settings, rank: int, store: str) -> None:
    # Transformers asks for NCCL_GRAPH_MIXING_SUPPORT=0 with CUDA graphs, before NCCL starts.
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_GRAPH_MIXING_SUPPORT": "0"}
    has_gpu = parse_device(settings.device).type == "cuda"
    distributed.init_process_group(
        "nccl" if has_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=settings.tensor_parallel,
        timeout=timedelta(seconds=JOIN_SECONDS),
        device_id=torch.device("cuda", 0) if has_gpu else None,  # the one that Ray lets this process see
    )
