"""Attention backends by name: ``sdpa``, ``eager``, ``dma_mxfp``, ``dma_mxfp:PRESET``, ``dma_mxfp:FILE.toml``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dma_hf
from dma_hf import DMAConfig

from .errors import UserError, one_line

DMA = "dma_mxfp"


@dataclass(frozen=True)
class Backend:
    """One attention backend with its settings.

    Attributes:
        label: What tables and plots call it; no two backends of a run share one.
        implementation: Its name in Transformers (``attn_implementation``).
        config: Its precisions; None for any implementation but ``dma_mxfp``.
    """

    label: str
    implementation: str
    config: DMAConfig | None = None


def parse_backends(names: Sequence[str]) -> tuple[Backend, ...]:
    """Resolve names as given on the command line; the first one is the reference of a comparison.

    Raises:
        UserError: There are no names, an unknown implementation or preset (the message lists the valid ones), or a
            file that is not a valid configuration.
    """
    if not names:
        raise UserError("--attn needs at least one backend, for example: --attn sdpa dma_mxfp:balanced")
    backends = [_parse_backend(name) for name in names]
    total, seen = Counter(backend.label for backend in backends), Counter[str]()
    unique = []
    for backend in backends:
        seen[backend.label] += 1
        label = backend.label if total[backend.label] == 1 else f"{backend.label} #{seen[backend.label]}"
        unique.append(Backend(label, backend.implementation, backend.config))
    return tuple(unique)


def refuse_repeats(option: str, labels: Sequence[str]) -> None:
    """Refuse an option that names something twice.

    Raises:
        UserError: It does; the message says what.
    """
    repeated = {label for label in labels if labels.count(label) > 1}
    if repeated:
        raise UserError(f"{option}: {', '.join(sorted(repeated))} is given more than once")


def activate(model: PreTrainedModel, backend: Backend) -> None:
    """Switch ``model`` to ``backend``; nothing is loaded again.

    Raises:
        UserError: The model or this installation cannot run it.
    """
    try:
        model.set_attn_implementation(backend.implementation)
        if backend.config is not None:
            dma_hf.configure(model, backend.config)
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        raise UserError(f"{type(model).__name__} cannot run attention {backend.label!r}: {one_line(error)}") from error
    active = model.config._attn_implementation
    if active != backend.implementation:
        raise UserError(
            f"{type(model).__name__} does not let its attention be chosen: it stays {active!r} when "
            f"{backend.implementation!r} is set"
        )


def implementations() -> list[str]:
    """The attention implementations that this version of Transformers knows, ``dma_mxfp`` included."""
    return sorted({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()})


def _parse_backend(name: str) -> Backend:
    implementation, separator, setting = name.partition(":")
    if implementation not in implementations():
        raise UserError(
            f"--attn: unknown backend {name!r}; valid: {', '.join(implementations())}, and {DMA}:PRESET with a preset "
            f"({', '.join(dma_hf.PRESETS)}) or a TOML file"
        )
    if implementation != DMA:
        if separator:
            raise UserError(f"--attn: {implementation!r} takes no setting, got {name!r}; only {DMA}:PRESET does")
        return Backend(implementation, implementation)
    if separator and not setting:
        raise UserError(f"--attn: {name!r} names no preset; valid: {', '.join(dma_hf.PRESETS)}, or a TOML file")
    if not separator:
        return Backend(DMA, DMA, dma_hf.resolve("balanced"))
    return Backend(f"{DMA}:{_short(setting)}", DMA, _resolve(setting))


def _resolve(setting: str) -> DMAConfig:
    path = Path(setting)
    is_file = setting not in dma_hf.PRESETS and (path.suffix == ".toml" or path.exists())
    if is_file and not path.is_file():
        raise UserError(f"--attn: no such file: {setting}")
    if not is_file and setting not in dma_hf.PRESETS:
        raise UserError(
            f"--attn: unknown preset {setting!r}; valid: {', '.join(dma_hf.PRESETS)}, or a TOML file ({DMA}:FILE.toml)"
        )
    try:
        return dma_hf.resolve(path if is_file else setting)
    except (ValueError, TypeError, OSError) as error:  # TOMLDecodeError is a ValueError
        raise UserError(f"--attn: {setting}: {one_line(error)}") from error


def _short(setting: str) -> str:
    return setting if setting in dma_hf.PRESETS else Path(setting).stem
