"""Run calls of any length on one prefill kernel."""

from __future__ import annotations

from typing import Any

import pytest
from dma_kernels.numerics.call import AttentionCall
from dma_kernels.numerics.geometry import AttentionGeometry
from dma_kernels.prefill import config, plan
from dma_kernels.runtime.chip import Chip


def use_kernel(monkeypatch: pytest.MonkeyPatch, kernel: type[Any]) -> None:
    """Run every call on the kernel with a class of configurations; an unsupported call is an error."""

    def select_config(call: AttentionCall, geometry: AttentionGeometry, path: config.ComputePath, chip: Chip) -> Any:
        configure = {
            config.WarpSpecializedConfig: config.configure_warp_specialized,
            config.OneWarpgroupConfig: config.configure_one_warpgroup,
            config.PortableConfig: lambda *_: config.portable_config(
                chip.arch, path, call.query.shape[3], call.value.shape[3], has_softcap=call.softcap is not None
            ),
        }[kernel]
        found = configure(call, geometry, path, chip)
        assert found is not None, f"the {kernel.kernel} kernel cannot compute the call"
        return found

    monkeypatch.setattr(plan, "select_config", select_config)
    plan.forget_plans()
