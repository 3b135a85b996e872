"""Attention backends by name: ``sdpa``, ``eager``, ``dma_mxfp``, ``dma_mxfp:PRESET``, ``dma_mxfp:FILE.toml``.

``+int8`` or ``+int4`` after one of ``dma_mxfp`` (``dma_mxfp:balanced+int4``) lets the model read everything through a
``DMACache`` of that format, and so does a preset or file that names a format (``dma_mxfp:kv4``): what is scored then is
what the cache stores. See :mod:`dma_eval.reading`. ``sdpa+quanto4`` and the like read through Transformers'
``QuantizedCache``, and ``sim_sage`` and others round as another kernel does: see :mod:`dma_eval.peers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import Cache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dma_hf
from dma_hf import DMAConfig
from dma_hf.cache import DEFAULT_FORMAT
from dma_hf.cache_layers import DMALayer
from dma_hf.integrations.attention_name import attention_name

from .errors import UserError, one_line
from .names import CACHE_SUFFIX, DMA, FORMAT_SUFFIXES, PEER_SUFFIXES, check_names, is_file, split_suffix
from .peers import quantized_cache

CACHE_PRESETS = ("kv8", "kv4")
"""Presets that are meant for caches: where all presets are compared, these read through one."""


@dataclass(frozen=True)
class Backend:
    """One attention backend with its settings."""

    label: str  # what tables and plots call it; no two backends of a run share one
    implementation: str  # its name in Transformers (``attn_implementation``)
    config: DMAConfig | None = None  # its precisions; None for any implementation but ``dma_mxfp``
    reads_cache: bool = False  # whether it reads every sequence through a cache
    peer_cache: str | None = None  # which ``QuantizedCache`` that is, by suffix; else a ``DMACache``

    @property
    def info(self) -> dict[str, Any]:
        """What results say of it: the fields of :class:`dma_eval.results.BackendInfo`."""
        config = None if self.config is None else self.config.to_dict()
        return {"label": self.label, "implementation": self.implementation, "config": config}


def default_names() -> list[str]:
    """SDPA and every preset."""
    return ["sdpa", *(f"{DMA}:{name}{CACHE_SUFFIX if name in CACHE_PRESETS else ''}" for name in dma_hf.PRESETS)]


def parse_backends(names: Sequence[str], option: str = "--attn") -> tuple[Backend, ...]:
    """Resolve names as given by an option of the command line; the first one is the reference of a comparison.

    Raises:
        UserError: There are no names, an unknown implementation or preset (the message lists the valid ones), or a
            file that is not a valid configuration.
    """
    if not names:
        raise UserError(f"{option} needs at least one backend, for example: {option} sdpa dma_mxfp:balanced")
    backends = [_parse_backend(name, option) for name in names]
    total, seen = Counter(backend.label for backend in backends), Counter[str]()
    unique = []
    for backend in backends:
        seen[backend.label] += 1
        label = backend.label if total[backend.label] == 1 else f"{backend.label} #{seen[backend.label]}"
        unique.append(replace(backend, label=label))
    return tuple(unique)


def parse_compared(names: Sequence[str], option: str, others: Sequence[str]) -> list[Backend]:
    """Resolve what a benchmark compares: ``others``, by their names, and ``dma_mxfp`` without ``+cache``.

    Raises:
        UserError: There are none, two are the same, one is unknown (the message lists the valid ones), or one reads
            through a cache, which the benchmark does not.
    """
    found = []
    for name in names:
        if name in others:
            found.append(Backend(name, name))
        elif name.partition(":")[0] == DMA:
            found += parse_backends([name], option)
            if not split_suffix(name)[1]:  # of a preset with a cache, its precisions
                found[-1] = replace(found[-1], reads_cache=False)
        else:
            known = [*others, *(f"{DMA}:{preset}" for preset in dma_hf.PRESETS), f"{DMA}:FILE.toml"]
            raise UserError(f"{option}: unknown name {name!r}; valid: {', '.join(known)}")
        if found[-1].reads_cache and option != "--cache":
            raise UserError(f"{option}: {name!r} reads through a cache, which is not timed here; leave out the +")
    refuse_repeats(option, [backend.label for backend in found])
    return found


def refuse_repeats(option: str, labels: Sequence[str]) -> None:
    """Refuse an option that names nothing, or something twice.

    Raises:
        UserError: It does; the message says what.
    """
    if not labels:
        raise UserError(f"{option} needs at least one value")
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
    active = attention_name(model.config)
    if active != backend.implementation:
        raise UserError(
            f"{type(model).__name__} does not let its attention be chosen: it stays {active!r} when "
            f"{backend.implementation!r} is set"
        )
    new_cache(model, backend)


def new_cache(model: PreTrainedModel, backend: Backend) -> Cache | None:
    """An empty cache for a model that runs ``backend``; ``None`` if the backend reads without one.

    Raises:
        UserError: The model has no layer that a ``DMACache`` packs, or one that a ``QuantizedCache`` does not know; or
            the package that quantises is not installed.
    """
    if not backend.reads_cache:
        return None
    if backend.peer_cache is not None:
        try:
            return quantized_cache(model.config, backend.peer_cache)
        except (ImportError, ValueError) as error:
            raise UserError(f"{type(model).__name__} cannot run {backend.label!r}: {one_line(error)}") from error
    cache = dma_hf.DMACache(model.config)
    if not any(isinstance(layer, DMALayer) for layer in cache.layers):
        raise UserError(f"{type(model).__name__} cannot run {backend.label!r}: a DMACache packs none of its layers")
    return cache


def implementations() -> list[str]:
    """The attention implementations that this version of Transformers knows, ``dma_mxfp`` included."""
    known = (name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if not name.startswith(f"{DMA}:"))
    return sorted({"eager", *known})


def _parse_backend(name: str, option: str) -> Backend:
    setting_name, suffix = split_suffix(name)
    implementation, separator, setting = setting_name.partition(":")
    if implementation not in implementations():
        raise UserError(
            f"{option}: unknown backend {name!r}; valid: {', '.join(implementations())}, and {DMA}:PRESET with a "
            f"preset ({', '.join(dma_hf.PRESETS)}) or a TOML file"
        )
    if implementation != DMA:
        if separator or (suffix and suffix not in PEER_SUFFIXES):
            raise UserError(
                f"{option}: {implementation!r} takes no setting, got {name!r}; only {DMA}:PRESET and "
                f"{DMA}:PRESET{'|'.join(FORMAT_SUFFIXES)} do, and {implementation}{'|'.join(PEER_SUFFIXES)}"
            )
        return Backend(name, implementation, reads_cache=bool(suffix), peer_cache=suffix or None)
    if suffix in PEER_SUFFIXES:
        raise UserError(f"{option}: {name!r}: {suffix} is a cache of Transformers, which {DMA} does not read through")
    check_names([name], option)
    setting = setting if separator else "balanced"
    try:
        config = dma_hf.resolve(Path(setting) if is_file(setting) else setting)
    except (ValueError, TypeError, OSError) as error:  # TOMLDecodeError is a ValueError
        raise UserError(f"{option}: {one_line(error)}") from error  # which names the file
    if suffix:
        config = replace(config, cache=FORMAT_SUFFIXES.get(suffix) or config.cache or DEFAULT_FORMAT)
    short = Path(setting).stem if is_file(setting) else setting
    return Backend(f"{DMA}:{short}{suffix}" if separator else f"{DMA}{suffix}", DMA, config, config.cache is not None)
