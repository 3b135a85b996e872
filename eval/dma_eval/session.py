"""What every measurement of a run shares: the model, the backends, where finished pieces lie, who shows progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .backends import Backend
from .environment import versions
from .files import Store
from .models import LoadedModel
from .processes import Processes
from .progress import Progress

COMPUTING = ("dma-hf", "lm-eval", "transformers", "torch")
"""Packages whose version a result depends on."""


@dataclass(frozen=True)
class Session:
    """One model under several backends."""

    loaded: LoadedModel  # the model and its tokenizer
    backends: Sequence[Backend]  # the backends; the first is the reference
    # The processes that split the work. Each makes the same calls, and gets all results.
    processes: Processes = field(default_factory=Processes)
    store: Store = field(default_factory=Store)  # where finished pieces are kept
    progress: Progress = field(default_factory=Progress)  # what is told of the progress
    seed: int = 0  # seed of whatever is drawn

    def identity(self, *backends: Backend, **settings: Any) -> dict[str, Any]:
        """Everything that a result depends on, as JSON values: the model, the versions, and what is given."""
        model = self.loaded.info
        return {
            "model": [model.name, model.revision, model.commit, model.parameters, model.dtype, model.yarn],
            "device": model.device.partition(":")[0],
            "versions": versions(COMPUTING),
            "backends": [backend.info for backend in backends],
            **settings,
        }
