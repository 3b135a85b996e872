"""The backend of a device, and the warning when it is not the expected one."""

from __future__ import annotations

import warnings

import pytest
import torch
from dma_kernels.runtime.chip import _warn_of_reference, resolve_backend


def test_auto_warns_once_if_a_cuda_device_runs_the_reference() -> None:
    _warn_of_reference.cache_clear()
    cuda = torch.device("cuda")
    with pytest.warns(
        UserWarning, match=r"runs in torch on a CUDA device.* it takes bf16 and fp16, got torch\.float32"
    ):
        assert resolve_backend("auto", cuda, torch.float32) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_backend("auto", cuda, torch.float32) == "reference"
        assert resolve_backend("reference", cuda, torch.float32) == "reference"
        assert resolve_backend("auto", torch.device("cpu"), torch.float32) == "reference"
