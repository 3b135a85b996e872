"""The plan of a prefill call: its kernel, configuration and launches."""

from __future__ import annotations

import functools

import torch

from ..numerics.arguments import check_call
from ..numerics.call import AttentionCall
from ..numerics.geometry import AttentionGeometry
from ..numerics.layout import TensorLayout
from ..runtime import chip
from ..runtime.compute_path import select_compute_path
from .config import PrefillShape
from .launches import PrefillPlan, ReferencePlan
from .registry import select_kernel


@functools.lru_cache(maxsize=256)
def plan(call: AttentionCall) -> PrefillPlan | ReferencePlan:
    """Plan calls with the layouts and options of ``call``.

    Raises:
        ValueError: A layout or an offset is not as :func:`dma_kernels.attention` describes.
        TypeError: A dtype is not as described there.
        RuntimeError: The requested backend cannot run on this device.
    """
    check_call(call)
    device = call.query.device
    backend = chip.resolve_backend(call.backend, device, call.query.dtype)
    info = TensorLayout.dense((call.key.shape[0], 4), torch.int32, device) if call.has_seq_info else None
    geometry = AttentionGeometry.of(call, info)
    recipe = call.recipe
    if geometry.low_tiles(call.query.shape[2], recipe.diagonal_tiles, recipe.sink_tiles) == range(0):
        recipe = recipe.of_high_tiles
    arch = 0 if backend == "reference" else chip.device_arch(device)
    path = select_compute_path(recipe, arch, max(call.query.shape[3], call.value.shape[3]))
    shape = PrefillShape(call.query, call.key, call.value, geometry, arch, call.softcap is not None, backend)
    kernel, config = select_kernel(shape, path)
    made: PrefillPlan | ReferencePlan = kernel.plan(kernel, config, call, recipe, path, geometry)
    return made
