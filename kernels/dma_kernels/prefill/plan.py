"""The plan of a call: what computes it, and the allocations and launches of the quantizers and the attention kernel."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp, flash_sdp_enabled
from torch.nn.functional import scaled_dot_product_attention

from ..numerics.call import AttentionCall, ShortKey, check_call
from ..numerics.formats import UNQUANTIZED
from ..numerics.geometry import LOG2_E, AttentionGeometry
from ..numerics.layout import TensorLayout, broadcast_strides
from ..numerics.recipe import Recipe
from ..numerics.saturation import warn_if_saturated
from ..reference.attention import attention_reference
from ..runtime import chip
from ..runtime.reports import report
from .config import (
    OneWarpgroupConfig,
    PortableConfig,
    select_compute_path,
    select_config,
    select_swizzle_group,
)
from .operands import AttentionInputs, Operands, new_results

if TYPE_CHECKING:
    from ..runtime.plan import LaunchPlan


SLOW_FLASH_MAJORS = (9, 10)
"""Major compute capabilities on which PyTorch prefers cuDNN's attention, because FlashAttention-2 is slow (10: not
timed)."""
FEW_ROWS = 1 << 14
"""Query rows of a prompt, over all heads, up to which the host takes longer to launch a layer than the GPU to run it.
With more, FlashAttention-2 on Hopper delays first tokens by 4 % (H200, 8B parameters, 1,000 tokens)."""

_settings_lock = threading.RLock()  # PyTorch's settings belong to the process


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """How calls with the same key are computed."""

    kernel: str  # name of the kernel in reports
    run: Callable[[AttentionCall], Sequence[Tensor]]  # returns the output and, if the call needs it, the log-sum-exp
    launches: LaunchPlan | None = None  # allocations and launches of our kernels


@functools.lru_cache(maxsize=256)
def plan(layouts: AttentionCall) -> AttentionPlan:
    """Return the plan of a call with layouts (:meth:`AttentionCall.layouts`).

    Raises:
        ValueError: A layout or an offset is not as :func:`dma_kernels.attention` describes.
        TypeError: A dtype is not as described there.
        RuntimeError: The requested backend cannot run on this device.
    """
    return _plan_of_key(ShortKey.of(layouts))


def forget_plans() -> None:
    """Plan all calls again."""
    plan.cache_clear()
    _plan_of_key.cache_clear()


@functools.lru_cache(maxsize=256)
def _plan_of_key(key: AttentionCall) -> AttentionPlan:
    call = key.call if isinstance(key, ShortKey) else key
    check_call(call)
    if chip.resolve_backend(call.backend, call.query.device, call.query.dtype) == "reference":
        return AttentionPlan("reference", _run_reference)
    if call.backend == "auto" and _suits_sdpa(call):
        return AttentionPlan("sdpa", _run_sdpa)
    return _plan_short(call) if call.is_short else _plan_prefill(call)


def _run_reference(call: AttentionCall) -> Sequence[Tensor]:
    report("reference")
    return attention_reference(call)


def _run_sdpa(call: AttentionCall) -> Sequence[Tensor]:
    return (sdpa(call.query, call.key, call.value, call.scale),)


def sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Compute an exact causal call by PyTorch's attention: a prompt, or one query over all keys. Any strides.

    FlashAttention-2 instead of cuDNN, which would build a plan for each new length of a prompt (H200: 55 ms).
    """
    report("sdpa")
    with _settings_lock:
        has_cudnn = cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        enable_cudnn_sdp(has_cudnn and not flash_sdp_enabled())  # type: ignore[no-untyped-call]
        try:
            return scaled_dot_product_attention(
                query, key, value, is_causal=query.shape[2] > 1, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )
        finally:
            enable_cudnn_sdp(has_cudnn)


def _plan_prefill(call: AttentionCall) -> AttentionPlan:
    """Plan a call on the quantizers and the fastest prefill kernel."""
    from ..runtime.plan import LaunchPlan  # the reference needs no Triton
    from .quantizer import quantize_keys_values, query_global_scale

    device, q_len, has_info = call.query.device, call.query.shape[2], call.has_seq_info
    info = TensorLayout.dense((call.key.shape[0], 4), torch.int32, device) if has_info else None
    geometry = AttentionGeometry.of(call, info)
    recipe, low_tiles = call.recipe, geometry.low_tiles(q_len, call.recipe)
    if low_tiles == range(0):
        recipe = recipe.of_high_tiles
    device_chip = chip.of(device)
    path = select_compute_path(recipe, device_chip.arch, max(call.query.shape[3], call.value.shape[3]))
    config = select_config(call, geometry, path, device_chip)

    def launch(query: Any, key: Any, value: Any, sinks: Any, mask: Any, seq_info: Any, tile_counts: Any) -> Any:
        placed = replace(geometry, mask=mask, seq_info=seq_info)
        operands = quantize_keys_values(
            key, value, recipe, path, kv_offset=geometry.kv_offset, seq_info=seq_info, low_tiles=low_tiles
        )
        operands = replace(operands, query_global_scale=query_global_scale(query, recipe))
        out, lse = new_results(query, value)
        if lse.numel():
            launch_attention(
                query, operands, placed, recipe, config, out, lse, scale=call.score_scale, softcap=call.softcap,
                sinks=sinks, tile_counts=tile_counts,
            )  # fmt: skip
        return (out, lse) if call.needs_lse else (out,)

    layouts = (call.query, call.key, call.value, call.sinks, geometry.mask, info, call.tile_counts)
    launches = LaunchPlan(launch, layouts, device)
    may_saturate = call.recipe.pv != UNQUANTIZED

    def run(call: AttentionCall) -> Sequence[Tensor]:
        if may_saturate:
            warn_if_saturated()  # in earlier calls, which the host did not wait for
        report(config.kernel)
        info = call.seq_info() if has_info else None
        return launches.run((call.query, call.key, call.value, call.sinks, call.mask, info, call.tile_counts))

    return AttentionPlan(config.kernel, run, launches)


