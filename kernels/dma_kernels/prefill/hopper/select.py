"""Selection and configuration of Hopper's prefill kernels. Imports no Gluon."""

from __future__ import annotations

from ...numerics.formats import TILE
from ...numerics.geometry import AttentionGeometry
from ...runtime.chip import MAX_CTAS
from ...runtime.compute_path import ComputePath
from ...runtime.descriptors import is_describable
from ...runtime.operand_formats import E4M3_VALUES, RAW
from ..config import MultiCTAConfig, PrefillShape, WarpSpecializedConfig, multi_cta_config, warp_specialized_config

ROWS = 64
"""Query positions of a warpgroup: the rows of its MMA instructions. They lie in one tile."""


def configure_warp_specialized(shape: PrefillShape, path: ComputePath) -> WarpSpecializedConfig | None:
    """Return the configuration of the warp-specialized kernel for a call; ``None`` if it cannot compute it.

    Head dimensions are multiples of 32 from 64 to 256. Keys of low tiles are in 8 bits with a scale per tile, or
    dequantized; values of low tiles are E4M3 or 16-bit.
    """
    config = warp_specialized_config(shape.arch, path, shape.query.shape[3])
    # Four warpgroups lack registers for both ends of a window (H200: 1.17x the time of the multi-CTA kernel), and for a
    # mask (compiled, not timed).
    is_plain = shape.geometry.window is None and shape.geometry.mask is None
    is_supported = config is not None and (is_plain or config.consumer_warpgroups < 4) and _is_loadable(shape, path)
    return config if is_supported else None


def is_warp_specialized_fastest(shape: PrefillShape, path: ComputePath, config: WarpSpecializedConfig) -> bool:
    """Whether a call is long enough for the warp-specialized kernel, so that the multi-CTA kernel is not faster."""
    geometry = shape.geometry
    batch, heads, q_len, _ = shape.query.shape
    seen = geometry.kv_len if geometry.window is None else min(geometry.kv_len, geometry.window)
    if seen < config.min_keys or batch * heads * q_len < config.min_rows:
        return False
    other = configure_multi_cta(shape, path)
    # The instructions of a softcap or a mask outweigh the gain of warp specialization (H200, 12K with a mask: 3,151 us,
    # multi-CTA kernel 1,947 us).
    is_plain = not shape.has_softcap and geometry.mask is None
    return other is None or (is_plain and _mean_keys(geometry, q_len) > other.max_mean_keys)


def configure_multi_cta(shape: PrefillShape, path: ComputePath) -> MultiCTAConfig | None:
    """Return the configuration of the multi-CTA kernel for a call; ``None`` if it cannot compute it.

    Head dimensions are 64, 96 or 128; values of low tiles are E4M3 or the caller's own.
    """
    is_supported = (
        path.low_value in (E4M3_VALUES, RAW)
        and shape.geometry.query_blocks(shape.query.shape[2], ROWS, ROWS) <= MAX_CTAS
        and _is_loadable(shape, path)
    )
    return multi_cta_config(shape.arch, path, shape.query.shape[3]) if is_supported else None


def is_dense_causal(geometry: AttentionGeometry, q_len: int) -> bool:
    """Whether every query attends to all keys up to its own position, and key 0 begins a tile."""
    is_covered = geometry.q_offset + q_len <= geometry.kv_offset + geometry.kv_len
    is_aligned = geometry.kv_offset % TILE == 0
    return geometry.is_causal and is_covered and is_aligned and geometry.window is None and geometry.seq_info is None


def _mean_keys(geometry: AttentionGeometry, q_len: int) -> float:
    """Return the mean number of keys that a query attends to, if the last one attends to all."""
    if geometry.window is None:
        return geometry.kv_len - q_len / 2 if geometry.is_causal else geometry.kv_len
    return min(geometry.kv_len, geometry.window if geometry.is_causal else 2 * geometry.window)


def _is_loadable(shape: PrefillShape, path: ComputePath) -> bool:
    """Whether TMA can load the operands of both kernels."""
    loaded = [shape.query, shape.value] + ([shape.key] if path.key is RAW else [])
    return (
        not path.is_block_scaled
        and shape.query.shape[3] == shape.value.shape[3]
        and shape.key.numel() > 0
        and all(map(is_describable, loaded))
    )
