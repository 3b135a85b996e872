"""Host side of the split-KV kernels, which compute short calls: a few queries that continue a sequence.

The grids depend only on shapes, and the work of a CTA on lengths that it reads on the device. So a CUDA graph of a call
can be replayed while a static cache fills, and unused slots of the cache cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..device.softmax import Splits
from ..numerics.geometry import LOG2_E
from ..numerics.layout import Strided
from ..runtime import chip
from ..runtime.launch import launch_kernel
from .config import SplitKVConfig, ValueConstants, split_kv_config
from .operands import new_results
from .split_kv_kernel import PerRow, combine_splits_kernel, split_kv_kernel


@dataclass(frozen=True, kw_only=True)
class SplitKVConstants(ValueConstants):
    """Constexprs of the split-KV kernels."""

    q_heads: int  # query heads
    tuning: SplitKVConfig  # block sizes and stages
    use_pdl: bool  # whether the second launch may start before the first one ends

    @property
    def block_s(self) -> int:
        """Splits that are combined at once: as many as fit in the registers of a CTA."""
        return 8192 // self.block_dv


def attend(
    query: Any, key: Any, value: Any, mask: Any, sinks: Any, q_offset: Any, kv_offset: Any, kv_range: Any,
    lead: Any, kv_len: Any, *strides: Any, window: int | None, softcap: float | None, scale: float, needs_lse: bool,
) -> Any:  # fmt: skip
    """Launch both kernels for a short call of :func:`dma_kernels.attention`; the first starts after all earlier work.

    Arguments are those of the call, in 16 bits, except:

    - ``sinks``: contiguous.
    - ``q_offset``, ``kv_offset``: ``None`` where ``lead`` has the positions.
    - ``lead``: position of query 0 minus that of key 0, with 0 for those in tensors.
    - ``kv_len``: ``Tk``; that of the layouts is meaningless.
    - ``strides``: four each of ``key``, of ``value`` and, if there is one, of ``mask``, which broadcast.
    - ``needs_lse``: whether to return the log-sum-exp, too.
    """
    out, lse = new_results(query, value)
    results = (out, lse) if needs_lse else (out,)
    if not lse.numel():
        return results
    (batch, q_heads, q_len, head_dim), kv_heads, value_dim = query.shape, key.shape[1], value.shape[3]
    rows = q_heads // kv_heads * q_len
    device_chip = chip.of(query.device)
    config = split_kv_config(device_chip.arch, head_dim, value_dim, rows)
    constants = SplitKVConstants(
        q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, tuning=config,
        use_pdl=device_chip.supports_pdl,
    )  # fmt: skip
    m_blocks = triton.cdiv(rows, config.block_m)
    heads, ctas = batch * kv_heads * m_blocks, config.ctas_per_sm * device_chip.sms
    split_rows = (ctas + heads) * config.block_m  # a CTA writes a split for each head that it touches
    splits = Splits(
        heads=query.new_empty((heads, 2), dtype=torch.int32),
        out=query.new_empty((split_rows, value_dim), dtype=torch.float32),
        lse=query.new_empty((split_rows,), dtype=torch.float32),
    )
    launch_kernel(
        split_kv_kernel, {"CONFIG": constants}, (ctas, 1, 1),
        Strided.of(query), Strided(key, *strides[:4]), Strided(value, *strides[4:8]),
        Strided.of(None) if mask is None else Strided(mask.view(torch.uint8), *strides[8:]), splits,
        PerRow.of(q_offset), PerRow.of(kv_offset), PerRow.of(kv_range), lead, q_len, kv_len, window, batch, m_blocks,
        None if softcap is None else softcap * LOG2_E, scale * LOG2_E,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    launch_kernel(
        combine_splits_kernel, {"CONFIG": constants}, (batch * q_heads * q_len, 1, 1),
        splits, sinks, Strided.of(out), lse, q_len, m_blocks, num_warps=4, launch_pdl=constants.use_pdl,
    )  # fmt: skip
    return results
