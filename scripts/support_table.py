"""Write docs/support.md: which of Transformers' architectures run ``dma_mxfp``, found out by running them all.

Usage: python scripts/support_table.py [--jobs 2] [--out docs/support.md]
"""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/support.md"
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "support")]

from hf_architectures import Architecture, architectures  # noqa: E402
from hf_outcomes import Record, examine  # noqa: E402
from hf_page import page  # noqa: E402


def main(
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    out: Annotated[Path, typer.Option(help="The page to write.", show_default="docs/support.md")] = PAGE,
) -> None:
    """Examine every architecture and write the page."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        records = list(pool.map(_examine, architectures(), chunksize=4))
    failures = [record for record in records if record.failures]
    for record in failures:
        print(record.architecture.model_type, record.failures, file=sys.stderr)
    if failures:
        raise SystemExit(f"{len(failures)} architectures compute something else; {out} was not written")
    out.write_text(page(records, transformers.__version__), encoding="utf-8")


def _examine(architecture: Architecture) -> Record:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    logging.disable(logging.WARNING)
    return examine(architecture)


if __name__ == "__main__":
    typer.run(main)
