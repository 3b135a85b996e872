"""Attention backends by name: ``IMPLEMENTATION[:PRESET][+CACHE]``.

With a cache the model reads all tokens through a ``DMACache``, so the scores measure the stored values
(:mod:`dma_eval.load.reading`). Other implementations use the caches of Transformers (``sdpa+quanto4``). ``sim_sage``
and others simulate the rounding of other kernels (:mod:`dma_eval.load.baselines`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dma_hf
from dma_eval.errors import UserError, one_line
from dma_eval.names import DMA, DYNAMIC, FORMAT_SUFFIXES, INFINITY, is_file, parse_name
from dma_hf import DMAConfig
from dma_hf.cache_layers import DMALayer
from dma_hf.integrations.internals import attention_name

from .baselines import quantized_cache

PAGED = "paged|"  # part of the name of what continuous batching runs in place of an implementation
DEFAULT_PRESET = "balanced"
"""The preset of a plain ``dma_mxfp``, and the one that default comparisons combine with each cache format."""


@dataclass(frozen=True)
class Backend:
    """One attention backend with its settings."""

    label: str  # its name in tables and plots, unique in a run
    implementation: str  # its name in Transformers (``attn_implementation``)
    config: DMAConfig | None = None  # settings of ``dma_mxfp``; ``None`` for every other implementation
    peer_cache: str | None = None  # suffix of the cache of Transformers that it reads through
    reference: str | None = None  # label of what it is compared with, if not the first of a run

    @property
    def reads_cache(self) -> bool:
        """Whether it reads every sequence through a cache."""
        return self.peer_cache is not None or (self.config is not None and self.config.cache is not None)

    @property
    def info(self) -> dict[str, Any]:
        """The fields of :class:`dma_eval.results.BackendInfo`."""
        config = None if self.config is None else self.config.to_dict()
        if config is not None and config["skip_threshold"] == math.inf:
            config["skip_threshold"] = INFINITY
        return {"label": self.label, "implementation": self.implementation, "config": config}


def default_names() -> list[str]:
    """Return SDPA, every preset, and one preset with each cache format."""
    cached = [DEFAULT_PRESET + suffix for suffix in FORMAT_SUFFIXES]
    return ["sdpa", *(f"{DMA}:{name}" for name in (*dma_hf.PRESETS, *cached))]


def parse_backends(names: Sequence[str], option: str = "--attn") -> tuple[Backend, ...]:
    """Resolve the names that an option lists. The first one is the reference."""
    backends = [_parse_backend(name, option) for name in names]
    total, seen = Counter(backend.label for backend in backends), Counter[str]()
    unique = []
    for backend in backends:
        seen[label := backend.label] += 1
        unique.append(backend if total[label] == 1 else replace(backend, label=f"{label} #{seen[label]}"))
    return tuple(unique)


def activate(model: PreTrainedModel, backend: Backend) -> None:
    """Switch ``model`` to ``backend`` without loading it again."""
    try:
        model.set_attn_implementation(backend.implementation)
        if backend.config is not None:
            dma_hf.configure(model, backend.config)
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        raise UserError(f"{type(model).__name__} cannot run attention {backend.label!r}: {one_line(error)}") from error
    active = attention_name(model.config)
    if active != backend.implementation:
        raise UserError(
            f"{type(model).__name__} ignores attn_implementation: it still runs {active!r} after "
            f"{backend.implementation!r} was set"
        )
    new_cache(model, backend)


def new_cache(model: PreTrainedModel, backend: Backend) -> Cache | None:
    """Return an empty cache for a model that runs ``backend``; ``None`` if the backend reads without one."""
    if not backend.reads_cache:
        return None
    try:
        if backend.peer_cache == DYNAMIC:
            return DynamicCache(config=model.config)
        if backend.peer_cache is not None:
            return quantized_cache(model.config, backend.peer_cache)
        cache = dma_hf.DMACache(model.config)
        if not any(isinstance(layer, DMALayer) for layer in cache.layers):
            raise ValueError("a DMACache packs none of its layers")
    except (ImportError, ValueError) as error:
        raise UserError(f"{type(model).__name__} cannot run {backend.label!r}: {one_line(error)}") from error
    return cache


def with_references(model: PreTrainedModel, backends: Sequence[Backend]) -> tuple[Backend, ...]:
    """Return backends with what those that read through a cache are compared with, on a hybrid model.

    Such a model keeps a recurrent state, and some compute it differently when they read in chunks. That is no loss of
    the cache. So the first backend also reads in the same chunks, through the 16-bit cache of Transformers.
    """
    if not needs_chunks(model, backends) or backends[0].reads_cache:
        return tuple(backends)
    chunked = in_chunks(backends[0])
    given = next((each for each in backends if replace(each, label=chunked.label) == chunked), None)
    if given is None:
        first = next(index for index, each in enumerate(backends) if each.reads_cache)
        backends = (*backends[:first], chunked, *backends[first:])
    return compared_with(given or chunked, backends)


def compared_with(chunked: Backend, backends: Sequence[Backend]) -> tuple[Backend, ...]:
    """Return backends of which those that read through a cache, except a 16-bit one, have ``chunked`` as reference."""
    return tuple(
        replace(each, reference=chunked.label) if each.reads_cache and each.peer_cache != DYNAMIC else each
        for each in backends
    )


def needs_chunks(model: PreTrainedModel, backends: Sequence[Backend]) -> bool:
    """Return whether a model is a hybrid, and some backend reads it through a cache that is not the 16-bit one."""
    return any(each.reads_cache and each.peer_cache != DYNAMIC for each in backends) and is_hybrid(model)


def is_hybrid(model: PreTrainedModel) -> bool:
    """Return whether some layers of a model keep a recurrent state."""
    return any(isinstance(each, LinearAttentionCacheLayerMixin) for each in DynamicCache(config=model.config).layers)


def in_chunks(backend: Backend) -> Backend:
    """Return a backend that reads through the 16-bit cache of Transformers."""
    return replace(backend, label=f"{backend.label}{DYNAMIC}", peer_cache=DYNAMIC)


def implementations() -> list[str]:
    """Return the attention implementations of Transformers without those of continuous batching, which need pages."""
    excluded = (f"{DMA}:", f"{DMA}+")
    names = (name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if PAGED not in name)
    return sorted({"eager", *(name for name in names if not name.startswith(excluded))})


def _parse_backend(name: str, option: str) -> Backend:
    implementation, setting, suffix = parse_name(name, option, implementations())
    if implementation != DMA:
        return Backend(name, implementation, peer_cache=suffix or None)
    named, setting = bool(setting), setting or DEFAULT_PRESET
    try:
        make = DMAConfig.from_toml if is_file(setting) else DMAConfig.from_preset
        config = make(setting, **({"cache": FORMAT_SUFFIXES[suffix]} if suffix else {}))
    except (ValueError, OSError) as error:  # TOMLDecodeError is a ValueError
        raise UserError(f"{option}: {one_line(error)}") from error  # it names the file
    cache = "" if config.cache is None else f"+{config.cache}"  # a file may name one too
    if is_file(setting):
        file, setting = Path(setting), Path(setting).stem.removesuffix(cache)
        if setting in dma_hf.PRESETS and config != DMAConfig.from_preset(setting, cache=config.cache):
            setting = file.name  # so that it is not taken for the preset
    return Backend(f"{DMA}:{setting}{cache}" if named else f"{DMA}{cache}", DMA, config)
