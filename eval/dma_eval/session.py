"""Shared state of a run's measurements: model, backends, and the finished pieces; and its processes.

A section of a report is made of pieces, such as a batch of windows or a backend's answers to a task. Only pieces are
saved, so an interrupted run resumes after the last one. ``accelerate launch`` or ``torchrun`` may start several
processes, which split the samples of tasks. The first one reads and writes files, prints, and measures everything else.
``PartialState()`` of Accelerate is the state of this one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate.state import PartialState

from . import console
from .config import LoadOptions
from .environment import Environment, collect, source_hash
from .errors import UserError
from .files import parse, schema, slug, write_text
from .load.backends import Backend, with_references
from .load.models import LoadedModel, load_model
from .results import Origin, here_and_now

COMPUTING = ("dma-hf", "lm-eval", "transformers", "torch")  # packages whose versions affect results
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Piece(Generic[Value]):
    """A finished piece of a run."""

    identity: dict[str, Any]  # everything it depends on, as JSON values
    origin: Origin  # how it was measured
    content: Value  # what was measured


def join_processes(device: str, seed: int) -> PartialState:
    """Join the processes of a run, on the CPU by gloo, and seed PyTorch. All except the first become silent."""
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    state = PartialState(cpu=is_alone or device == "cpu" or not torch.cuda.is_available())
    torch.manual_seed(seed)
    if not state.is_main_process:
        console.quiet()
    return state


def load(args: LoadOptions) -> LoadedModel:
    """Load the model as the options say, on this process's device."""
    processes = join_processes(args.device, args.seed)
    count = processes.num_processes
    if count > 1 and args.device_map is not None:
        raise UserError(f"--device-map: each of {count} processes would spread the model over all devices; start one")
    device = str(processes.device) if count > 1 and args.device == "auto" else args.device
    with console.working(f"Loading {args.model}"):
        return load_model(args.model, **args.loading | {"device": device})


@dataclass(frozen=True)
class Session:
    loaded: LoadedModel  # the model and its tokenizer
    backends: Sequence[Backend]  # the first is the reference; caches of hybrid models have another
    folder: Path | None = None  # where finished pieces are saved; without one nothing is saved or found
    progress: console.Progress = field(default_factory=console.Progress)
    seed: int = 0  # seed of everything random
    environment: Environment = field(default_factory=lambda: collect())  # versions and devices of this process
    origins: list[Origin] = field(default_factory=list)  # of the pieces that the current section is made of

    def __post_init__(self) -> None:
        """Add what caches of a hybrid model are compared with."""
        object.__setattr__(self, "backends", with_references(self.loaded.model, self.backends))

    def origin(self) -> Origin:
        """Return how this process measures."""
        return Origin(**here_and_now(self.environment), seed=self.seed, model=self.loaded.info)

    def piece(
        self,
        kind: Any,
        make: Callable[[], Value],
        *place: str,
        backends: Sequence[Backend],
        is_final: Callable[[Value], bool] = lambda content: True,
        **settings: Any,
    ) -> tuple[Value, bool]:
        """Return a piece of a section, and whether it is from the run's folder. If not, it is made, and saved if final.

        ``kind`` is its type, and ``place`` has the names of its folders and file.
        """
        identity = self.identity(*backends, **settings)
        content = self.saved(kind, identity, "parts", *place)
        if content is not None:
            return content, True
        content = make()
        self.keep(kind, content, identity, "parts", *place, is_final=is_final(content))
        return content, False

    def saved(self, kind: type[Value], identity: Mapping[str, Any], *names: str) -> Value | None:
        """Return the piece of these names, if there is one of the same identity."""
        path = self._path(names)
        if path is None or not path.is_file():
            return None
        try:
            piece = parse(Piece[kind], path.read_bytes())  # type: ignore[valid-type]
        except ValueError:  # incomplete, or of another version: measure it again
            return None
        if piece.identity != json.loads(json.dumps(identity)):
            return None
        self.origins.append(piece.origin)
        return piece.content

    def keep(
        self, kind: type[Value], content: Value, identity: dict[str, Any], *names: str, is_final: bool = True
    ) -> None:
        """Note how a piece was measured, and save it under these names if it is final."""
        piece = Piece(identity=identity, origin=self.origin(), content=content)
        self.origins.append(piece.origin)
        path = self._path(names)
        if path is not None and is_final and PartialState().is_main_process:
            # Answers may hold infinities, which become null.
            write_text(schema(Piece[kind]).dump_json(piece).decode(), path)  # type: ignore[valid-type]

    def scratch(self, identity: Mapping[str, Any], *names: str) -> Path | None:
        """Return the file for an unfinished piece, one for each identity; ``None`` if nothing is saved."""
        path = self._path(names)
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
        return None if path is None else path.with_suffix(f".{digest}.partial")

    def _path(self, names: tuple[str, ...]) -> Path | None:
        *folders, last = map(slug, names)
        return None if self.folder is None else self.folder.joinpath(*folders, f"{last}.json")

    def identity(self, *backends: Backend, **settings: Any) -> dict[str, Any]:
        """Return everything that a result depends on, as JSON values: model, code, machine, backends and settings."""
        model, machine = self.loaded.info, self.environment
        return {
            "model": [model.name, model.revision, model.commit, model.parameters, model.dtype, model.yarn],
            "files": self.loaded.files,
            "device": model.device.partition(":")[0],
            "machine": [machine.cpu, machine.threads, machine.gpus],
            "versions": {name: machine.packages.get(name) for name in COMPUTING},
            "code": [machine.commit, source_hash()],
            "backends": [backend.info | {"reads_cache": backend.reads_cache} for backend in backends],
            **settings,
        }
