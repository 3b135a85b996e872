"""Peak memory of one forward pass, on a GPU or on the CPU."""

# Whether psutil has types, in itself or in a package of stubs, must not matter.
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import psutil
import torch
from transformers import PreTrainedModel

SAMPLING_SECONDS = 0.005
PAGE = 4096  # bytes; larger pages are touched more than once


class MemoryMeter:
    """Measures the peak memory that a block of code adds.

    On CUDA it is exact: PyTorch's allocated bytes, summed over devices. Elsewhere it is the resident set of the
    process, sampled every 5 ms. Shorter peaks may be missed, and memory that the process reuses is not counted again.
    """

    def __init__(self, *models: PreTrainedModel) -> None:
        is_on_cpu = models[0].device.type != "cuda"
        self._devices = range(0) if is_on_cpu else range(torch.cuda.device_count())
        if is_on_cpu:
            # Checkpoints are memory-mapped. Load their pages now, so that the first pass does not seem to add them.
            for tensor in (weight.data for model in models for weight in (*model.parameters(), *model.buffers())):
                if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())[::PAGE].sum()
        self._process = psutil.Process()
        self.kind: Literal["cuda_allocated", "process_rss"] = "cuda_allocated" if self._devices else "process_rss"
        self.baseline = self._in_use()  # bytes in use with all weights in memory
        self.increase = 0  # bytes that the last ``measure`` block added at its peak

    def synchronize(self) -> None:
        """Wait for the devices."""
        for device in self._devices:
            torch.cuda.synchronize(device)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the block; the result is in ``increase`` afterwards."""
        before = peak = self._in_use()
        done = threading.Event()

        def sample() -> None:
            nonlocal peak
            while not done.wait(SAMPLING_SECONDS):
                peak = max(peak, self._in_use())

        thread = threading.Thread(target=sample, daemon=True)
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)
        if not self._devices:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if not self._devices:
                thread.join()
        if self._devices:
            peak = sum(map(torch.cuda.max_memory_allocated, self._devices))
        self.increase = max(peak, self._in_use()) - before

    def _in_use(self) -> int:
        if self._devices:
            return sum(map(torch.cuda.memory_allocated, self._devices))
        return int(self._process.memory_info().rss)
