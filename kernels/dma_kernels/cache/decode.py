"""Decode attention on the Triton backend: up to 16 queries over a cache.

Two launches: split-KV attention (:mod:`.decode_kernel`), then the combination of splits and the storing of new KV
(:mod:`.split_kv_combine`). Lengths are read on the device, and grids depend only on shapes and capacities, so a CUDA
graph of a step can be replayed while the cache fills.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..numerics.geometry import LOG2_E
from ..numerics.layout import layout_of
from ..runtime import chip
from ..runtime.launch import Launcher
from ..runtime.plan import LaunchPlan, make_plan
from ..runtime.reports import report
from .append import append_tokens
from .decode_config import select_decode_tiling
from .decode_kernel import DecodeConfig, Splits, decode_kernel
from .decode_mma import QUERIES
from .formats import VALUE_GROUP
from .kernel_args import CacheInputs, PageConfig, Strided
from .split_kv_combine import launch_combine
from .storage import LayerStorage

MAX_QUERIES = 16
"""Queries of a call; longer chunks run on the prefill kernel."""


def decode_attention(
    query: Tensor,
    storage: LayerStorage,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, ...]:
    """Attend causally to a cache that already holds the keys of the queries.

    Query ``i`` of ``T`` is at position ``lengths - T + i``.

    Args:
        query: bf16 or fp16 ``[B, Hq, T, D]``, ``T <= 16``, any strides, in the dtype of the cache.
        storage: The cache, on the device of ``query``.
        scale: Scale of the scores.
        window: Sliding window; at most that of the storage, if it has one.
        softcap: Scores become ``softcap * tanh(score / softcap)``, after ``scale``.
        sinks: One logit per query head, ``[Hq]``.
        return_lse: Whether to return the log-sum-exp.

    Returns:
        Output ``[B, Hq, T, Dv]`` in the dtype of ``query``, 0 in rows that see no key, with ``.transpose(1, 2)``
        contiguous; and with ``return_lse`` the natural log-sum-exp, fp32 ``[B, Hq, T]``.

    Raises:
        ValueError: ``query`` has more than 16 positions.
    """
    if query.shape[2] > MAX_QUERIES:
        raise ValueError(
            f"query must have at most {MAX_QUERIES} positions, got {query.shape[2]}; use the prefill kernel"
        )
    out, lse = _run(query, None, None, storage, scale=scale, window=window, softcap=softcap, sinks=sinks)
    return (out, lse) if return_lse else (out,)


def decode_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    storage: LayerStorage,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store the keys and values of the queries and attend, without synchronizing.

    Equals :func:`~dma_kernels.cache.append.append_tokens` followed by :func:`decode_attention`, in two launches.

    Args:
        query: ``[B, Hq, T, D]``, and the options, as for :func:`decode_attention`.
        key: New keys ``[B, Hkv, T, D]``, any strides.
        value: New values ``[B, Hkv, T, Dv]``.
        storage: The cache. It must have pages for the tiles that are completed, and residual KV for the new tokens.
        scale: See :func:`decode_attention`.
        window: See :func:`decode_attention`.
        softcap: See :func:`decode_attention`.
        sinks: See :func:`decode_attention`.

    Returns:
        Output ``[B, Hq, T, Dv]`` in the dtype of ``query``.
    """
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    # Without a band, later queries read a tile that the new keys complete from its codes.
    if query.numel() == 0 or key.numel() == 0 or (key.shape[2] > 1 and storage.diagonal_tiles == 0):
        append_tokens(storage, key, value)
        return decode_attention(query, storage, **options)[0]  # type: ignore[arg-type]
    out = _run(query, key, value, storage, **options)[0]  # type: ignore[arg-type]
    storage.count_appended(key.shape[2])
    return out


