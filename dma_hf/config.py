"""Configuration: the numerics of a model's attention, the presets, and their form as dicts and TOML files."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from dma_kernels import Recipe
from dma_kernels.cache.codes import CACHE_FORMATS
from dma_kernels.numerics.recipe import RECIPE_FIELDS
from dma_kernels.runtime.chip import BACKENDS

ON_UNSUPPORTED = ("error", "sdpa")
RUNTIME_FIELDS = ("backend", "on_unsupported")
"""Fields that say how a machine runs a model. They are not saved with it."""
REMOVED = {"low_v": "values of low tiles are as pv says; a cache of 4 bits is cache='int4'"}
"""Fields of earlier versions, with what stands in their place; where they were not set, they are passed over."""


class Section(dict[str, Any]):
    """The ``dma_mxfp`` section of a model's configuration: the fields that are saved with the model.

    Args:
        saved: Field names and values.
        runtime: Those of :data:`RUNTIME_FIELDS`. They go along with copies of the model, and are not in its JSON file.
    """

    def __init__(self, saved: Mapping[str, Any], runtime: Mapping[str, str]) -> None:
        super().__init__(saved)
        self.runtime = dict(runtime)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self), self.runtime)


@dataclass(frozen=True, kw_only=True)
class DMAConfig(Recipe):
    """How a model runs ``dma_mxfp``. Without arguments it is the preset ``balanced``.

    The fields of :class:`~dma_kernels.Recipe` say which precision the rule gives to which tile. ``cache`` is saved with
    a model, as they are; ``backend`` and ``on_unsupported`` are choices of the machine that runs it, and are not saved.

    Attributes:
        backend: ``auto`` (Triton on CUDA, the reference elsewhere), ``reference`` or ``triton``.
        cache: What ``generate`` keeps keys and values in: ``int8``, ``int4``, or ``None`` for Transformers' own cache.
            It is independent of the recipe, which prompts are computed under.
        on_unsupported: What to do with a call that the backend cannot compute: ``error``, or ``sdpa`` to run
            Transformers' SDPA attention there, warned once and counted (:func:`dma_hf.fallback_counts`).

    Raises:
        ValueError: A field holds something else; the message names the field and what it may hold.
    """

    low: str = "mxint8"
    shared_scale: str = "tile"
    smooth_k: bool = True
    rotate: bool = True
    pv: str = "fp8"
    backend: str = "auto"
    on_unsupported: str = "error"
    cache: str | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        for name, choices in (("backend", BACKENDS), ("on_unsupported", ON_UNSUPPORTED)):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
        if self.cache is not None and self.cache not in CACHE_FORMATS:
            raise ValueError(f"cache must be one of {', '.join(CACHE_FORMATS)}, or None; got {self.cache!r}")

    @property
    def recipe(self) -> Recipe:
        """The numerics alone."""
        return Recipe(**{name: getattr(self, name) for name in RECIPE_FIELDS})

    @classmethod
    def from_dict(cls, section: Mapping[str, Any], *, source: str = "") -> Self:
        """Make a configuration of a mapping; keys that are missing have the value of ``balanced``.

        Args:
            section: Field names and values.
            source: Where the mapping comes from, to begin error messages with.

        Raises:
            TypeError: ``section`` is not a mapping.
            ValueError: A key is not a field, or a value is not one that its field may hold.
        """
        prefix = f"{source}: " if source else ""
        if not isinstance(section, Mapping):
            raise TypeError(f"{prefix}expected a mapping of configuration keys, got {section!r}")
        known = {key: value for key, value in section.items() if value is not None or key not in REMOVED}
        _check_keys(known, prefix)
        try:
            return cls(**known)
        except ValueError as error:
            raise ValueError(f"{prefix}{error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain JSON values."""
        return {name: getattr(self, name) for name in FIELDS}

    def to_section(self) -> Section:
        """Return the section of a model's configuration that stands for this."""
        fields = self.to_dict()
        runtime = {name: fields.pop(name) for name in RUNTIME_FIELDS}
        return Section(fields, runtime)

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read a TOML file whose top-level keys are field names.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is not TOML, or as in :meth:`from_dict`; the message names the file.
        """
        try:
            section = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a TOML file: {error}") from None
        return cls.from_dict(section, source=str(path))

    def to_toml(self, path: str | Path) -> None:
        """Write a TOML file that :meth:`from_toml` reads back; fields that are ``None`` are left out."""
        values = {name: value for name, value in self.to_dict().items() if value is not None}
        lines = [f"{n} = {v if isinstance(v, float) else json.dumps(v)}\n" for n, v in values.items()]
        Path(path).write_text("".join(lines), encoding="utf-8")

    def with_changes(self, **changes: Any) -> Self:
        """Return a copy with some fields changed.

        Raises:
            ValueError: A key is not a field, or a value is not one that its field may hold.
        """
        _check_keys(changes, "")
        return replace(self, **changes)


FIELDS = tuple(field.name for field in fields(DMAConfig))

PRESETS: Mapping[str, DMAConfig] = MappingProxyType(
    {
        # Rotated: without it, outlier key channels cost more (benchmarks/README.md).
        "balanced": DMAConfig(),
        # Scales by search, and high tiles in 16 bits: benchmarks/README.md has the results without each of them.
        "fp4": DMAConfig(low="nvfp4", scale_rounding="search", shared_scale="block"),
        "paper": DMAConfig(
            low="mxfp4",
            high="mxfp8",
            scale_rounding="floor",
            shared_scale="block",
            smooth_k=False,
            rotate=False,
            pv="bf16",
        ),
        "kv8": DMAConfig(cache="int8"),
        "kv4": DMAConfig(cache="int4"),
    }
)


NAMES = (
    *PRESETS,
    *(f"{name}+{format}" for name, config in PRESETS.items() if config.cache is None for format in CACHE_FORMATS),
)
"""What a setting may be called: a preset, and one with the format of its cache (``balanced+int4``)."""


def preset(name: str) -> DMAConfig:
    """Return the preset called ``name``: one of :data:`NAMES`.

    Raises:
        ValueError: There is none; the message lists those that there are.
    """
    if name not in NAMES:
        known = NAMES if "+" in str(name) else PRESETS
        raise ValueError(f"unknown preset {name!r}; expected one of {', '.join(known)}")
    base, _, cache = name.partition("+")
    return PRESETS[base].with_changes(cache=cache) if cache else PRESETS[base]


def resolve(setting: str | Path | Mapping[str, Any] | Recipe) -> DMAConfig:
    """Return the configuration that ``setting`` stands for.

    Args:
        setting: The name of a preset, or the path of a TOML file (``*.toml``), and after either the format of a cache
            if there is to be one (``balanced+int4``); a mapping of fields, a configuration, or the numerics alone.

    Raises:
        OSError: The file cannot be read.
        TypeError: ``setting`` is none of these.
        ValueError: There is no such preset, or a key or a value is wrong.
    """
    if isinstance(setting, DMAConfig):
        return setting
    if isinstance(setting, Recipe):
        return DMAConfig(**{name: getattr(setting, name) for name in RECIPE_FIELDS})
    if isinstance(setting, Mapping):
        return DMAConfig.from_dict(setting)
    if isinstance(setting, Path) or (isinstance(setting, str) and setting.endswith(".toml")):
        return DMAConfig.from_toml(setting)
    if isinstance(setting, str) and ".toml+" in setting:
        path, _, cache = setting.rpartition("+")
        return DMAConfig.from_toml(path).with_changes(cache=cache)
    if isinstance(setting, str):
        try:
            return preset(setting)
        except ValueError as error:
            raise ValueError(f"{error}, or the path of a .toml file") from None
    raise TypeError(
        f"expected the name of a preset ({', '.join(PRESETS)}), the path of a .toml file, a mapping or a DMAConfig; "
        f"got {setting!r}"
    )


def _check_keys(section: Mapping[str, Any], prefix: str) -> None:
    for key in section.keys() & REMOVED.keys():
        raise ValueError(f"{prefix}the key {key!r} is gone: {REMOVED[key]}")
    unknown = [key for key in section if key not in FIELDS]
    if unknown:
        raise ValueError(
            f"{prefix}unknown key{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}; "
            f"valid keys: {', '.join(FIELDS)}"
        )
