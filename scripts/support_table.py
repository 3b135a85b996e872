"""Write docs/support.md: which of Transformers' architectures run ``dma_mxfp``, found out by running them all.

Usage: python scripts/support_table.py
"""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers
import typer

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "support")]

from hf_architectures import Architecture, architectures  # noqa: E402
from hf_outcomes import Record, examine  # noqa: E402
from hf_page import PAGE, page  # noqa: E402


def main() -> None:
    """Examine every architecture and write the page."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        records = list(pool.map(_examine, architectures(), chunksize=4))
    failures = [record for record in records if record.failures]
    for record in failures:
        print(record.architecture.model_type, record.failures, file=sys.stderr)
    if failures:
        raise SystemExit(f"{len(failures)} architectures compute something else; {PAGE} was not written")
    PAGE.write_text(page(records, transformers.__version__), encoding="utf-8")


def _examine(architecture: Architecture) -> Record:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    logging.disable(logging.WARNING)
    return examine(architecture)


if __name__ == "__main__":
    typer.run(main)  # which refuses arguments
