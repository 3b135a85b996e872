"""Shared state of a run's measurements: model, backends, processes, and the store of finished pieces."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from .backends import Backend
from .environment import versions
from .files import Store
from .models import LoadedModel
from .progress import Progress

COMPUTING = ("dma-hf", "lm-eval", "transformers", "torch")
"""Packages whose versions affect results."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class Processes:
    """The rank of this process and the number of processes that ``accelerate launch`` started, by default one."""

    rank: int = 0  # process 0 reads and writes files, and prints
    count: int = 1
    accelerator: Accelerator | None = field(default=None, repr=False)  # ``None`` for a single process
    device: torch.device | None = None  # the device that Accelerate assigned; a single process may choose

    @property
    def is_main(self) -> bool:
        """Whether this is process 0."""
        return self.rank == 0

    def share(self, items: Sequence[Value]) -> list[Value]:
        """Return this process's share of ``items``: every ``count``-th one."""
        return list(items[self.rank :: self.count])

    def from_main(self, value: Value) -> Value:
        """Broadcast the value of process 0."""
        received: list[Value] = [value] if self.count == 1 else broadcast_object_list([value])
        return received[0]

    def gathered(self, value: Value) -> list[Value]:
        """Return the values of all processes, in order of rank, to all of them."""
        values: list[Value] = [value] if self.count == 1 else gather_object([value])
        return values

    def united(self, values: dict[Any, Value]) -> dict[Any, Value]:
        """Return the items of all processes. For duplicate keys, the lower rank wins."""
        return {key: value for share in reversed(self.gathered(values)) for key, value in share.items()}


def join_processes(device: str = "auto") -> Processes:
    """Join the processes that ``accelerate launch`` or ``torchrun`` started. On the CPU they use gloo."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    state = PartialState(cpu=on_cpu)
    return Processes(state.process_index, state.num_processes, Accelerator(cpu=on_cpu), state.device)


def leave_processes() -> None:
    """Close the process group, so that no process ends before the others are finished."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class Session:
    """One model under several backends."""

    loaded: LoadedModel  # the model and its tokenizer
    backends: Sequence[Backend]  # the first is the reference
    processes: Processes = field(default_factory=Processes)  # every process makes the same calls and gets all results
    store: Store = field(default_factory=Store)  # where finished pieces are saved
    progress: Progress = field(default_factory=Progress)
    seed: int = 0  # seed of everything random

    def identity(self, *backends: Backend, **settings: Any) -> dict[str, Any]:
        """Return everything that a result depends on, as JSON values: model, versions, backends and settings."""
        model = self.loaded.info
        return {
            "model": [model.name, model.revision, model.commit, model.parameters, model.dtype, model.yarn],
            "files": self.loaded.files,
            "device": model.device.partition(":")[0],
            "versions": versions(COMPUTING),
            "backends": [backend.info | {"reads_cache": backend.reads_cache} for backend in backends],
            **settings,
        }
