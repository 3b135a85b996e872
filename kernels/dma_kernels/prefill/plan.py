"""The plan of a call: its kernel, and the allocations and launches of the quantizers and that kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..numerics.arguments import check_call, of_four_dimensions
from ..numerics.call import AttentionCall
from ..numerics.geometry import AttentionGeometry
from ..numerics.layout import TensorLayout
from ..numerics.recipe import Recipe
from ..numerics.saturation import warn_if_saturated
from ..reference.attention import attention_reference
from ..runtime import chip
from ..runtime.compute_path import ComputePath, select_compute_path
from ..runtime.reports import report
from .config import PrefillShape
from .operands import AttentionInputs, Operands
from .registry import select_kernel

if TYPE_CHECKING:
    from ..runtime.plan import LaunchPlan


@dataclass(frozen=True, eq=False)
class PrefillPlan:
    """How the kernels compute calls with the same plan key."""

    kernel: str  # name of the attention kernel
    launches: LaunchPlan  # allocations and launches

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Compute a call.

        Returns:
            The output, and the log-sum-exp, or ``None`` if the call does not need it.
        """
        if call.recipe.pv == "fp8":
            warn_if_saturated()  # in earlier calls, which the host did not wait for
        report(self.kernel)
        out, *others = self.launches.run(
            (call.query, call.key, call.value, call.sinks, call.mask, call.seq_info(), call.tile_counts)
        )
        return out, others[0] if others else None


@dataclass(frozen=True, eq=False)
class ShortPlan:
    """How the split-KV kernels compute short calls with the same plan key. They read positions from the caller."""

    launches: LaunchPlan  # allocations and launches
    kernel = "split-KV"

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Compute a call; see :meth:`PrefillPlan.run`."""
        report(self.kernel)
        out, *others = self.launches.run((call.query, call.key, call.value, call.sinks, call.mask, *call.row_tensors))
        return out, others[0] if others else None


class SDPAPlan:
    """PyTorch's attention, for short calls that it computes as fast and with less host time: one query, no options."""

    kernel = "sdpa"

    def run(self, call: AttentionCall) -> tuple[Tensor, None]:
        """Compute a call; see :meth:`PrefillPlan.run`."""
        report(self.kernel)
        out = scaled_dot_product_attention(call.query, call.key, call.value, scale=call.scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous().transpose(1, 2), None


class ReferencePlan:
    """The reference in torch, which launches no kernels of ours."""

    kernel = "reference"

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Compute a call; see :meth:`PrefillPlan.run`."""
        report(self.kernel)
        return attention_reference(call)


@functools.lru_cache(maxsize=256)
def plan(call: AttentionCall) -> PrefillPlan | ShortPlan | SDPAPlan | ReferencePlan:
    """Plan calls with the layouts and options of ``call``.

    Raises:
        ValueError: A layout or an offset is not as :func:`dma_kernels.attention` describes.
        TypeError: A dtype is not as described there.
        RuntimeError: The requested backend cannot run on this device.
    """
    check_call(call)
    device, q_len = call.query.device, call.query.shape[2]
    if chip.resolve_backend(call.backend, device, call.query.dtype) == "reference":
        return ReferencePlan()
    if call.is_short and call.key.numel():
        return SDPAPlan() if call.backend == "auto" and _suits_sdpa(call) else _plan_short(call)
    from ..runtime.plan import make_plan  # the reference needs no Triton

    info = TensorLayout.dense((call.key.shape[0], 4), torch.int32, device) if call.has_seq_info else None
    geometry = AttentionGeometry.of(call, info)
    recipe = call.effective_recipe
    if geometry.low_tiles(q_len, recipe.diagonal_tiles, recipe.sink_tiles) == range(0):
        recipe = recipe.of_high_tiles
    arch = chip.device_arch(device)
    path = select_compute_path(recipe, arch, max(call.query.shape[3], call.value.shape[3]))
    shape = PrefillShape(call.query, call.key, call.value, geometry, arch, call.softcap is not None)
    kernel, config = select_kernel(shape, path)

    def launch(query: Any, key: Any, value: Any, sinks: Any, mask: Any, seq_info: Any, tile_counts: Any) -> Any:
        placed = replace(geometry, mask=of_four_dimensions(mask), seq_info=seq_info)
        operands = quantize_operands(query, key, value, recipe, path, placed)
        out, lse = new_results(query, value)
        if lse.numel():
            inputs = AttentionInputs(
                query, operands, placed, recipe, config, out, lse, call.score_scale, call.softcap, sinks,
                None if operands.low is None else tile_counts,
            )  # fmt: skip
            kernel.launch(inputs)
        return (out, lse) if call.needs_lse else (out,)

    layouts: tuple[Any, ...] = (call.query, call.key, call.value, call.sinks, geometry.mask, info, call.tile_counts)
    return PrefillPlan(kernel.name, make_plan(launch, layouts, device))


def _suits_sdpa(call: AttentionCall) -> bool:
    """Whether one query attends to all keys, without options, so that PyTorch runs FlashAttention's split-KV kernel."""
    q_len, kv_len = call.query.shape[2], call.key.shape[2]
    options = (call.kv_range, call.mask, call.softcap, call.sinks)
    return (
        q_len == 1
        and not call.needs_lse
        and not call.has_seq_info
        and call.first_query - call.kv_offset >= kv_len - 1
        and (call.window is None or call.window > call.first_query - call.kv_offset)
        and all(option is None for option in options)
        and call.query.shape[3] == call.value.shape[3]
    )


def _plan_short(call: AttentionCall) -> ShortPlan:
    """Plan a short call on the split-KV kernels."""
    from ..runtime.plan import make_plan
    from .split_kv import launch

    window = AttentionGeometry.of(call).window
    row_tensors, lead = call.row_tensors, call.lead

    def run(query: Any, key: Any, value: Any, sinks: Any, mask: Any, *row_tensors: Any) -> Any:
        out, lse = new_results(query, value)
        if lse.numel():
            launch(
                query, key, value, out, lse, sinks, of_four_dimensions(mask), *row_tensors,
                lead=lead, window=window, softcap=call.softcap, scale=call.score_scale,
            )  # fmt: skip
        return (out, lse) if call.needs_lse else (out,)

    mask = of_four_dimensions(call.mask)
    layouts: tuple[Any, ...] = (call.query, call.key, call.value, call.sinks, mask, *row_tensors)
    return ShortPlan(make_plan(run, layouts, call.query.device))


def quantize_operands(
    query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, path: ComputePath, geometry: AttentionGeometry
) -> Operands:
    """Launch the preprocessing; arguments as for the attention kernel and the quantizer."""
    from .quantizer import quantize_keys_values, query_global_scale

    operands = quantize_keys_values(
        key,
        value,
        recipe,
        path,
        kv_offset=geometry.kv_offset,
        seq_info=geometry.seq_info,
        low_tiles=geometry.low_tiles(query.shape[2], recipe.diagonal_tiles, recipe.sink_tiles),
    )
    global_scale = query_global_scale(query, recipe)
    return operands if global_scale is None else replace(operands, query_global_scale=global_scale)


def new_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the output ``[B, Hq, Tq, Dv]`` and the log-sum-exp, fp32 ``[B, Hq, Tq]``."""
    batch, heads, q_len, _ = query.shape
    out = query.new_empty((batch, q_len, heads, value.shape[3])).transpose(1, 2)
    return out, query.new_empty((batch, heads, q_len), dtype=torch.float32)
