"""Time decoding and appending with this tree's cache kernels against those of another revision, interleaved.

    git worktree add ../base REVISION
    python scripts/compare_cache_speed.py --base ../base --out cache-speed.json

One process loads both packages, so that every round times one run of each at the same clock. Steps are replays of CUDA
graphs. A complete step appends a key that completes a tile, so it also encodes that tile.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from dma_eval.bench.results import DecodeShape
from dma_eval.bench.timing import capture, time_interleaved
from dma_kernels.numerics.formats import TILE
from study import Out, Writer

SHAPES = [
    *(DecodeShape(batch=b, length=n, query_heads=32, kv_heads=8, head_dim=128)
      for b, n in ((1, 4096), (8, 4096), (1, 8192), (1, 32768), (1, 131072), (8, 32768), (64, 4096))),
    *(DecodeShape(batch=b, length=n, query_heads=16, kv_heads=8, head_dim=256) for b, n in ((32, 8192), (1, 32768))),
]  # fmt: skip
PROMPTS = [shape for shape in SHAPES if shape.batch == 1 and shape.length in (8192, 32768)]
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
ROOM = 4
"""Spare tiles."""


def load_base(package: Path, folder: Path) -> None:
    """Make another revision of ``dma_kernels`` importable as ``base_kernels``."""
    copy = folder / "base_kernels"
    shutil.copytree(package, copy)
    for file in copy.rglob("*.py"):  # operators have global names
        file.write_text(file.read_text(encoding="utf-8").replace('"dma_kernels::', '"base_kernels::'), encoding="utf-8")
    sys.path.insert(0, str(folder))


class Kernels:
    """The cache of one package, by its public functions, which are those of earlier revisions."""

    def __init__(self, package: str) -> None:
        api = importlib.import_module(f"{package}.cache.api")
        self.append, self.attend = api.append, api.cached_attention
        self.storage = importlib.import_module(f"{package}.cache.storage").LayerStorage

    def work(self, kind: str, format: str, shape: DecodeShape) -> Callable[[], None]:
        """Return a run that first resets the lengths, because replays append without a check for room."""
        held = {"append": 0, "step": shape.length, "complete step": shape.length - 1}[kind]
        storage = self.storage.allocate(
            format, batch=shape.batch, kv_heads=shape.kv_heads, head_dim=shape.head_dim, value_dim=shape.head_dim,
            dtype=DTYPE, device=DEVICE, tiles=shape.length // TILE + ROOM,
        )  # fmt: skip
        for start in range(0, held, 8192):
            self.append(storage, *_tokens(shape, min(8192, held - start)))
        new, lengths = _tokens(shape, shape.length if kind == "append" else 1), storage.lengths.clone()
        query = torch.randn(shape.batch, shape.query_heads, 1, shape.head_dim, device=DEVICE, dtype=DTYPE)

        def run() -> None:
            storage.lengths.copy_(lengths)
            if kind == "append":
                self.append(storage, *new)
            else:
                self.attend(query, *new, storage, backend="triton")

        return run


def _tokens(shape: DecodeShape, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = shape.batch, shape.kv_heads, count, shape.head_dim
    key, value = (torch.randn(sizes, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return key, value


def measure(seconds: float, base: Kernels, ours: Kernels, writer: Writer) -> None:
    """Write one row for each shape, kind of work and format."""
    work = [(kind, shape) for kind in ("step", "complete step") for shape in SHAPES]
    work += [("append", shape) for shape in PROMPTS]
    for kind, shape in work:
        for format in ("int8", "int4"):
            compared = {"base": (base, format), "this": (ours, format)}
            compared |= {"equalized": (ours, "int4-equalized")} if format == "int4" else {}
            runs = {}
            for name, (kernels, own) in compared.items():
                run = kernels.work(kind, own, shape)
                run()
                runs[name] = capture(run, DEVICE)
            timings = time_interleaved(runs, DEVICE, seconds=seconds, min_repeats=15, max_repeats=150)
            row = {"kind": kind, "shape": str(shape), "format": format}
            row |= {f"{name}_us": round(1e3 * timing.median, 2) for name, timing in timings.items()}
            row["change_percent"] = round(100 * (timings["this"].median / timings["base"].median - 1), 2)
            writer.add(row)
            del runs
            torch.cuda.empty_cache()


def main(
    base: Annotated[Path, typer.Option(help="A checkout of the other revision.")],
    out: Out,
    seconds: Annotated[float, typer.Option(help="Seconds of each comparison.")] = 0.3,
) -> None:
    """Measure both revisions, and write a result for each shape, kind of work and format."""
    revision = subprocess.check_output(["git", "-C", base, "describe", "--always", "--dirty"], text=True).strip()
    with tempfile.TemporaryDirectory() as folder:
        load_base(base / "kernels" / "dma_kernels", Path(folder))
        measure(seconds, Kernels("base_kernels"), Kernels("dma_kernels"), Writer(out, base=revision))


if __name__ == "__main__":
    typer.run(main)
