"""Host side of the split-KV kernels, which compute short calls: a few queries that continue a sequence.

The grids depend only on shapes, and the work of a CTA on lengths that it reads on the device. So a CUDA graph of a call
can be replayed while a static cache fills, and unused slots of the cache cost nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from ..numerics.geometry import LOG2_E
from ..numerics.layout import Strided
from ..runtime import chip
from ..runtime.launch import launch_kernel
from .config import split_kv_config
from .constants import SplitKVConstants
from .split_kv_kernel import PerRow, Splits, combine_splits_kernel, split_kv_kernel


def launch(
    query: Any, key: Strided, value: Strided, mask: Strided, out: Any, lse: Any, sinks: Any, q_offset: Any,
    kv_offset: Any, kv_range: Any, *, kv_heads: int, kv_len: Any, lead: Any, window: int | None,
    softcap: float | None, scale: float,
) -> None:  # fmt: skip
    """Launch both kernels, for exact causal attention; the first starts after all earlier work.

    Args:
        query: ``[B, Hq, Tq, D]``, 16-bit, any strides.
        key: ``[B, Hkv, Tk, D]``, likewise.
        value: ``[B, Hkv, Tk, Dv]``, likewise.
        mask: Bytes with strides that broadcast to ``[B, Hq, Tq, Tk]``; may be missing.
        out: Output, ``[B, Hq, Tq, Dv]``, unit stride of channels.
        lse: Log of the softmax denominator, fp32 ``[B, Hq, Tq]``, contiguous.
        sinks: Sink logits ``[Hq]``, contiguous, or ``None``.
        q_offset: Positions of query 0, integer ``[B]``, ``[1]`` or ``[]``, or ``None`` if ``lead`` has them.
        kv_offset: Positions of key 0, likewise.
        kv_range: Visible keys, integer ``[B, 2]``, or ``None`` for all.
        kv_heads: ``Hkv``.
        kv_len: ``Tk``.
        lead: Position of query 0 minus that of key 0, with 0 for those in tensors.
        window: Sliding window.
        softcap: Softcap of the scores.
        scale: Scale of the scores.
    """
    (batch, q_heads, q_len, head_dim), value_dim = query.shape, out.shape[3]
    rows = q_heads // kv_heads * q_len
    config = split_kv_config(chip.device_arch(query.device), head_dim, value_dim, rows)
    constants = SplitKVConstants(
        q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, tuning=config,
        use_pdl=chip.supports_pdl(query.device),
    )  # fmt: skip
    m_blocks = triton.cdiv(rows, config.block_m)
    heads, ctas = batch * kv_heads * m_blocks, config.ctas_per_sm * chip.sm_count(query.device)
    split_rows = (ctas + heads) * config.block_m  # a CTA writes a split for each head that it touches
    splits = Splits(
        heads=query.new_empty((heads, 2), dtype=torch.int32),
        out=query.new_empty((split_rows, value_dim), dtype=torch.float32),
        lse=query.new_empty((split_rows,), dtype=torch.float32),
    )
    launch_kernel(
        split_kv_kernel, {"CONFIG": constants}, (ctas, 1, 1),
        Strided.of(query), key, value, mask, splits,
        PerRow.of(q_offset), PerRow.of(kv_offset), PerRow.of(kv_range), lead, q_len, kv_len, window, batch, m_blocks,
        None if softcap is None else softcap * LOG2_E, scale * LOG2_E,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    launch_kernel(
        combine_splits_kernel, {"CONFIG": constants}, (batch * q_heads * q_len, 1, 1),
        splits, sinks, Strided.of(out), lse, q_len, m_blocks, num_warps=4, launch_pdl=constants.use_pdl,
    )  # fmt: skip
