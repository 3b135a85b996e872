"""The ``dma_mxfp`` section of a model's configuration, read at every call.

A layer knows the configuration of the model that it is part of, and no other. So in a composite model (vision and
language, say) each part has a section of its own, ``text_config.dma_mxfp`` for one; :func:`dma_hf.configure` writes
them all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from dma_kernels import Recipe
from dma_kernels.cache.formats import CacheFormat, cache_format
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .config import NAME, PRESETS, RUNTIME_FIELDS, SUFFIXES, DMAConfig, check_cache_name, preset_of
from .integrations.attention_name import attention_name, set_attention_name

PAGED_NAME = f"{NAME}_paged|flash"
"""The name while a model batches continuously; :mod:`dma_hf.integrations.paged_attention` says why it is this one."""

HUB_SUFFIX = f":{NAME}"
"""How the name of the implementation ends where it comes from the Hub: ``org/repo:dma_mxfp``."""

EQUALIZED = "dma_equalized"
"""The key of ``config.json`` that says that keys and queries were balanced: :func:`dma_hf.equalize` writes it."""

EVERY_TILE = 1 << 20
"""A band this wide holds every tile of any sequence."""


@dataclass(frozen=True)
class Settings:
    """A configuration, and what a call needs of it worked out once.

    Attributes:
        config: All of it.
        recipe: Numerics of self-attention.
        cross_recipe: Numerics of cross-attention: two sequences share no positions, so that there is no diagonal to
            hold in high precision, and every tile is high.
        name: The preset with these numerics, or ``custom``.
    """

    config: DMAConfig
    recipe: Recipe
    cross_recipe: Recipe
    name: str

    @classmethod
    def of(cls, config: DMAConfig) -> Settings:
        """Return the settings of a configuration."""
        recipe = config.recipe
        name = next((name for name, preset in PRESETS.items() if preset.recipe == recipe), "custom")
        return cls(config, recipe, replace(recipe, diagonal_tiles=EVERY_TILE), name)


_DEFAULT = Settings.of(DMAConfig())

IMPLEMENTATIONS = tuple(NAME + suffix for suffix in SUFFIXES)
"""The registered names. Without a preset, the section of the model's configuration has the numerics."""


def is_dma(implementation: str) -> bool:
    """Return whether an attention implementation is this one: ``dma_mxfp...``, or a Hub kernel's ``repo:dma_mxfp``."""
    return split_name(implementation)[0] in (NAME, PAGED_NAME) or implementation.endswith(HUB_SUFFIX)


def split_name(implementation: str) -> tuple[str, str, str]:
    """Split ``IMPLEMENTATION[:PRESET][+CACHE]`` into three parts; what is missing is empty."""
    name, _, cache = implementation.partition("+")
    name, _, preset = name.partition(":")
    return name, preset, cache


def settings_of(config: PreTrainedConfig) -> Settings:
    """Return the settings that a model's configuration names, ``balanced`` where it names none.

    A preset in the name of its attention implementation (``dma_mxfp:fp4``) overrides the ``dma_mxfp`` section. A cache
    without a preset (``dma_mxfp+int4``) overrides that of the section.

    Raises:
        TypeError: The section is neither a mapping nor the name of a preset.
        ValueError: It has an unknown key or an invalid value.
    """
    implementation, preset, cache = split_name(str(attention_name(config)))
    if implementation not in (NAME, PAGED_NAME):
        preset = cache = ""
    section = preset or getattr(config, NAME, None)
    if section is None and not cache:
        return _DEFAULT
    runtime = tuple(getattr(section, "runtime", {}).items())
    items = tuple(section.items()) if isinstance(section, dict) else section
    settings: Settings = _settings(items, runtime, cache)
    return settings


def cache_of(model: PreTrainedModel) -> str | None:
    """Return the format of the cache that a model's decoder is set to; ``None`` is Transformers' own cache.

    The section counts while the decoder runs ``dma_mxfp``.
    """
    decoder = model.config.get_text_config(decoder=True)
    return settings_of(decoder).config.cache if is_dma(str(attention_name(decoder))) else None


def cache_format_of(config: PreTrainedConfig, name: str) -> CacheFormat:
    """Return what the cache format that users call ``name`` is for the model of a decoder's configuration.

    Raises:
        ValueError: There is no such format.
    """
    return cache_format(name, is_equalized=getattr(config, EQUALIZED, False) is True)


def _parse(section: Any, runtime: tuple[tuple[str, str], ...], cache: str) -> Settings:
    """Parse a section, the runtime choices that go with it, and the name of a cache that replaces its own."""
    config = _parse_section(section, runtime)
    return Settings.of(replace(config, cache=check_cache_name(cache)) if cache else config)


def _parse_section(section: Any, runtime: tuple[tuple[str, str], ...]) -> DMAConfig:
    """Parse a section; a mapping is given as a tuple of its items."""
    source = f"the {NAME!r} section of the model's config.json"
    if section is None:
        return _DEFAULT.config
    if isinstance(section, str):
        try:
            return preset_of(section, ", or a mapping of fields")
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    if isinstance(section, tuple):
        fields = dict(section)
        given = DMAConfig.from_dict(
            {name: fields.pop(name) for name in RUNTIME_FIELDS if name in fields}, source=source
        )
        for name in RUNTIME_FIELDS:
            if getattr(given, name) != getattr(_DEFAULT.config, name):
                warnings.warn(
                    f"{source} sets {name}={getattr(given, name)!r}, which is a choice of the machine that runs a "
                    f"model, and is ignored; dma_hf.configure(model, {name}=...) sets it",
                    stacklevel=2,
                )
        return DMAConfig.from_dict(fields | dict(runtime), source=source)
    raise TypeError(
        f"{source}: expected a preset ({', '.join(PRESETS)}) or a mapping of fields, got {section!r}; "
        "dma_hf.configure(model, ...) writes it"
    )


_cached = lru_cache(maxsize=256)(_parse)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _settings(section: Any, runtime: tuple[tuple[str, str], ...], cache: str) -> Settings:
    """Parse a section or recall it; ``torch.compile`` does so while tracing, guarded by it."""
    try:
        return _cached(section, runtime, cache)
    except TypeError:  # an unhashable value: the section is invalid, and parsing it says how
        return _parse(section, runtime, cache)


def distinct_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Return the configurations that the modules of a model read, and those nested in them, each once, outermost first.

    Not only models have one: some parts of a composite model are plain modules with a copy (X-CLIP).
    """
    found: dict[int, PreTrainedConfig] = {}
    pending = [getattr(module, "config", None) for module in model.modules()]
    while pending:
        config = pending.pop(0)
        if not isinstance(config, PreTrainedConfig) or id(config) in found:
            continue
        found[id(config)] = config
        pending.extend(getattr(config, name, None) for name in config.sub_configs)
    return list(found.values())


def rename(model: nn.Module, new: Callable[[Any], Any]) -> list[tuple[PreTrainedConfig, Any]]:
    """Give the attention of a model's parts other names; return what they were called, for :func:`restore_names`."""
    saved = [(config, attention_name(config)) for config in distinct_configs(model)]
    for config, name in saved:  # outermost first: the setter writes to nested ones too
        set_attention_name(config, new(name))
    return saved


def restore_names(saved: list[tuple[PreTrainedConfig, Any]]) -> None:
    """Take back :func:`rename`."""
    for config, name in saved:
        set_attention_name(config, name)
