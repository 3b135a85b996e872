"""``DMAConfig``: the settings of ``dma_mxfp``, its presets, and how both are named and saved.

Settings come from the name of the attention implementation, ``dma_mxfp[:PRESET][+CACHE]``, or from the section
``dma_mxfp`` of the model's configuration, which ``configure`` writes. What the name has overrides the section.
"""

from __future__ import annotations

import json
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from dma_kernels import Recipe
from dma_kernels.cache.formats import CACHE_FORMATS, CacheFormat, cache_format
from dma_kernels.numerics.recipe import RECIPE_FIELDS
from dma_kernels.runtime.chip import BACKENDS
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from .integrations.internals import attention_name, decoder_attention

NAME = "dma_mxfp"
"""Name of the attention implementation, and key of its section in ``config.json``."""

ON_UNSUPPORTED = ("error", "sdpa")
RUNTIME_FIELDS = ("backend", "on_unsupported")
"""Fields that depend on the machine that runs a model. They are not saved."""


class Section(dict[str, Any]):
    """The ``dma_mxfp`` section of a model's configuration: the fields that are saved with the model.

    Args:
        saved: Field names and values.
        runtime: Values of :data:`RUNTIME_FIELDS`. Copies of the model keep them; its JSON file does not.
    """

    def __init__(self, saved: Mapping[str, Any], runtime: Mapping[str, str]) -> None:
        super().__init__(saved)
        self.runtime = dict(runtime)


