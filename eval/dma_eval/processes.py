"""The processes of one run, as ``accelerate launch`` starts them; one process where it did not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import PartialState

Value = TypeVar("Value")


@dataclass(frozen=True)
class Processes:
    """This process among those that split the samples of a run."""

    rank: int = 0  # its number, from 0; process 0 reads and writes files, and is the one that talks
    count: int = 1  # how many there are
    # Accelerate's handle on them; ``None`` for a single process.
    accelerator: Accelerator | None = field(default=None, repr=False)
    # The device that Accelerate assigned; ``None`` for a single process, which may choose.
    device: torch.device | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is process 0."""
        return self.rank == 0

    def share(self, items: Sequence[Value]) -> list[Value]:
        """Return what of ``items`` is this process's work: every ``count``-th one."""
        return list(items[self.rank :: self.count])

    def from_main(self, value: Value) -> Value:
        """Return what process 0 passed; the other processes' values are ignored."""
        if self.count == 1:
            return value
        box: list[Any] = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        received: Value = box[0]
        return received

    def gathered(self, value: Value) -> list[Value]:
        """Return the values of all processes, in order of rank, to all of them."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value)
        return values


def join_processes(device: str = "auto") -> Processes:
    """Join the processes that ``accelerate launch`` or ``torchrun`` started, if they did.

    Args:
        device: The device that was asked for: with ``cpu``, and without CUDA, processes talk through gloo.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    state = PartialState(cpu=on_cpu)
    accelerator = Accelerator(cpu=on_cpu)
    return Processes(state.process_index, state.num_processes, accelerator, state.device)


def leave_processes() -> None:
    """Close the process group, so that no process ends while another still talks to it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
