"""Names of backends, checked and read without slow imports.

A name is ``IMPLEMENTATION[:PRESET][+CACHE]``: ``sdpa``, ``dma_mxfp``, ``dma_mxfp:fp4``, ``dma_mxfp:balanced+int4``,
``dma_mxfp:FILE.toml+int8``, ``sdpa+hqq4``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .errors import UserError

DMA = "dma_mxfp"
PRESETS = ("balanced", "fp4", "paper")
"""The presets of ``dma_hf``, whose import takes seconds. A test compares them."""
FORMAT_SUFFIXES = {"+int8": "int8", "+int4": "int4"}
"""Suffixes of ``dma_mxfp`` and the cache format that each stands for. A test compares them with ``dma_hf``."""
PEER_SUFFIXES = ("+quanto4", "+quanto2", "+hqq8", "+hqq4", "+hqq2", "+fp8")
"""Suffixes of other implementations: read through a ``QuantizedCache`` of Transformers."""
RENAMED_PRESETS = {"kv8": "balanced+int8", "kv4": "balanced+int4"}
"""Presets of earlier versions and their new names. A test compares them with ``dma_hf``."""
SIMULATED = "sim_"
"""Prefix of the names of simulated kernels."""
TILE = 128
"""Tokens that are read through a cache at a time: the tile size, which a test compares with ``dma_kernels``."""


def split_suffix(name: str) -> tuple[str, str]:
    """Split a name into what precedes its cache and ``+CACHE``, which is empty if it has none."""
    suffix = next((suffix for suffix in (*FORMAT_SUFFIXES, *PEER_SUFFIXES) if name.endswith(suffix)), "")
    return name.removesuffix(suffix), suffix


def reads_cache(label: str) -> bool:
    """Return whether the backend with this label reads through a cache."""
    return bool(split_suffix(label)[1])


def is_file(setting: str) -> bool:
    """Return whether the part after ``dma_mxfp:`` is a TOML file and not a preset."""
    return setting not in PRESETS and (setting.endswith(".toml") or Path(setting).exists())


def check_names(names: Iterable[str], option: str = "--attn") -> None:
    """Check every name of ``dma_mxfp``. Transformers knows the valid names of other implementations.

    Raises:
        UserError: There is no such preset, file or cache. The message lists the valid ones, or has the new name.
    """
    for name in names:
        rest, suffix = split_suffix(name)
        implementation, colon, setting = rest.partition(":")
        if implementation.partition("+")[0] != DMA:
            continue
        _check_renamed(name, option)
        caches = ", ".join(FORMAT_SUFFIXES)
        if suffix in PEER_SUFFIXES:
            raise UserError(
                f"{option}: {name!r}: {suffix} is a cache of Transformers, which {DMA} does not use; valid: {caches}"
            )
        if not colon and implementation != DMA:
            raise UserError(f"{option}: {name!r} has an unknown cache; valid: {caches}")
        if not colon or setting in PRESETS:
            continue
        presets = f"{', '.join(PRESETS)}, or a TOML file"
        if not setting:
            raise UserError(f"{option}: {name!r} names no preset; valid: {presets}")
        if not is_file(setting):
            base, plus, cache = setting.partition("+")
            if plus and (base in PRESETS or is_file(base)):
                raise UserError(f"{option}: {name!r} has an unknown cache +{cache}; valid: {caches}")
            raise UserError(
                f"{option}: unknown preset {setting!r}; valid: {presets} ({DMA}:FILE.toml), and after it a cache "
                f"({caches})"
            )
        if not Path(setting).is_file():
            raise UserError(f"{option}: no such file: {setting}")


def _check_renamed(name: str, option: str) -> None:
    """Refuse names of earlier versions with their new names."""
    rest, _, cache = name.partition("+")
    implementation, _, preset = rest.partition(":")
    renamed = RENAMED_PRESETS.get(preset)
    if renamed is not None:
        new = f"{renamed.partition('+')[0]}+{cache}" if f"+{cache}" in FORMAT_SUFFIXES else renamed
        raise UserError(f"{option}: the preset {preset!r} is now called {new!r}: {implementation}:{new}")
    if name.endswith("+cache"):
        base = name.removesuffix("+cache")
        choices = " or ".join(base + suffix for suffix in FORMAT_SUFFIXES)
        raise UserError(f"{option}: the suffix '+cache' is gone; name the cache format: {choices}")
