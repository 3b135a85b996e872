"""Names of backends as the command line takes them: checked, and read in reports, without importing anything slow."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .errors import UserError

DMA = "dma_mxfp"
CACHE_SUFFIX = "+cache"
FORMAT_SUFFIXES = {"+int8": "int8", "+int4": "int4"}
"""Suffixes that say which format a cache has, after any of the names; a test holds them equal to the formats."""
PEER_SUFFIXES = ("+quanto4", "+quanto2", "+hqq8", "+hqq4", "+hqq2", "+fp8")
"""Suffixes that let any other implementation read through a ``QuantizedCache`` of Transformers."""
SIMULATED = "sim_"
"""What names of simulations of other kernels begin with."""
TILE = 128
"""Tokens that are read through a cache at a time: a tile of the rule, which a test holds equal."""
PRESETS = ("balanced", "fp4", "paper", "kv8", "kv4")
"""Those of ``dma_hf``, whose import takes seconds; a test holds both equal."""


def split_suffix(name: str) -> tuple[str, str]:
    """Split a name from the suffix that lets it read through a cache, empty where it has none."""
    suffixes = (CACHE_SUFFIX, *FORMAT_SUFFIXES, *PEER_SUFFIXES)
    suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), "")
    return name.removesuffix(suffix), suffix


def reads_cache(label: str) -> bool:
    """Whether the backend of a label reads through a cache."""
    return bool(split_suffix(label)[1])


def is_file(setting: str) -> bool:
    """Whether what stands after ``dma_mxfp:`` means a TOML file, and no preset."""
    return setting not in PRESETS and (setting.endswith(".toml") or Path(setting).exists())


def check_names(names: Iterable[str], option: str = "--attn") -> None:
    """Check every ``dma_mxfp:PRESET`` and ``dma_mxfp:FILE.toml``; of other backends Transformers knows which there are.

    Raises:
        UserError: There is no such preset or file; the message lists the presets.
    """
    for name in names:
        implementation, separator, setting = split_suffix(name)[0].partition(":")
        if implementation != DMA or not separator or setting in PRESETS:
            continue
        presets = ", ".join(PRESETS)
        if not setting:
            raise UserError(f"{option}: {name!r} names no preset; valid: {presets}, or a TOML file")
        if not is_file(setting):
            # What --cache and --run name stands with a cache already.
            suffix = f"; {', '.join(FORMAT_SUFFIXES)} after it reads through a cache" if option == "--attn" else ""
            raise UserError(
                f"{option}: unknown preset {setting!r}; valid: {presets}, or a TOML file ({DMA}:FILE.toml){suffix}"
            )
        if not Path(setting).is_file():
            raise UserError(f"{option}: no such file: {setting}")
