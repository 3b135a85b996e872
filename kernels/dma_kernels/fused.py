"""The ``triton`` backend: choose a lowering for the device, prepare the operands, launch the kernel."""

from __future__ import annotations

import contextlib
import functools

import torch
import triton
from torch import Tensor

from .fused_quantize import quantize_keys_values, quantize_queries
from .operands import Operands, prepare_portable, select_lowering
from .prefill import prefill_attention
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
    batch, kv_heads, kv_len = key.shape[:3]
    arch = device_arch(query.device)
    rows = None
    if q_offset_rows is not None or kv_offset_rows is not None or kv_range is not None:
        rows = _row_geometry(batch, kv_len, q_offset, kv_offset, q_offset_rows, kv_offset_rows, kv_range, query.device)
    interpreted = is_interpreted()
    on_device = torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext()
    with on_device:
        if select_lowering(recipe, arch) == "8bit":
            k_high, k_low, k_factor, v_low, v_factor = quantize_keys_values(
                key, value, recipe, kv_offset=kv_offset, rows=rows, is_interpreted=interpreted
            )
            q_high, q_low, q_factor = quantize_queries(query, recipe, is_interpreted=interpreted)
            operands = Operands(
                q_high=query if q_high is None else q_high,
                k_high=key if k_high is None else k_high,
                value=value if v_low is None else v_low,
                q_low=q_low,
                k_low=k_low,
                q_factor=q_factor,
                k_factor=k_factor,
                value_factor=v_factor,
                pv="16bit" if v_low is None else "fp8",
                is_high_aligned=k_high is not None,
                is_low_aligned=True,
            )
        else:
            operands = _prepare_portable(query, key, value, recipe, kv_offset=kv_offset, rows=rows)
        tiles = select_tiles(
            arch,
            triton.next_power_of_2(query.shape[3]),
            triton.next_power_of_2(value.shape[3]),
            low_bits=8 * (operands.q_high if operands.k_low is None else operands.k_low).element_size(),
            value_bits=8 * operands.value.element_size(),
        )
        return prefill_attention(
            query,
            operands,
            kv_len=kv_len,
            kv_heads=kv_heads,
            value_dim=value.shape[3],
            q_offset=q_offset,
            kv_offset=kv_offset,
            rows=rows,
            recipe=recipe,
            is_causal=is_causal,
            window=window,
            softcap=softcap,
            sinks=sinks,
            mask=mask,
            scale=scale,
            tiles=tiles,
            # A descriptor's rows start at multiples of 16 bytes.
            use_tma=arch >= 90 and query.shape[3] % 8 == 0,
            is_interpreted=interpreted,
        )


def _prepare_portable(
    query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, *, kv_offset: int, rows: Tensor | None
) -> Operands:
    if rows is None:
        kv_position = torch.full((key.shape[0],), kv_offset, device=key.device)
        return prepare_portable(query, key, value, recipe, kv_position=kv_position, visible=None)
    index = torch.arange(key.shape[2], device=key.device)
    visible = (index >= rows[:, 2:3]) & (index < rows[:, 3:4])
    return prepare_portable(query, key, value, recipe, kv_position=rows[:, 1].long(), visible=visible)


def _row_geometry(
    batch: int,
    kv_len: int,
    q_offset: int,
    kv_offset: int,
    q_offset_rows: Tensor | None,
    kv_offset_rows: Tensor | None,
    kv_range: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Return int32 ``[B, 4]``: positions of query 0 and key 0, first visible key, and the one past the last."""
    rows = torch.empty((batch, 4), dtype=torch.int32, device=device)
    rows[:, 0] = q_offset if q_offset_rows is None else q_offset_rows + q_offset
    rows[:, 1] = kv_offset if kv_offset_rows is None else kv_offset_rows + kv_offset
    if kv_range is None:
        rows[:, 2], rows[:, 3] = 0, kv_len
    else:
        rows[:, 2:] = kv_range
    return rows
