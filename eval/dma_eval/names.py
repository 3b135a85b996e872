"""Names of backends, models and texts, checked without slow imports; and names that fast and slow modules share.

A backend is ``IMPLEMENTATION[:PRESET][+CACHE]``: ``sdpa``, ``dma_mxfp``, ``dma_mxfp:fp4``, ``dma_mxfp:balanced+int4``,
``dma_mxfp:FILE.toml+int8``, ``sdpa+hqq4``. A test compares the names below with those of ``dma_hf``, whose import takes
seconds.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import UserError

DMA = "dma_mxfp"
PRESETS = ("balanced", "fp4", "paper")
FORMAT_SUFFIXES = {"+int8": "int8", "+int4": "int4"}  # suffixes of ``dma_mxfp`` and their cache formats
PEER_SUFFIXES = ("+quanto4", "+quanto2", "+hqq8", "+hqq4", "+hqq2", "+fp8")
"""Suffixes of other implementations, which select a ``QuantizedCache`` of Transformers."""
DYNAMIC = "+dynamic"  # suffix that selects the ``DynamicCache`` of Transformers, in 16 bits
SIMULATED = "sim_"  # prefix of the names of simulated kernels
IMPLEMENTATIONS = (
    *(DMA, "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention", "sdpa"),
    *(f"{SIMULATED}{kernel}" for kernel in ("fa3_fp8", "fp8_cache", "sage")),
)
"""Attention implementations of the supported versions of Transformers, and simulated ones."""
GENERATE_CACHES = ("dynamic", "static", "int8", "int4")  # caches of ``dma-hf bench``
API_KEY_VARIABLE = "DMA_HF_API_KEY"  # environment variable with the key that the requests to a server must carry
INFINITY = "inf"  # a setting that is infinite, which JSON has no number for
TILE = 128  # tokens of a chunk that is read through a cache
# Files that `datasets` reads with a builder of that name; any other existing file is read as plain text.
BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
TEXT_SUFFIXES = {".txt", ".raw", ".md", ".text", ".tokens", ".tex"}


def split_suffix(name: str) -> tuple[str, str]:
    """Split a name into the part before its cache and ``+CACHE``. The latter is empty if it has none."""
    suffix = next((suffix for suffix in (*FORMAT_SUFFIXES, *PEER_SUFFIXES, DYNAMIC) if name.endswith(suffix)), "")
    return name.removesuffix(suffix), suffix


def cache_suffix(label: str) -> str:
    """Return ``+CACHE`` of the backend with this label, which ends in `` #1`` if its name was given twice."""
    return split_suffix(label.partition(" #")[0])[1]


def is_file(setting: str) -> bool:
    """Return whether the part after ``dma_mxfp:`` is a TOML file and not a preset."""
    return setting not in PRESETS and (setting.endswith(".toml") or Path(setting).exists())


def parse_name(
    name: str, option: str = "--attn", valid: Sequence[str] = (), caches: Sequence[str] = PEER_SUFFIXES
) -> tuple[str, str, str]:
    """Split the name of a backend into implementation, preset or file, and cache, and check them.

    ``valid`` has the implementations that Transformers knows, among them registered ones, once it is loaded. ``caches``
    are those that an error suggests for implementations other than ``dma_mxfp``.
    """
    rest, cache = split_suffix(name)
    implementation, colon, setting = rest.partition(":")
    setting = os.path.expanduser(setting)
    if implementation.partition("+")[0] == DMA:
        if setting.endswith(".toml") and not Path(setting).is_file():
            raise UserError(f"{option}: no such file: {setting}")
        is_known = implementation == DMA and (not colon or setting in PRESETS or Path(setting).is_file())
        if not is_known or cache not in ("", *FORMAT_SUFFIXES):
            raise UserError(
                f"{option}: unknown preset {name.removeprefix(f'{DMA}:') or name!r}; valid: {', '.join(PRESETS)}, or a "
                f"TOML file ({DMA}:FILE.toml), and after it a cache ({', '.join(FORMAT_SUFFIXES)})"
            )
    else:
        known = valid or (IMPLEMENTATIONS if "transformers" not in sys.modules else [implementation])
        if implementation not in known or colon or cache in FORMAT_SUFFIXES:
            raise UserError(
                f"{option}: unknown backend {name!r}; valid: {', '.join(valid or IMPLEMENTATIONS)}, and after it "
                f"a cache ({', '.join(caches)}); presets, files and {', '.join(FORMAT_SUFFIXES)} are for {DMA}"
            )
    return implementation, setting, cache