@dataclass(frozen=True, kw_only=True)
class DMAConfig(Recipe):
    """Settings of a model that runs ``dma_mxfp``. The default is the preset ``balanced``::

        DMAConfig(low="mxfp4", cache="int4")
        DMAConfig.from_preset("fp4", cache="int8")
        DMAConfig.from_toml("my.toml")

    The fields of :class:`~dma_kernels.Recipe` choose the precision of each tile. They, ``cache`` and ``high_layers``
    are saved with a model. ``backend`` and ``on_unsupported`` are not. :func:`dataclasses.replace` changes fields.

    Attributes:
        backend: ``auto`` (Triton on CUDA, the reference elsewhere), ``reference`` or ``triton``.
        cache: Format of the KV cache that ``generate`` uses: ``int8``, ``int4``, or ``None`` for Transformers' 16-bit
            cache. It does not depend on the precisions, which apply to prompts.
        high_layers: Layers in which every tile is high. They count from 0 as in Transformers' caches (``layer_idx`` of
            an attention layer). Layers without a number, as in vision encoders, are never among them.
        on_unsupported: What happens to a call that the backend cannot compute. ``error`` raises. ``sdpa`` runs
            Transformers' SDPA attention, warns once and counts the call (:func:`dma_hf.stats`).

    Raises:
        ValueError: A field has an invalid value. The message lists the valid ones.
    """

    low: str = "mxint8"
    exact_until: int = 1024
    shared_scale: str = "tile"
    smooth_k: bool = True
    rotate: bool = True
    pv: str = "fp8"
    backend: str = "auto"
    on_unsupported: str = "error"
    cache: str | None = None
    high_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        for name, choices in (("backend", BACKENDS), ("on_unsupported", ON_UNSUPPORTED)):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
        if self.cache not in (None, *CACHE_FORMATS):
            raise ValueError(f"cache must be one of {', '.join(CACHE_FORMATS)}, or None; got {self.cache!r}")
        layers: Any = self.high_layers
        is_valid = isinstance(layers, (list, tuple, range)) and all(
            type(index) is int and index >= 0 for index in layers
        )
        if not is_valid:
            raise ValueError(f"high_layers must list indices of layers, which count from 0; got {layers!r}")
        object.__setattr__(self, "high_layers", tuple(sorted(set(layers))))  # TOML and JSON have lists

    @property
    def recipe(self) -> Recipe:
        """The numerics without the cache and the runtime choices."""
        return Recipe(**{name: getattr(self, name) for name in RECIPE_FIELDS})

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> DMAConfig:
        """Return a preset.

        Args:
            name: A key of :data:`PRESETS`.
            changes: Fields that differ from the preset, such as ``cache``.

        Raises:
            TypeError: ``name`` is not a string.
            ValueError: There is no such preset, or a field is unknown or invalid.
        """
        if not isinstance(name, str):
            raise TypeError(f"name must be a preset ({', '.join(PRESETS)}), got {name!r}")
        if name not in PRESETS:
            implementation, preset, cache = split_name(name)
            known = preset or implementation
            arguments = f"{known!r}, cache={cache!r}" if cache else repr(known)
            hint = f"; dma_hf.configure(model, {arguments}) sets it" if known in PRESETS else ""
            raise ValueError(f"unknown preset {name!r}; expected one of {', '.join(PRESETS)}{hint}")
        return _changed(PRESETS[name], changes)

    @classmethod
    def from_dict(cls, section: Mapping[str, Any], *, source: str = "") -> Self:
        """Return the configuration of a mapping. Missing keys have the values of ``balanced``.

        Args:
            section: Field names and values.
            source: Origin of the mapping, which error messages begin with.

        Raises:
            TypeError: ``section`` is not a mapping.
            ValueError: A key is unknown, or a value is invalid.
        """
        prefix = f"{source}: " if source else ""
        if not isinstance(section, Mapping):
            raise TypeError(f"{prefix}expected a mapping of configuration keys, got {section!r}")
        _check_keys(section, prefix)
        try:
            return cls(**section)
        except ValueError as error:
            raise ValueError(f"{prefix}{error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain JSON values."""
        values = {name: getattr(self, name) for name in FIELDS}
        return values | {"high_layers": list(self.high_layers)}

    def to_section(self) -> Section:
        """Return the section of a model's configuration that holds these settings."""
        saved = self.to_dict()
        runtime = {name: saved.pop(name) for name in RUNTIME_FIELDS}
        return Section(saved, runtime)

    @classmethod
    def from_toml(cls, path: str | Path, **changes: Any) -> DMAConfig:
        """Read a TOML file whose top-level keys are field names.

        Args:
            path: The file.
            changes: Fields that differ from the file.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is not TOML, or a key or value is invalid. The message names the file.
        """
        try:
            section = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # Windows editors write a BOM
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a TOML file: {error}") from None
        return _changed(cls.from_dict(section, source=str(path)), changes)

    def to_toml(self, path: str | Path) -> None:
        """Write the fields that are saved with a model to a TOML file, except those that are ``None``."""
        values = {name: value for name, value in self.to_section().items() if value is not None}
        lines = [f"{n} = {v if isinstance(v, float) else json.dumps(v)}\n" for n, v in values.items()]
        Path(path).write_text("".join(lines), encoding="utf-8")


FIELDS = tuple(field.name for field in fields(DMAConfig))

PRESETS: Mapping[str, DMAConfig] = MappingProxyType(
    {
        # Rotated: without it, outlier key channels cost more (benchmarks/quality.md, "Variants of balanced").
        "balanced": DMAConfig(),
        # Layer 0 of Qwen2.5 has key biases that 4 bits cannot represent (benchmarks/quality.md, "Models"). Up to 2,048
        # tokens, Hopper's kernel for 4 bits is slower than exact attention by cuDNN (benchmarks/prefill.md).
        "fp4": DMAConfig(
            low="nvfp4", exact_until=2048, scale_rounding="search", shared_scale="block", high_layers=(0,)
        ),
        "paper": DMAConfig(
            low="mxfp4",
            high="mxfp8",
            exact_until=0,
            scale_rounding="floor",
            shared_scale="block",
            smooth_k=False,
            rotate=False,
            pv="bf16",
        ),
    }
)
"""Numerics by name."""


def config_of(setting: str | Path | Mapping[str, Any] | Recipe, **changes: Any) -> DMAConfig:
    """Return the configuration that the argument ``setting`` of :func:`dma_hf.configure` describes.

    Args:
        setting: A preset, the path of a TOML file, a mapping of fields, a configuration, or numerics alone.
        changes: Fields that differ from it.

    Raises:
        OSError: The file cannot be read.
        TypeError: ``setting`` is none of these.
        ValueError: The preset, a key or a value is invalid.
    """
    if isinstance(setting, Path) or str(setting).endswith(".toml"):
        return DMAConfig.from_toml(setting, **changes)  # type: ignore[arg-type]
    if isinstance(setting, str):
        return DMAConfig.from_preset(setting, **changes)
    if isinstance(setting, Mapping):
        return _changed(DMAConfig.from_dict(setting), changes)
    if not isinstance(setting, Recipe):
        raise TypeError(
            f"setting must be a preset ({', '.join(PRESETS)}), the path of a .toml file, a mapping or a DMAConfig; "
            f"got {setting!r}"
        )
    if not isinstance(setting, DMAConfig):
        setting = DMAConfig(**{name: getattr(setting, name) for name in RECIPE_FIELDS})
    return _changed(setting, changes)


def _changed(config: DMAConfig, changes: Mapping[str, Any]) -> DMAConfig:
    _check_keys(changes, "")
    return replace(config, **changes) if changes else config


def _check_keys(section: Mapping[str, Any], prefix: str) -> None:
    unknown = [key for key in section if key not in FIELDS]
    if unknown:
        raise ValueError(
            f"{prefix}unknown key{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}; "
            f"valid keys: {', '.join(FIELDS)}"
        )


PAGED_NAME = f"{NAME}_paged|flash"
"""The name during continuous batching. :mod:`dma_hf.integrations.paged_attention` explains it."""

HUB_SUFFIX = f":{NAME}"
"""The end of the name of an implementation from the Hub: ``org/repo:dma_mxfp``."""

EQUALIZED = "dma_equalized"
"""The key of ``config.json`` that marks a model as equalized. ``dma_eval.equalization.equalize`` writes it."""

EVERY_TILE = 1 << 20
"""Width of a band that contains every tile of any sequence."""


@dataclass(frozen=True)
class Settings:
    """A configuration and the values that calls derive from it.

    Attributes:
        config: The configuration.
        recipe: Numerics of self-attention.
        cross_recipe: Numerics of cross-attention. Every tile is in high precision, because two sequences have no
            diagonal.
        name: The preset with these numerics, or ``custom``.
    """

    config: DMAConfig
    recipe: Recipe
    cross_recipe: Recipe
    name: str

    @classmethod
    def of(cls, config: DMAConfig) -> Settings:
        """Return the settings of a configuration."""
        numerics = config.recipe, config.high_layers
        name = next((name for name, each in PRESETS.items() if (each.recipe, each.high_layers) == numerics), "custom")
        every_tile = replace(config.recipe, diagonal_tiles=EVERY_TILE)
        return cls(config, config.recipe, every_tile, name)

    def of_layer(self, layer_idx: int | None) -> Settings:
        """Return the settings of a layer by its number."""
        return replace(self, recipe=self.cross_recipe) if layer_idx in self.config.high_layers else self


_DEFAULT = Settings.of(DMAConfig())

IMPLEMENTATIONS = tuple(
    NAME + preset + cache
    for preset in ("", *(f":{name}" for name in PRESETS))
    for cache in ("", *(f"+{format}" for format in CACHE_FORMATS))
)
"""The registered names. Without a preset, the section of the model's configuration has the numerics."""


def is_dma(implementation: Any) -> bool:
    """Return whether an attention implementation is this one: ``dma_mxfp...``, or a Hub kernel's ``repo:dma_mxfp``."""
    name = str(implementation)
    return split_name(name)[0] in (NAME, PAGED_NAME) or name.endswith(HUB_SUFFIX)


def is_ours(model: PreTrainedModel) -> bool:
    """Return whether a model's decoder runs the attention of this package, not that of a copy from the Hub.

    The name decides for the package itself, so that a function registered over its own one changes nothing.
    """
    name = str(decoder_attention(model))
    if __name__ == "dma_hf.config":
        return split_name(name)[0] in (NAME, PAGED_NAME)
    return name.endswith(HUB_SUFFIX) and AttentionInterface()[name].__module__.startswith(
        __name__.removesuffix("config")
    )


def split_name(implementation: str) -> tuple[str, str, str]:
    """Split ``IMPLEMENTATION[:PRESET][+CACHE]`` into three parts; what is missing is empty."""
    name, _, cache = implementation.partition("+")
    name, _, preset = name.partition(":")
    return name, preset, cache


def settings_of(config: PreTrainedConfig, layer: nn.Module | None = None) -> Settings:
    """Return the settings in a model's configuration, or those of one of its layers. The default is ``balanced``.

    A preset in the name of its attention implementation (``dma_mxfp:fp4``) overrides the ``dma_mxfp`` section. A cache
    without a preset (``dma_mxfp+int4``) overrides that of the section.

    Raises:
        TypeError: The section is neither a mapping nor the name of a preset.
        ValueError: It has an unknown key or an invalid value.
    """
    implementation, preset, cache = split_name(str(attention_name(config)))
    if implementation not in (NAME, PAGED_NAME):
        preset = cache = ""
    # A configuration takes microseconds to say that it lacks an attribute, and every layer asks.
    section = preset or vars(config).get(NAME)
    if section is None and not cache:
        return _DEFAULT
    runtime = tuple(getattr(section, "runtime", {}).items())
    items = tuple(section.items()) if isinstance(section, dict) else section
    if isinstance(section, dict) and isinstance(layers := section.get("high_layers"), list):
        items = tuple({**section, "high_layers": tuple(layers)}.items())  # JSON has no tuples
    settings: Settings = _settings(items, runtime, cache, getattr(layer, "layer_idx", None))
    return settings


def cache_of(model: PreTrainedModel) -> str | None:
    """Return the cache format of a model's decoder, or ``None`` for Transformers' cache.

    It is ``None`` if the decoder does not run ``dma_mxfp``.
    """
    decoder = model.config.get_text_config(decoder=True)
    return settings_of(decoder).config.cache if is_dma(attention_name(decoder)) else None


def cache_format_of(config: PreTrainedConfig, name: str) -> CacheFormat:
    """Return the storage format of a cache called ``name``. It depends on whether the model is equalized."""
    return cache_format(name, is_equalized=vars(config).get(EQUALIZED) is True)


@lru_cache(maxsize=256)
def _parse(section: Any, runtime: tuple[tuple[str, str], ...], cache: str) -> Settings:
    """Parse a section (the items of a mapping), its runtime choices, and a cache that replaces its own."""
    source = f"the {NAME!r} section of the model's config.json"
    if section is None:
        config = _DEFAULT.config
    elif isinstance(section, str):
        try:
            config = DMAConfig.from_preset(section)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    elif isinstance(section, tuple):
        saved = DMAConfig.from_dict(dict(section), source=source)
        for name in RUNTIME_FIELDS:
            if getattr(saved, name) != getattr(_DEFAULT.config, name):
                warnings.warn(
                    f"{source} sets {name}={getattr(saved, name)!r}, which is ignored, because it depends on the "
                    f"machine; set it with dma_hf.configure(model, {name}=...)",
                    stacklevel=2,
                )
        default = {name: getattr(_DEFAULT.config, name) for name in RUNTIME_FIELDS}
        config = replace(saved, **default | dict(runtime))
    else:
        raise TypeError(
            f"{source}: expected a preset ({', '.join(PRESETS)}) or a mapping of fields, got {section!r}; "
            "dma_hf.configure(model, ...) writes it"
        )
    return Settings.of(replace(config, cache=cache) if cache else config)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _settings(section: Any, runtime: tuple[tuple[str, str], ...], cache: str, layer_idx: int | None) -> Settings:
    """Parse a section or recall it; ``torch.compile`` does so while tracing, guarded by it."""
    try:
        settings = _parse(section, runtime, cache)
    except TypeError:  # an unhashable value: the section is invalid, and parsing it says how
        settings = _parse.__wrapped__(section, runtime, cache)
    return settings.of_layer(layer_idx)
