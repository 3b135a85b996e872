"""The command ``dma-hf``. Without the extra ``eval`` it says what to install."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Without the packages of the extra ``eval``, exit with the command that installs them."""
    try:
        from .cli import main as run
    except ModuleNotFoundError as error:
        sys.exit(f"dma-hf: not installed: {error.name}; the command line needs: pip install 'dma-hf[eval]'")
    run()
