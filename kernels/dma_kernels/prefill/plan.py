"""The plan of a prefill call: which kernel computes it, how it is configured, and what is launched."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..numerics.arguments import of_four_dimensions
from ..numerics.geometry import LOG2_E, AttentionGeometry, AttentionOptions, PrefillGeometry
from ..numerics.layout import TensorLayout
from ..numerics.recipe import Recipe
from ..numerics.saturation import warn_if_saturated
from ..runtime import chip
from ..runtime.compute_path import ComputePath, select_compute_path
from ..runtime.reports import report
from .problem import PrefillProblem, PrefillShape

if TYPE_CHECKING:
    from ..runtime.plan import LaunchPlan
    from .operands import Operands


@dataclass(frozen=True, eq=False)
class PrefillPlan:
    """How a call of one problem is computed.

    Attributes:
        problem: The call.
        kernel: Name of the kernel; ``reference`` for the backend in torch.
        config: Configuration of the kernel; ``None`` for the reference.
        launches: What is allocated and launched; ``None`` for the reference.
        has_rows: Whether the launches read positions and ranges of batch rows.
    """

    problem: PrefillProblem
    kernel: str
    config: Any = None
    launches: LaunchPlan | None = None
    has_rows: bool = False

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        q_offset: int | Tensor | None = None,
        kv_offset: int | Tensor = 0,
        kv_range: Tensor | None = None,
        sinks: Tensor | None = None,
        mask: Tensor | None = None,
        tile_counts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a call whose tensors have the layouts of the problem.

        Returns:
            The output; and the logarithms of the denominators, or ``None`` where the problem does not need them.
        """
        if self.launches is None:
            options = self._options(q_offset, kv_offset, kv_range, sinks, mask)
            return _run_reference(query, key, value, self.problem.recipe, options, tile_counts)
        if self.problem.recipe.pv == "fp8":
            warn_if_saturated()  # by earlier calls, which the host did not wait for
        rows = None
        if self.has_rows:
            rows = self._options(q_offset, kv_offset, kv_range, sinks, mask).rows(query, key)
        report(self.kernel)
        out, *others = self.launches.run((query, key, value, sinks, mask, rows, tile_counts))
        return out, others[0] if others else None

    def _options(self, q_offset: Any, kv_offset: Any, kv_range: Any, sinks: Any, mask: Any) -> AttentionOptions:
        return self.problem.options(
            q_offset=q_offset, kv_offset=kv_offset, kv_range=kv_range, sinks=sinks, mask=of_four_dimensions(mask)
        )


@functools.lru_cache(maxsize=256)
def plan(problem: PrefillProblem) -> PrefillPlan:
    """Plan a prefill call.

    Raises:
        ValueError: A layout or an offset is not as :func:`dma_kernels.attention` describes.
        TypeError: A dtype is not as described there.
        RuntimeError: The backend that was asked for cannot run on this device.
    """
    problem.check()
    query, key, value = problem.query, problem.key, problem.value
    if chip.resolve_backend(problem.backend, query.device, query.dtype) == "reference":
        return PrefillPlan(problem, "reference")
    from ..runtime.plan import make_plan
    from .registry import select_kernel

    options = problem.options()
    rows_layout = None
    if options.has_rows:
        rows_layout = TensorLayout.dense((key.shape[0], 4), torch.int32, key.device)
    geometry = PrefillGeometry.of(options, query, key, rows_layout)
    recipe = problem.recipe
    if geometry.low_tiles(query.shape[2], recipe.diagonal_tiles, recipe.sink_tiles) == range(0):
        recipe = recipe.of_high_tiles
    arch = chip.device_arch(query.device)
    path = select_compute_path(recipe, arch, max(query.shape[3], value.shape[3]))
    shape = PrefillShape(query, key, value, geometry, arch, options.softcap is not None)
    kernel, config = select_kernel(shape, path)

    def launch(query: Any, key: Any, value: Any, sinks: Any, mask: Any, rows: Any, tile_counts: Any) -> Any:
        placed = replace(geometry, mask=mask, rows=rows)
        operands = quantize_operands(query, key, value, recipe, path, placed)
        out, lse = new_results(query, value)
        if lse.numel():
            threshold = None if operands.low is None else base2_threshold(recipe, tile_counts)
            kernel.launch(
                *(query, operands, placed, recipe, config, out, lse),
                scale=options.scale,
                softcap=options.softcap,
                sinks=sinks,
                skip_threshold=threshold,
                tile_counts=None if threshold is None else tile_counts,
                # The quantiser writes the keys of low tiles and lets the next launch start early. It started after all
                # earlier work itself, so the caller's tensors are there. NVFP4's query scale is a launch in between.
                use_pdl=chip.supports_pdl(query.device)
                and operands.low is not None
                and operands.query_global_scale is None,
            )
        return (out, lse) if problem.needs_lse else (out,)

    mask: Any = options.mask
    layouts = (query, key, value, problem.sinks, mask, rows_layout, problem.tile_counts)
    launches = make_plan(launch, layouts, query.device)
    return PrefillPlan(problem, kernel.name, config, launches, options.has_rows)


def quantize_operands(
    query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, path: ComputePath, geometry: PrefillGeometry
) -> Operands:
    """Launch what precedes the attention kernel; arguments as for it and for the quantiser."""
    from .quantizer import quantize_keys_values
    from .query_global_scale import query_global_scale

    operands = quantize_keys_values(
        key,
        value,
        recipe,
        path,
        kv_offset=geometry.kv_offset,
        seq_info=geometry.rows,
        low_tiles=geometry.low_tiles(query.shape[2], recipe.diagonal_tiles, recipe.sink_tiles),
    )
    global_scale = query_global_scale(query, recipe)
    return operands if global_scale is None else replace(operands, query_global_scale=global_scale)


def new_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the output ``[B, Hq, Tq, Dv]`` and the logarithms of the denominators, fp32 ``[B, Hq, Tq]``."""
    batch, heads, q_len, _ = query.shape
    out = query.new_empty((batch, q_len, heads, value.shape[3])).transpose(1, 2)
    return out, query.new_empty((batch, heads, q_len), dtype=torch.float32)


def base2_threshold(recipe: Recipe, tile_counts: Tensor | None) -> float | None:
    """Return a recipe's threshold in base-2 logits; ``None`` where nothing can be skipped and nothing is counted."""
    threshold = recipe.skip_threshold
    if threshold is None or (threshold == math.inf and tile_counts is None):
        return None
    return threshold * LOG2_E


def _run_reference(
    query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, options: AttentionOptions, tile_counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    from ..reference.attention import attention_reference

    report("reference")
    results = attention_reference(
        *(query, key, value, AttentionGeometry.of(options, query, key), recipe),
        scale=options.scale,
        softcap=options.softcap,
        sinks=options.sinks,
        tile_counts=tile_counts,
    )
    if recipe.pv == "fp8":
        warn_if_saturated()
    return results
