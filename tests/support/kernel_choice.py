"""Run calls of any length on one prefill kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dma_kernels.prefill import registry
from dma_kernels.prefill.config import multi_cta_config, warp_specialized_config
from dma_kernels.prefill.plan import plan
from dma_kernels.prefill.registry import MULTI_CTA, PORTABLE, WARP_SPECIALIZED, PrefillKernel

_CONFIGS = {WARP_SPECIALIZED.name: warp_specialized_config, MULTI_CTA.name: multi_cta_config}


def use_kernel(monkeypatch: pytest.MonkeyPatch, kernel: PrefillKernel) -> None:
    """Run every call on a kernel; an unsupported call is an error."""
    if kernel is not PORTABLE:
        configure = _CONFIGS[kernel.name]
        kernel = replace(
            kernel,
            select=lambda shape, path: configure(shape.arch, path, shape.query.shape[3], shape.value.shape[3]),
        )
    monkeypatch.setattr(registry, "KERNELS", (kernel,))
    plan.cache_clear()
