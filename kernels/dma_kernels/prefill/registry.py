"""The prefill kernels, in order of preference. A kernel's host code is imported when it launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..runtime import chip
from ..runtime.compute_path import ComputePath
from .config import PrefillShape, portable_config
from .hopper import select as hopper
from .operands import AttentionInputs


@dataclass(frozen=True)
class PrefillKernel:
    """A kernel and the calls that it computes."""

    name: str  # name in reports
    # returns the configuration for a call; ``None`` if the kernel cannot compute it
    configure: Callable[[PrefillShape, ComputePath], Any]
    host: tuple[str, str]  # the module, relative to this package, and the function in it that launches the kernel
    # whether no later kernel is faster, given the call and the configuration
    is_fastest: Callable[[PrefillShape, ComputePath, Any], bool] = lambda shape, path, config: True
    is_gluon: bool = False  # whether it is written in Gluon, which Triton's interpreter cannot run

    def launch(self, inputs: AttentionInputs) -> None:
        """Launch the kernel."""
        module, function = self.host
        getattr(import_module(module, __package__), function)(inputs)


WARP_SPECIALIZED = PrefillKernel(
    name="warp-specialized",
    configure=hopper.configure_warp_specialized,
    host=(".hopper.host", "launch_warp_specialized"),
    is_fastest=hopper.is_warp_specialized_fastest,
    is_gluon=True,
)
MULTI_CTA = PrefillKernel(
    name="multi-CTA", configure=hopper.configure_multi_cta, host=(".hopper.host", "launch_multi_cta"), is_gluon=True
)
PORTABLE = PrefillKernel(
    name="portable",
    configure=lambda shape, path: portable_config(
        shape.arch, path, shape.query.shape[3], shape.value.shape[3], has_softcap=shape.has_softcap
    ),
    host=(".portable", "launch"),
)
KERNELS = (WARP_SPECIALIZED, MULTI_CTA, PORTABLE)


def select_kernel(shape: PrefillShape, path: ComputePath) -> tuple[PrefillKernel, Any]:
    """Return the kernel that computes a call, and its configuration."""
    for kernel in KERNELS:
        config = None if kernel.is_gluon and chip.is_interpreted() else kernel.configure(shape, path)
        if config is not None and kernel.is_fastest(shape, path, config):
            return kernel, config
    raise AssertionError("the portable kernel computes every call")
