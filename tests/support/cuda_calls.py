"""What tests on a GPU share: CUDA graphs, and limits on synchronization and compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Raise an error if the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a CUDA graph of a call that has run before, and the result that each replay overwrites."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def compiled_count(kernel: Any) -> int:
    """Return how many variants of a Triton kernel are compiled."""
    return sum(len(cache[0]) for cache in kernel.device_caches.values())


def fill_free_memory_with_nan() -> None:
    """Leave NaN in memory that PyTorch hands to the next tensors."""
    torch.full((64, 1024, 1024), float("nan"), device="cuda")
