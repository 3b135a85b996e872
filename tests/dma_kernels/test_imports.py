"""The reference does not import Triton, and the portable kernels do not import Gluon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dma_kernels
import torch

REFERENCE = """
import torch
import dma_kernels
from dma_kernels.cache.api import cached_attention, restore
from dma_kernels.cache.storage import LayerStorage
x = torch.randn(1, 2, 140, 32, dtype=torch.float16)
storage = LayerStorage.allocate(
    "int8", batch=1, kv_heads=2, head_dim=32, value_dim=32, dtype=x.dtype, device=x.device, tiles=2
)
for backend in BACKENDS:
    new = [x[:, :, :70]] * 3
    dma_kernels.attention(x, x, x, dma_kernels.Recipe(), backend=backend)
    cached_attention(*new, storage, backend=backend)
    restore(storage, storage.lengths - 20, 20)
"""


def imported(program: str, prefix: str) -> list[str]:
    """Return the modules with names in ``prefix`` that a program imports in a new process."""
    program += f"\nimport sys\nprint(*(name for name in sys.modules if name.startswith({prefix!r})))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(dma_kernels.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    return result.stdout.split()


def test_the_reference_imports_no_triton() -> None:
    backends = ["reference"] if torch.cuda.is_available() else ["reference", "auto"]
    assert not imported(REFERENCE.replace("BACKENDS", repr(backends)), "triton")


def test_portable_kernels_import_no_gluon() -> None:
    """Nothing is launched, because Triton imports Gluon at its first launch."""
    assert not imported("from dma_kernels.cache import append, chunked_prefill, restore", "triton.experimental")
