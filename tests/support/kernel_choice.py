"""Run calls of any length on one prefill kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dma_kernels.prefill import registry
from dma_kernels.prefill.plan import plan
from dma_kernels.prefill.registry import PrefillKernel


def use_kernel(monkeypatch: pytest.MonkeyPatch, kernel: PrefillKernel) -> None:
    """Run every call on a kernel; an unsupported call is an error."""
    monkeypatch.setattr(registry, "KERNELS", (replace(kernel, is_fastest=lambda *_: True),))
    plan.cache_clear()
