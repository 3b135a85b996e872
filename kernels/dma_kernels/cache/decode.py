"""Decode attention on the Triton backend: up to 16 queries over a cache.

Two launches: split-KV attention (:mod:`.decode_kernel`), then the combination of splits and the storing of new KV
(:mod:`.split_kv_combine`). Lengths are read on the device, and grids depend only on shapes and capacities, so a CUDA
graph of a step can be replayed while the cache fills.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..device.softmax import Splits
from ..numerics.formats import padded_channels
from ..numerics.geometry import LOG2_E
from ..numerics.layout import layout_of
from ..prefill.operands import new_results
from ..runtime import chip
from ..runtime.launch import launch_kernel
from ..runtime.plan import LaunchPlan, Planned, numbers_of
from ..runtime.reports import report
from .append import append_tokens
from .decode_config import select_decode_tiling
from .decode_kernel import DecodeConfig, decode_kernel
from .decode_mma import QUERIES
from .formats import VALUE_GROUP
from .kernel_args import CacheInputs, Strided
from .reference import CacheOptions
from .split_kv_combine import launch_combine
from .storage import LayerStorage

MAX_QUERIES = 16
"""Queries of a call; longer chunks run on the prefill kernel."""


def decode_step(query: Tensor, key: Tensor, value: Tensor, storage: LayerStorage, options: CacheOptions) -> Tensor:
    """Store the keys and values of the queries, if there are any, and attend, without synchronizing.

    Equals :func:`~dma_kernels.cache.append.append_tokens` followed by :func:`decode_attention`, in two launches. The
    cache must have residual KV for the new tokens.
    """
    # Without a band, later queries must read a tile that the new keys complete as codes.
    if query.numel() == 0 or key.numel() == 0 or (key.shape[2] > 1 and storage.diagonal_tiles == 0):
        append_tokens(storage, key, value)
        return decode_attention(query, storage, options)[0]
    out, _ = decode_attention(query, storage, options, key, value)
    storage.count_appended(key.shape[2])
    return out


def decode_attention(
    query: Tensor, storage: LayerStorage, options: CacheOptions, key: Tensor | None = None, value: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend causally to a cache, and store new keys and values without counting them on the host.

    The last query is at the position of the last key.

    Args:
        query: bf16 or fp16 ``[B, Hq, T, D]``, ``T <= 16``, any strides, in the dtype of the cache.
        storage: The cache, on the device of ``query``.
        options: Causal, without a mask.
        key: New keys ``[B, Hkv, T, D]``; ``None`` if the cache already holds the keys of the queries.
        value: New values ``[B, Hkv, T, Dv]``; ``None`` with ``key``.

    Returns:
        Output ``[B, Hq, T, Dv]`` in the dtype of ``query``, 0 in rows that see no key, with ``.transpose(1, 2)``
        contiguous; and the natural log-sum-exp, fp32 ``[B, Hq, T]``.

    Raises:
        ValueError: ``query`` has more than 16 positions.
    """
    if query.shape[2] > MAX_QUERIES:
        raise ValueError(
            f"query must have at most {MAX_QUERIES} positions, got {query.shape[2]}; use the prefill kernel"
        )
    if query.numel() == 0:
        return new_results(query, storage.value_residual)
    given, signature = _given_and_signature(query, key, value, options)
    step: RepeatedStep | None = storage.repeated_step
    if step is None or step.signature != signature or not step.is_over(storage):
        cache = CacheInputs.of(storage)
        plan = launch_decode.plan_of(
            (*given, *cache), format=storage.format, diagonal_tiles=storage.diagonal_tiles,
            max_tiles=storage.max_tiles, scale=options.scale, window=options.window, softcap=options.softcap,
        )  # fmt: skip
        addresses = tuple(numbers_of(cache))
        step = RepeatedStep(signature, plan, cache, addresses, storage.room, _tensors_of(storage))
        storage.repeated_step = step
    return step.run(given)