def launch_attention(
    query: Any, operands: Operands, geometry: AttentionGeometry, recipe: Recipe, config: Any, out: Any, lse: Any, *,
    scale: float, softcap: float | None, sinks: Any, tile_counts: Any = None,
) -> None:  # fmt: skip
    """Launch the attention kernel that the configuration belongs to; arguments as in :class:`AttentionInputs`.

    ``scale`` and ``softcap`` are those of the call, not in base 2.
    """
    low, threshold = operands.low or operands.high, recipe.skip_threshold
    if operands.low is None:
        tile_counts = threshold = None
    elif threshold == math.inf and tile_counts is None:
        threshold = None
    kv_rows = low.key.shape[0] * low.key.shape[1]
    inputs = AttentionInputs(
        query, operands, low, geometry, recipe, config, out, lse, kv_rows,
        swizzle_group=select_swizzle_group(kv_rows, (low.key.nbytes + low.value.nbytes) // kv_rows),
        logit_scale=scale * LOG2_E,
        softcap=None if softcap is None else softcap * LOG2_E,
        skip_threshold=None if threshold is None else threshold * LOG2_E,
        sinks=sinks,
        tile_counts=tile_counts,
    )  # fmt: skip
    if isinstance(config, PortableConfig):
        from . import portable

        portable.launch(inputs)
        return
    from .hopper import host

    launch = host.launch_one_warpgroup if isinstance(config, OneWarpgroupConfig) else host.launch_warp_specialized
    launch(inputs)


def _suits_sdpa(call: AttentionCall) -> bool:
    """Whether PyTorch's attention computes an exact call: a decoding step, or a prompt without low tiles.

    One query attends to all keys, so that PyTorch runs FlashAttention's split-KV kernel. Or all tiles of a short prompt
    are high, and there are as many queries as keys, but only few rows where FlashAttention-2 is slow.
    """
    batch, heads, q_len, _ = call.query.shape
    kv_len = call.key.shape[2]
    if call.needs_lse or call.has_seq_info or not call.is_causal or call.query.shape[3] != call.value.shape[3]:
        return False
    if any(option is not None for option in (call.kv_range, call.mask, call.softcap, call.sinks)):
        return False
    last = call.first_query - call.kv_offset + q_len - 1  # key that is at the position of the last query
    if not 0 < kv_len <= last + 1 or (call.window is not None and call.window <= last):
        return False
    if q_len == 1 < kv_len:
        return call.is_short
    if q_len != kv_len or last != kv_len - 1 or call.recipe.high != UNQUANTIZED:
        return False
    if batch * heads * q_len > FEW_ROWS and chip.of(call.query.device).arch // 10 in SLOW_FLASH_MAJORS:
        return False
    geometry = AttentionGeometry.of(call)
    return geometry.low_tiles(q_len, call.recipe) == range(0)


def _plan_short(call: AttentionCall) -> AttentionPlan:
    """Plan a short call on the split-KV kernels. They read positions from the caller; the plan has no lengths."""
    from ..runtime.plan import NUMBER, LaunchPlan
    from .split_kv import attend

    has_mask = call.mask is not None
    layouts = (call.query, call.key, call.value, call.mask, call.sinks, *call.row_tensors)
    launches = LaunchPlan(
        functools.partial(
            attend, window=AttentionGeometry.of(call).window, softcap=call.softcap, scale=call.score_scale,
            needs_lse=call.needs_lse,
        ),
        (*layouts, *(NUMBER,) * (14 if has_mask else 10)), call.query.device,
    )  # fmt: skip

    def run(call: AttentionCall) -> Sequence[Tensor]:
        report("split-KV")
        key, value, mask = call.key, call.value, call.mask
        strides = (*key.stride(), *value.stride())
        if has_mask:
            strides = (*strides, *(0,) * (4 - mask.ndim), *broadcast_strides(mask))
        return launches.run(
            (call.query, key, value, mask, call.sinks, *call.row_tensors, call.lead, key.shape[2], *strides)
        )

    return AttentionPlan("split-KV", run, launches)