def _run(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    storage: LayerStorage,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> list[Tensor]:
    """Return the output and the log-sum-exp of :func:`decode_attention`; store new keys and values if there are any."""
    if query.numel() == 0:
        batch, heads, q_len, _ = query.shape
        out = query.new_empty((batch, q_len, heads, storage.value_residual.shape[3])).transpose(1, 2)
        return [out, query.new_empty((batch, heads, q_len), dtype=torch.float32)]
    tensors = (query, key, value, None if sinks is None else sinks.contiguous(), *CacheInputs.of(storage))
    problem = DecodeProblem(
        format=storage.format,
        diagonal_tiles=storage.diagonal_tiles,
        query=layout_of(query),
        key=layout_of(key),
        value=layout_of(value),
        sinks=layout_of(tensors[3]),
        cache=CacheInputs(*map(layout_of, tensors[4:])),
        scale=scale,
        window=window,
        softcap=softcap,
        arch=chip.device_arch(query.device),
        sms=chip.sm_count(query.device),
        use_pdl=chip.supports_pdl(query.device),
    )
    report("decode")
    return plan_decode(problem).launches.run(tensors)


class DecodeProblem(NamedTuple):
    """A decode call without the contents of its tensors: the key of its plan.

    Attributes:
        format: Stored name of the cache format.
        diagonal_tiles: Tiles before a query's own tile that are high.
        query: Layout of ``[B, Hq, T, D]``.
        key: Layout of the new keys; ``None`` if they are stored already.
        value: Layout of the new values.
        sinks: Layout of the sink logits, contiguous.
        cache: Layouts of the tensors of the cache.
        scale: Scale of the scores.
        window: Sliding window.
        softcap: Softcap of the scores.
        arch: Compute capability, major version times ten plus minor.
        sms: SMs of the device.
        use_pdl: Whether launches overlap (programmatic dependent launch).
    """

    format: str
    diagonal_tiles: int
    query: Any
    key: Any
    value: Any
    sinks: Any
    cache: CacheInputs
    scale: float
    window: int | None
    softcap: float | None
    arch: int
    sms: int
    use_pdl: bool


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """How a decode call is computed.

    Attributes:
        config: Configuration of the decode kernel.
        ctas: CTAs of the decode kernel.
        launches: What is allocated and launched.
    """

    config: DecodeConfig
    ctas: int
    launches: LaunchPlan


@functools.lru_cache(maxsize=1024)
def plan_decode(problem: DecodeProblem) -> DecodePlan:
    """Plan a decode call."""
    batch, q_heads, q_len, _ = problem.query.shape
    kv_heads, value_dim = problem.cache.value_residual.shape[1], problem.cache.value_residual.shape[3]
    heads, group = batch * kv_heads, q_heads // kv_heads
    layout = problem.cache.page_layout(problem.format)
    sizes = problem.cache.sizes
    page = dict(vars(PageConfig.of(layout, kv_heads)))
    page["BLOCK_DV"] = max(VALUE_GROUP, page["BLOCK_DV"])
    tiling = select_decode_tiling(
        problem.arch, page["BLOCK_D"], page["BLOCK_DV"], page["BITS"], heads=heads, tiles=sum(sizes), sms=problem.sms
    )
    config = DecodeConfig(
        **page,
        GROUP=group,
        LOW_QUERIES=4 if group * q_len <= 4 else QUERIES,
        W=tiling.warps,
        STAGES=tiling.stages,
        HAS_WINDOW=problem.window is not None,
        HAS_SOFTCAP=problem.softcap is not None,
        USE_PDL=problem.use_pdl,
    )
    # A CTA writes a split for each head that it touches.
    split_rows = (tiling.ctas + heads) * triton.cdiv(group * q_len, QUERIES) * QUERIES

    def launch(query: Any, key: Any, value: Any, sinks: Any, *cache: Any) -> tuple[Any, Any]:
        out = query.new_empty((batch, q_len, q_heads, value_dim)).transpose(1, 2)
        lse = query.new_empty((batch, q_heads, q_len), dtype=torch.float32)
        splits = Splits(
            heads=query.new_empty((batch, kv_heads, 3), dtype=torch.int32),
            out=query.new_empty((split_rows, value_dim), dtype=torch.float32),
            lse=query.new_empty((split_rows,), dtype=torch.float32),
        )
        new_key, new_value, tensors = Strided.of(key), Strided.of(value), CacheInputs(*cache).tensors
        Launcher(decode_kernel, {"CONFIG": config}, num_warps=config.W)(
            (tiling.ctas, 1, 1),
            Strided.of(query), new_key, new_value, tensors, splits,
            (problem.softcap or 0.0) * LOG2_E, problem.scale * LOG2_E,
            batch, q_len, problem.window or 0, problem.diagonal_tiles, *sizes,
        )  # fmt: skip
        launch_combine(
            layout, out, lse, splits, sinks, new_key, new_value, tensors, sizes,
            sms=problem.sms, use_pdl=problem.use_pdl,
        )  # fmt: skip
        return out, lse

    layouts = (problem.query, problem.key, problem.value, problem.sinks, *problem.cache)
    return DecodePlan(config, tiling.ctas, make_plan(launch, layouts, problem.query.device))