def _given_and_signature(
    query: Tensor, key: Tensor | None, value: Tensor | None, options: CacheOptions
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the tensors of a step that are not the cache's, and what its plan depends on besides the cache."""
    given = query, key, value, None if options.sinks is None else options.sinks.contiguous()
    return given, (tuple(map(layout_of, given)), (options.scale, options.window, options.softcap))


class RepeatedStep(NamedTuple):
    """A decode step over a storage, and what the next one with the same layouts need not work out again."""

    signature: tuple[Any, ...]  # layouts of query, new KV and sinks, and the options
    plan: LaunchPlan
    cache: CacheInputs
    addresses: tuple[int, ...]  # of the tensors of the cache
    room: int  # tokens that the storage has room for
    stored: tuple[Any, ...]  # the tensors of the cache, as the storage has them

    def is_over(self, storage: LayerStorage) -> bool:
        """Return whether the tensors of the storage are still those of the step."""
        return all(map(operator.is_, _tensors_of(storage), self.stored))

    def run(self, given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Do the step with other tensors that are not the cache's."""
        report("decode")
        out, lse = self.plan.run((*given, *self.cache), (*numbers_of(given), *self.addresses))
        return out, lse


_tensors_of = operator.attrgetter(*CacheInputs._fields)


def repeat_step(
    query: Tensor, key: Tensor, value: Tensor, storage: LayerStorage, options: CacheOptions
) -> Tensor | None:
    """Do the last :func:`decode_step` over a storage again, with other tensors.

    Returns:
        The output. ``None`` if layouts or options differ, or the host does not know whether there is room.
    """
    step: RepeatedStep | None = storage.repeated_step
    count = key.shape[2]
    if step is None or storage.appended + count > step.room or not step.is_over(storage):
        return None
    given, signature = _given_and_signature(query, key, value, options)
    if signature != step.signature:
        return None
    out, _ = step.run(given)
    storage.count_appended(count)
    return out


@Planned
def launch_decode(
    query: Any, key: Any, value: Any, sinks: Any, *cache: Any,
    format: str, diagonal_tiles: int, max_tiles: int, scale: float, window: int | None, softcap: float | None,
) -> tuple[Any, Any]:  # fmt: skip
    """Launch both kernels, and return the output and the log-sum-exp.

    ``key`` and ``value`` are ``None`` if they are stored already; ``format`` is the stored name of the cache's format.
    """
    inputs = CacheInputs(*cache)
    (batch, q_heads, q_len, _), (_, kv_heads, _, value_dim) = query.shape, inputs.value_residual.shape
    heads, group = batch * kv_heads, q_heads // kv_heads
    layout, sizes, device_chip = inputs.page_layout(format), inputs.sizes, chip.of(query.device)
    tiling = select_decode_tiling(
        device_chip.arch,
        padded_channels(layout.head_dim),
        max(VALUE_GROUP, padded_channels(value_dim)),
        layout.format.bits,
        heads=heads,
        tiles=sum(sizes),
        sms=device_chip.sms,
    )
    config = DecodeConfig(
        layout,
        kv_heads,
        GROUP=group,
        LOW_QUERIES=4 if group * q_len <= 4 else QUERIES,
        W=tiling.warps,
        STEPS=tiling.steps,
        STAGES=tiling.stages,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        USE_PDL=device_chip.supports_pdl,
    )
    # A CTA writes a split for each head that it touches.
    split_rows = (tiling.ctas + heads) * triton.cdiv(group * q_len, QUERIES) * QUERIES
    out, lse = new_results(query, inputs.value_residual)
    splits = Splits(
        heads=query.new_empty((batch, kv_heads, 3), dtype=torch.int32),
        out=query.new_empty((split_rows, value_dim), dtype=torch.float32),
        lse=query.new_empty((split_rows,), dtype=torch.float32),
    )
    new_key, new_value = Strided.of(key), Strided.of(value)
    launch_kernel(
        decode_kernel, {"CONFIG": config}, (tiling.ctas, 1, 1),
        Strided.of(query), new_key, new_value, inputs.tensors, splits,
        (softcap or 0.0) * LOG2_E, scale * LOG2_E, batch, q_len, window or 0, diagonal_tiles, *sizes,
        num_warps=config.W,
    )  # fmt: skip
    launch_combine(
        layout, out, lse, splits, sinks, new_key, new_value, inputs, max_tiles=max_tiles, sms=device_chip.sms,
        use_pdl=config.USE_PDL,
    )  # fmt: skip
    return out, lse
