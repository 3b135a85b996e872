"""What a result depends on, as JSON values: a kept result is used again only where all of it is the same."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from .backends import Backend
from .results import ModelInfo

PACKAGES = ("dma-hf", "lm-eval", "transformers", "torch")


def of_model(model: ModelInfo) -> dict[str, Any]:
    """The weights, their dtype and the kind of device."""
    return {
        "model": [model.name, model.revision, model.commit, model.parameters, model.dtype],
        "device": model.device.partition(":")[0],
    }


def of_backend(backend: Backend) -> dict[str, Any]:
    """What a backend computes; its label is not part of it."""
    return {
        "implementation": backend.implementation,
        "config": None if backend.config is None else backend.config.to_dict(),
        "reads_cache": backend.reads_cache,
    }


def of_versions() -> dict[str, str | None]:
    """Versions of the packages that compute."""
    return {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # dma-hf, run from a source tree
        return None
