"""Which calls Hopper's prefill kernels take, and with which configuration. Imports no Gluon."""

from __future__ import annotations

from ...numerics.formats import TILE
from ...numerics.geometry import AttentionGeometry
from ...runtime.chip import MAX_CTAS
from ...runtime.compute_path import ComputePath
from ...runtime.descriptors import is_describable
from ...runtime.operand_formats import E4M3_VALUES, RAW
from ..config import MultiCTAConfig, PrefillShape, WarpSpecializedConfig, multi_cta_config, warp_specialized_config

WARP_SPECIALIZED_HEAD_DIMS = (64, 96, 128, 160, 192, 224, 256)
"""Queries are quantized in chunks of 32 channels."""
MULTI_CTA_HEAD_DIMS = (64, 96, 128)
ROWS = 64
"""Query positions of a warpgroup: the rows of its matrix instructions. They lie in one tile."""


def supports_warp_specialized(shape: PrefillShape, path: ComputePath) -> bool:
    """Whether the warp-specialized kernel can compute a call.

    Head dimensions are multiples of 32 from 64 to 256. Keys of low tiles are in 8 bits with a scale per tile, or
    dequantized; values of low tiles are E4M3 or 16-bit.
    """
    config = warp_specialized_config(shape.arch, path, shape.query.shape[3], shape.value.shape[3])
    # Four warpgroups have no registers for both ends of a window (H200: 1.17x the time of the multi-CTA kernel), nor
    # for a mask (compiled, not timed).
    is_plain = shape.geometry.window is None and shape.geometry.mask is None
    return (
        config is not None
        and (is_plain or config.consumer_warpgroups < 4)
        and shape.query.shape[3] in WARP_SPECIALIZED_HEAD_DIMS
        and (path.low_value is E4M3_VALUES or is_describable(shape.value))
        and _is_loadable(shape, path)
    )


def select_warp_specialized(shape: PrefillShape, path: ComputePath) -> WarpSpecializedConfig | None:
    """Return the configuration for a long call; ``None`` for one that the multi-CTA kernel computes faster."""
    config = warp_specialized_config(shape.arch, path, shape.query.shape[3], shape.value.shape[3])
    geometry = shape.geometry
    assert config is not None
    batch, heads, q_len, _ = shape.query.shape
    seen = geometry.kv_len if geometry.window is None else min(geometry.kv_len, geometry.window)
    if seen < config.min_keys or batch * heads * q_len < config.min_rows:
        return None
    if not supports_multi_cta(shape, path):
        return config
    other = multi_cta_config(shape.arch, path, shape.query.shape[3], shape.value.shape[3])
    assert other is not None
    # A softcap or a mask takes so many instructions that what warp specialisation saves no longer counts (H200: 12K
    # with a mask take 3,151 us, with the multi-CTA kernel 1,947).
    is_plain = not shape.has_softcap and geometry.mask is None
    return config if is_plain and _mean_keys(geometry, q_len) > other.max_mean_keys else None


def supports_multi_cta(shape: PrefillShape, path: ComputePath) -> bool:
    """Whether the multi-CTA kernel can compute a call.

    Head dimensions are 64, 96 or 128; values of low tiles are E4M3 or the caller's own.
    """
    return (
        multi_cta_config(shape.arch, path, shape.query.shape[3], shape.value.shape[3]) is not None
        and path.low_value in (E4M3_VALUES, RAW)
        and shape.geometry.query_blocks(shape.query.shape[2], ROWS, ROWS) <= MAX_CTAS
        and shape.query.shape[3] in MULTI_CTA_HEAD_DIMS
        and _is_loadable(shape, path)
    )


def select_multi_cta(shape: PrefillShape, path: ComputePath) -> MultiCTAConfig | None:
    """Return the configuration for a call that the warp-specialized kernel leaves."""
    return multi_cta_config(shape.arch, path, shape.query.shape[3], shape.value.shape[3])


def is_dense_causal(geometry: AttentionGeometry, q_len: int) -> bool:
    """Whether every query attends to all keys up to its own position, and key 0 begins a tile."""
    is_covered = geometry.q_offset + q_len <= geometry.kv_offset + geometry.kv_len
    is_aligned = geometry.kv_offset % TILE == 0
    return geometry.is_causal and is_covered and is_aligned and geometry.window is None and geometry.seq_info is None


def _mean_keys(geometry: AttentionGeometry, q_len: int) -> float:
    """Return how many keys a query attends to on average, where the last one attends to all."""
    if geometry.window is None:
        return geometry.kv_len - q_len / 2 if geometry.is_causal else geometry.kv_len
    return min(geometry.kv_len, geometry.window if geometry.is_causal else 2 * geometry.window)


def _is_loadable(shape: PrefillShape, path: ComputePath) -> bool:
    """Whether TMA can load what both kernels load."""
    loaded = [shape.query, shape.value] + ([shape.key] if path.key is RAW else [])
    return (
        not path.is_block_scaled
        and shape.query.shape[3] == shape.value.shape[3]
        and shape.key.numel() > 0
        and all(map(is_describable, loaded))
    )
