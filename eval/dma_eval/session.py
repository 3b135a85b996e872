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
    """One model under several backends.

    Attributes:
        loaded: The model and its tokenizer.
        backends: The backends; the first is the reference.
        processes: The processes that split the work. Each makes the same calls, and gets all results.
        store: Where finished pieces are kept.
        progress: What is told of the progress.
        seed: Seed of whatever is drawn.
    """

    loaded: LoadedModel
    backends: Sequence[Backend]
    processes: Processes = field(default_factory=Processes)
    store: Store = field(default_factory=Store)
    progress: Progress = field(default_factory=Progress)
    seed: int = 0

    def identity(self, *backends: Backend, **settings: Any) -> dict[str, Any]:
        """Everything that a result depends on, as JSON values: the model, the versions, and what is given."""
        model = self.loaded.info
        return {
            "model": [model.name, model.revision, model.commit, model.parameters, model.dtype],
            "device": model.device.partition(":")[0],
            "versions": versions(COMPUTING),
            "backends": [backend.info for backend in backends],
            **settings,
        }
