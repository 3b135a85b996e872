"""The command ``dma-hf`` itself: the evaluation, or what to install where the plugin stands alone."""

from __future__ import annotations

import sys
from importlib import metadata

from packaging.requirements import Requirement

NAME = "dma-hf"
EXTRA = "eval"


def main() -> None:
    """Run the command line; without the packages of the extra ``eval``, end with the command that installs them."""
    missing = [name for name in _packages() if not _is_installed(name)]
    if missing:
        sys.exit(f"{NAME}: not installed: {', '.join(missing)}; the command line needs: pip install '{NAME}[{EXTRA}]'")
    from .cli import main as run

    run()


def _packages() -> list[str]:
    """Return what the extra names, as this installation has recorded it; nothing in a source tree."""
    if not _is_installed(NAME):
        return []
    parsed = map(Requirement, metadata.requires(NAME) or ())
    return [each.name for each in parsed if each.marker and each.marker.evaluate({"extra": EXTRA})]


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
