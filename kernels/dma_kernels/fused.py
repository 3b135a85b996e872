"""The ``triton`` backend: choose a lowering for the device, quantise the keys and values, launch the attention."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

import torch
import triton
from torch import Tensor

from .fused_quantize import quantize_keys_values, query_factor
from .operands import select_lowering
from .prefill import PrefillGeometry, prefill_attention
from .recipe import Recipe
from .tuning import select_tiles

DTYPES = (torch.bfloat16, torch.float16)
MIN_ARCH = 80
INTERPRETED_ARCH = 90
"""The chip that the Triton interpreter stands for, so that a CPU runs the code of Hopper."""


def is_interpreted() -> bool:
    """Whether Triton runs kernels on the CPU (``TRITON_INTERPRET=1``)."""
    return bool(triton.knobs.runtime.interpret)


def device_arch(device: torch.device) -> int:
    """Return the compute capability of a CUDA device, major times ten plus minor."""
    if device.type == "cpu" and is_interpreted():
        return INTERPRETED_ARCH
    return _cuda_arch(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cuda_arch(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def unsupported_reason(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the Triton backend cannot run on tensors of this dtype and device; ``None`` if it can."""
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreted()):
        return f"it needs a CUDA device, got {device}"
    if dtype not in DTYPES:
        return f"it takes bf16 and fp16, got {dtype}"
    arch = device_arch(device)
    if arch < MIN_ARCH:
        return f"it needs compute capability 8.0 or later, {device} has {arch // 10}.{arch % 10}"
    return None


def attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    *,
    q_offset: int,
    kv_offset: int,
    q_offset_rows: Tensor | None,
    kv_offset_rows: Tensor | None,
    kv_range: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute attention in fused kernels; arguments and results as in the custom op of :mod:`dma_kernels.api`."""
    arch = device_arch(query.device)
    lowering = select_lowering(recipe, arch)
    rows = None
    if q_offset_rows is not None or kv_offset_rows is not None or kv_range is not None:
        rows = _row_geometry(key, q_offset, kv_offset, q_offset_rows, kv_offset_rows, kv_range)
    interpreted = is_interpreted()
    on_device = torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext()
    with on_device:
        operands = quantize_keys_values(
            key, value, recipe, lowering, kv_offset=kv_offset, rows=rows, is_interpreted=interpreted
        )
        head_scale = query_factor(query, recipe, is_interpreted=interpreted)
        if head_scale is not None:
            operands = replace(operands, query_factor=head_scale)
        return prefill_attention(
            query,
            operands,
            PrefillGeometry(key.shape[2], q_offset, kv_offset, rows, is_causal, window, mask),
            recipe,
            select_tiles(arch, lowering, query.shape[3], value.shape[3], has_softcap=softcap is not None),
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            use_tma=arch >= 90,
            is_interpreted=interpreted,
        )


def _row_geometry(
    key: Tensor,
    q_offset: int,
    kv_offset: int,
    q_offset_rows: Tensor | None,
    kv_offset_rows: Tensor | None,
    kv_range: Tensor | None,
) -> Tensor:
    """Return int32 ``[B, 4]``: positions of query 0 and key 0, first visible key, and the one past the last."""
    rows = torch.empty((key.shape[0], 4), dtype=torch.int32, device=key.device)
    rows[:, 0] = q_offset if q_offset_rows is None else q_offset_rows + q_offset
    rows[:, 1] = kv_offset if kv_offset_rows is None else kv_offset_rows + kv_offset
    if kv_range is None:
        rows[:, 2], rows[:, 3] = 0, key.shape[2]
    else:
        rows[:, 2:] = kv_range
    return rows
