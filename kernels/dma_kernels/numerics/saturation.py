"""Values that are too large for ``pv = "fp8"``: quantization counts them, and they trigger one warning.

The scale of a channel comes from the first 128 tokens, so that it does not depend on the length. Later values may be 28
times as large. Larger ones saturate.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

_LARGEST = 0x7E
"""The code of 448, E4M3's largest number, without its sign."""


@functools.cache
def saturation_counter() -> Tensor:
    """Return the counter of this process, int64 ``[1]``, in host memory that CUDA kernels can write to.

    The host reads it without waiting for running kernels.
    """
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=torch.cuda.is_available())


def count_saturated(coded: Tensor) -> None:
    """Add the number of E4M3 values of magnitude 448 to the counter, and warn; synchronizes with the device."""
    saturation_counter().add_(int(((coded.view(torch.uint8) & 0x7F) == _LARGEST).sum()))
    warn_if_saturated()


def saturated_values() -> int:
    """Return how many values ``pv = "fp8"`` has saturated in this process, in all finished kernels.

    A value counts once per call that quantizes it. With several GPUs at once, counts are approximate.
    """
    return int(saturation_counter().item())


@functools.cache
def _warn() -> None:
    warnings.warn(
        f"pv='fp8' clipped {saturated_values()} values, which are over 28 times as large as those of the first 128 "
        "tokens in their channel, so outputs are wrong; use pv='bf16' for this model. dma_kernels.saturated_values() "
        "counts them",
        stacklevel=3,
    )


def warn_if_saturated() -> None:
    """Warn, once, if values have been saturated."""
    if saturation_counter().item():
        _warn()
