"""Devices by name."""

from __future__ import annotations

import pytest
import torch
from dma_eval.devices import parse_device
from dma_eval.errors import UserError


def test_devices() -> None:
    assert parse_device("cpu") == torch.device("cpu")
    assert parse_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(UserError, match=r"--device: expected auto, cpu, cuda or cuda:N; got 'gpu'"):
        parse_device("gpu")
    with pytest.raises(UserError, match=r"--device: 'cuda:99' is not there: \d+ CUDA devices found"):
        parse_device("cuda:99")
