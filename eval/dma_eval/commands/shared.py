"""What the commands that run a model have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dma_eval import console
from dma_eval.errors import UserError

if TYPE_CHECKING:
    from dma_eval.distributed import Processes
    from dma_eval.models import LoadedModel


def join(device: str, seed: int) -> Processes:
    """Seed PyTorch, and join the processes of the run; all but the first are silent from here on."""
    import torch

    from dma_eval.distributed import join_processes

    torch.manual_seed(seed)
    processes = join_processes(device)
    if not processes.is_main:
        console.quiet()
    return processes


def leave() -> None:
    """Part with the other processes of the run, at its end: none ends while another still talks to it."""
    from dma_eval.distributed import leave_processes

    leave_processes()


def load(
    name: str,
    processes: Processes,
    dtype: str,
    device: str,
    device_map: str | None,
    revision: str | None,
    trust_remote_code: bool,
) -> LoadedModel:
    """Load a model as the options say, on this process's device.

    Raises:
        UserError: It cannot be loaded, or several processes would each spread it over all devices.
    """
    from dma_eval.models import load_model

    if processes.count > 1 and device_map is not None:
        raise UserError(
            f"--device-map: each of {processes.count} processes would spread the model over all devices; start one"
        )
    if processes.device is not None and device == "auto":
        device = str(processes.device)
    with console.working(f"Loading {name}"):
        return load_model(
            name,
            dtype=dtype,
            device=device,
            device_map=device_map,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
