"""The command ``dma-hf``. Without the extra ``eval`` it says what to install."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import metadata

from packaging.requirements import Requirement


def main() -> None:
    """Run the command line. Without the packages of the extra ``eval``, exit with the command that installs them."""
    needed: list[str] = []
    with suppress(metadata.PackageNotFoundError):  # a source tree, which records nothing
        parsed = map(Requirement, metadata.requires("dma-hf") or ())
        needed = [each.name for each in parsed if each.marker and each.marker.evaluate({"extra": "eval"})]
    missing = [name for name in needed if not _is_installed(name)]
    if missing:
        sys.exit(f"dma-hf: not installed: {', '.join(missing)}; the command line needs: pip install 'dma-hf[eval]'")
    from .cli import main as run

    run()


def _is_installed(name: str) -> bool:
    return any(True for _ in metadata.distributions(name=name))
