"""Devices by name, as ``--device`` takes them."""

from __future__ import annotations

import torch

from .errors import UserError


def parse_device(name: str) -> torch.device:
    """The device of that name; for ``auto``, CUDA where there is one and else the CPU.

    Raises:
        UserError: There is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device: expected auto, cpu, cuda or cuda:N; got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device: expected auto, cpu, cuda or cuda:N; got {name!r}")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UserError(f"--device: {name!r} is not there: {count} CUDA devices found; --device cpu works everywhere")
    return device
