"""The ``dma_mxfp`` section of a model's configuration: reading it at every call, and writing it.

A layer knows the configuration of the model that it is part of, and no other. So in a composite model (vision and
language, say) each part has a section of its own, ``text_config.dma_mxfp`` for one; :func:`configure` writes them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from dma_kernels import Recipe
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .config import PRESETS, DMAConfig, preset, resolve
from .masking import built_in_attention, refuse_model

NAME = "dma_mxfp"
"""The name of the attention implementation, and the key of its section in ``config.json``."""

PAGED_NAME = f"{NAME}_paged|flash"
"""The name while a model batches continuously; :mod:`dma_hf.paged` says why it is such a name."""

HUB_SUFFIX = f":{NAME}"
"""How the name of the implementation ends where it comes from the Hub: ``org/repo:dma_mxfp``."""

EVERY_TILE = 1 << 20
"""A band this wide holds every tile of any sequence."""


@dataclass(frozen=True)
class Settings:
    """What a call needs to know of a configuration, worked out once.

    Attributes:
        recipe: Numerics of self-attention.
        cross_recipe: Numerics of cross-attention: two sequences share no positions, so that there is no diagonal to
            hold in high precision, and every tile is high.
        backend: Which backend computes.
        on_unsupported: ``error`` or ``sdpa``.
        cache: The format of the cache of ``generate``, or ``None``.
    """

    recipe: Recipe
    cross_recipe: Recipe
    backend: str
    on_unsupported: str
    cache: str | None

    @classmethod
    def of(cls, config: DMAConfig) -> Settings:
        """Return the settings of a configuration."""
        recipe = config.recipe
        return cls(
            recipe, replace(recipe, diagonal_tiles=EVERY_TILE), config.backend, config.on_unsupported, config.cache
        )


_DEFAULT = Settings.of(DMAConfig())


def is_dma(implementation: str) -> bool:
    """Whether an attention implementation is this one: ``dma_mxfp``, or a Hub kernel's ``org/repo:dma_mxfp``."""
    return implementation in (NAME, PAGED_NAME) or implementation.endswith(HUB_SUFFIX)


def settings_of(config: PreTrainedConfig) -> Settings:
    """Return the settings in the ``dma_mxfp`` section of a model's configuration, ``balanced`` where there is none.

    Raises:
        TypeError: The section is neither a mapping nor the name of a preset.
        ValueError: It holds an unknown key or a wrong value.
    """
    section = getattr(config, NAME, None)
    if section is None:
        return _DEFAULT
    settings: Settings = _settings(tuple(section.items()) if isinstance(section, dict) else section)
    return settings


def configure(
    model: nn.Module,
    setting: str | Path | Mapping[str, Any] | Recipe | None = None,
    *,
    activate: bool = False,
    **changes: Any,
) -> DMAConfig:
    """Set the precisions of a model that runs ``dma_mxfp``.

    Writes the section ``dma_mxfp`` to the configuration of the model and of every model inside it, from where the next
    forward pass reads it and ``save_pretrained`` saves it. Nothing is changed if anything is wrong.

    Args:
        model: A Transformers model, or a module that holds one.
        setting: A preset's name, a TOML file, a mapping of fields or a :class:`DMAConfig`. By default what the model
            has already: the section of its configuration, or ``balanced``.
        activate: Also switch the model to ``dma_mxfp``, with ``set_attn_implementation``.
        changes: Fields to change in ``setting``. With ``cache="int8"`` or ``"int4"`` a new :class:`~dma_hf.DMACache` is
            the cache of every ``generate`` of this model that does not ask for another one.

    Returns:
        The configuration that was set.

    Raises:
        OSError: The file cannot be read.
        TypeError: ``setting`` or ``model`` is not as described.
        ValueError: There is no such preset; a key or a value is wrong; or no part of the model runs ``dma_mxfp``,
            because another implementation is set or because the model class computes its attention itself.
    """
    is_module = isinstance(model, nn.Module)
    models = [each for each in model.modules() if isinstance(each, PreTrainedModel)] if is_module else []
    if not models:
        raise TypeError(_not_a_model(model))
    config = (_section_of(models[0].config) if setting is None else resolve(setting)).with_changes(**changes)
    if all(built_in_attention(type(module.config).__module__) for module in models):
        refuse_model(models[0].config)
    if activate:
        models[0].set_attn_implementation(NAME)
    configs = distinct_configs(model)
    running = sorted({str(each._attn_implementation) for each in configs})
    if not any(is_dma(name) for name in running):
        raise ValueError(
            f"{type(models[0]).__name__} runs attention {', '.join(map(repr, running))}, which the settings of {NAME} "
            f"do not reach; load it with attn_implementation={NAME!r}, or pass activate=True"
        )
    for each in configs:
        setattr(each, NAME, config.to_dict())
    from .cache import make_default  # which itself reads settings

    make_default(models[0], config.cache is not None)
    return config


def _not_a_model(given: Any) -> str:
    """Say why something cannot be configured, and what can."""
    if isinstance(getattr(given, "model", None), nn.Module):
        hint = "; pass its model: configure(pipeline.model, ...)"
    elif isinstance(given, nn.Module):
        hint = ", which holds no PreTrainedModel"
    else:
        hint = "; load a model with attn_implementation='dma_mxfp', and pass that"
    return f"expected a Transformers model, got {type(given).__name__}{hint}"


def _section_of(config: PreTrainedConfig) -> DMAConfig:
    section = getattr(config, NAME, None)
    return DMAConfig() if section is None else _parse(section)


def _parse(section: Any) -> DMAConfig:
    source = f"the {NAME!r} section of the model's config.json"
    if isinstance(section, str):
        try:
            return preset(section)
        except ValueError as error:
            raise ValueError(f"{source}: {error}, or a mapping of fields") from None
    if isinstance(section, dict):
        return DMAConfig.from_dict(section, source=source)
    raise TypeError(
        f"{source}: expected the name of a preset ({', '.join(PRESETS)}) or a mapping of fields, got {section!r}; "
        "dma_hf.configure(model, ...) writes it"
    )


@lru_cache(maxsize=256)
def _cached(key: Any) -> Settings:
    return Settings.of(_parse(dict(key) if isinstance(key, tuple) else key))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _settings(key: Any) -> Settings:
    """Parse a section, given as a string or as its items; ``torch.compile`` does so while tracing, guarded by them."""
    try:
        return _cached(key)
    except TypeError:  # an unhashable value: the section is wrong, and parsing it says how
        return Settings.of(_parse(dict(key) if isinstance(key, tuple) else key))


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
