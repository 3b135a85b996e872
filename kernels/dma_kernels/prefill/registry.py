"""The kernels that compute prefill attention, in order of preference. Their host code is imported when it launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..runtime import chip
from ..runtime.compute_path import ComputePath
from .config import portable_config
from .hopper import select as hopper
from .problem import PrefillShape


@dataclass(frozen=True)
class PrefillKernel:
    """A kernel, and which calls it computes.

    Attributes:
        name: What it is called in reports.
        supports: Whether it can compute a call.
        select: Returns its configuration for a call that it supports; ``None`` if a later kernel is faster.
        host: The module, relative to this package, and the function in it that launches the kernel. Its arguments are
            those of :func:`dma_kernels.prefill.portable.launch`.
        is_gluon: Whether it is written in Gluon, which Triton's interpreter cannot run.
    """

    name: str
    supports: Callable[[PrefillShape, ComputePath], bool]
    select: Callable[[PrefillShape, ComputePath], Any]
    host: tuple[str, str]
    is_gluon: bool = False

    def launch(self, *arguments: Any, **options: Any) -> None:
        """Launch the kernel."""
        module, function = self.host
        getattr(import_module(module, __package__), function)(*arguments, **options)


WARP_SPECIALIZED = PrefillKernel(
    name="warp-specialized",
    supports=hopper.supports_warp_specialized,
    select=hopper.select_warp_specialized,
    host=(".hopper.host", "launch_warp_specialized"),
    is_gluon=True,
)
MULTI_CTA = PrefillKernel(
    name="multi-CTA",
    supports=hopper.supports_multi_cta,
    select=hopper.select_multi_cta,
    host=(".hopper.host", "launch_multi_cta"),
    is_gluon=True,
)
PORTABLE = PrefillKernel(
    name="portable",
    supports=lambda shape, path: True,
    select=lambda shape, path: portable_config(
        shape.arch, path, shape.query.shape[3], shape.value.shape[3], has_softcap=shape.has_softcap
    ),
    host=(".portable", "launch"),
)
KERNELS = (WARP_SPECIALIZED, MULTI_CTA, PORTABLE)


def select_kernel(shape: PrefillShape, path: ComputePath) -> tuple[PrefillKernel, Any]:
    """Return the kernel that computes a call, and its configuration."""
    for kernel in KERNELS:
        if not (kernel.is_gluon and chip.is_interpreted()) and kernel.supports(shape, path):
            config = kernel.select(shape, path)
            if config is not None:
                return kernel, config
    raise AssertionError("the portable kernel computes every call")