def check_runs(names: Sequence[str]) -> None:
    """Check the names that ``dma-hf bench`` compares: ``ATTENTION+CACHE``."""
    caches = [f"+{cache}" for cache in GENERATE_CACHES if f"+{cache}" not in FORMAT_SUFFIXES]
    for name in names:
        attention, _, cache = name.rpartition("+")
        if cache not in GENERATE_CACHES:
            valid = ", ".join(GENERATE_CACHES)
            raise UserError(f"--run: expected ATTENTION+CACHE with a cache of {valid}, got {name!r}")
        if parse_name(attention, "--run", caches=caches)[2]:
            raise UserError(f"--run: expected ATTENTION+CACHE with one cache, got {name!r}")
        if f"+{cache}" in FORMAT_SUFFIXES:
            parse_name(name, "--run", caches=caches)  # which refuses it for other attention


def refuse_repeats(option: str, labels: Sequence[str]) -> None:
    """Refuse an option with a value twice."""
    repeated = {label for label in labels if labels.count(label) > 1}
    if repeated:
        raise UserError(f"{option}: {', '.join(sorted(repeated))} is given more than once")


def check_device(name: str) -> None:
    """Check the form of a device's name. Whether there is such a device only PyTorch knows."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UserError(f"--device: expected auto, cpu, cuda or cuda:N; got {name!r}")


def check_yarn(factor: float | None) -> None:
    """Check the factor by which YaRN extends positions."""
    if factor is not None and not 1 < factor < math.inf:
        raise UserError(f"--yarn: expected a factor above 1, got {factor:g}")


@dataclass(frozen=True)
class ModelSource:
    """Where a model is: ``path`` (a Hub repository or a folder) and, for GGUF weights, the file in it."""

    path: str
    gguf_file: str | None = None


def parse_source(name: str, option: str = "--model") -> ModelSource:
    """Distinguish a GGUF file (local, or ``OWNER/REPOSITORY/FILE.gguf`` on the Hub) from a folder or repository."""
    if not name:
        raise UserError(f"{option}: expected a folder, a .gguf file or a Hub name, got ''")
    path = Path(os.path.expanduser(name))
    if name.endswith(".gguf"):
        if path.is_file():
            return ModelSource(str(path.parent), path.name)
        owner, repository, file = [*name.split("/", 2), "", ""][:3]
        if file and owner not in ("", ".", "..", "~"):
            return ModelSource(f"{owner}/{repository}", file)
        raise UserError(f"{option}: no such file: {name}")
    if path.is_file():
        raise UserError(f"{option}: {name} is a file; expected a folder, a .gguf file or a Hub name")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{option}: folder {name} has no config.json; for GGUF weights name the .gguf file itself")
        return ModelSource(str(path))
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(f"{option}: no such folder: {name}")
    return ModelSource(name)


def text_file(data: str) -> Path | None:
    """Return the file that ``--data`` names, or ``None`` if it can only be a dataset of the Hub."""
    if not data:
        raise UserError("--data: expected a file or a dataset of the Hub, got ''")
    path = Path(os.path.expanduser(data))
    if path.is_dir():
        raise UserError(f"--data: {data} is a folder; name a file in it, or a dataset of the Hub")
    if path.is_file():
        return path
    if path.suffix.lower() in TEXT_SUFFIXES | BUILDERS.keys() or path.is_absolute() or data.startswith((".", "~")):
        raise UserError(f"--data: no such file: {data}")
    return None
