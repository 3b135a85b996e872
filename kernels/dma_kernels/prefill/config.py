"""What computes a call: the operand formats, the kernel and its configuration. Pure functions, without Triton.

:func:`select_compute_path` chooses the formats in which keys and values are stored and multiplied, and
:func:`select_config` the kernel and its configuration, whose class stands for the kernel.
Constexprs that kernels share are those of :class:`Constants`; each kernel has a subclass beside its launch.

Rejected variants, with timings: ``benchmarks/prefill-portable.md``, ``benchmarks/prefill-warp-specialized.md`` and
``benchmarks/prefill-one-warpgroup.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from ..numerics.call import AttentionCall
from ..numerics.formats import MXFP4, MXFP8, NVFP4, TILE, UNQUANTIZED, SharedScale, padded_channels
from ..numerics.geometry import AttentionGeometry
from ..numerics.layout import is_describable
from ..numerics.recipe import Recipe
from ..numerics.transforms import hadamard_size
from ..runtime.chip import MAX_CTAS, TENSOR_MEMORY_ARCHS, Chip, has_block_scaled_mma
from .operands import DEQUANTIZED, E4M3_VALUES, E5M2, PACKED, RAW, TILE_SCALED, OperandFormat, Scale

ROWS = 64
"""Query positions of a Hopper warpgroup: the rows of its MMA instructions. They lie in one tile."""
L2_BYTES = 8 << 20
"""Bytes of 8-bit keys and values that concurrent CTAs should share. Queries, outputs and the 16-bit KV of high tiles
also pass through Hopper's 50 MB L2 cache."""
WARP_SPECIALIZED_HEAD_DIMS = (64, 96, 128, 160, 192, 224, 256)
"""Queries are quantized in chunks of 32 channels."""
ONE_WARPGROUP_HEAD_DIMS = (64, 96, 128)


@dataclass(frozen=True)
class ComputePath:
    """The formats of keys and values in which a recipe runs on a chip.

    ``8bit``
        8-bit elements in low tiles, on INT8 or FP8 tensor cores. One descale per query row and one per key tile, so
        scores need none of their own. Exact for MXINT8 and MXFP8 with ``shared_scale = "tile"``, and for MXFP4 in E5M2.
    ``scaled``
        MXFP4, MXFP8 and NVFP4 elements and block scales, on block-scaled tensor cores.
    ``portable``
        Operands dequantized to 16 bits, which is exact, and multiplied in 16 bits.
    """

    key: OperandFormat  # keys of high tiles, whose values are always ``RAW``
    low_key: OperandFormat | None = None  # keys of low tiles; ``None`` for a recipe of one precision
    low_value: OperandFormat | None = None  # values of low tiles; ``None`` for a recipe of one precision

    @property
    def name(self) -> str:
        """``8bit``, ``scaled`` or ``portable``."""
        if self.low_key is not None and self.low_key.scale is Scale.TILE:
            return "8bit"
        return "scaled" if self.is_block_scaled else "portable"

    @property
    def is_block_scaled(self) -> bool:
        """Whether keys are multiplied on block-scaled tensor cores."""
        return Scale.BLOCK in (self.key.scale, (self.low_key or self.key).scale)


@dataclass(frozen=True)
class PortableConfig:
    """Configuration of the portable kernel."""

    kernel: ClassVar[str] = "portable"  # name of the kernel in reports
    block_m: int  # query positions of a CTA; divides 128
    block_n: int  # keys of a step in the loops over low tiles; divides 128
    num_warps: int  # warps of a CTA
    num_stages: int  # pipeline stages of the loop over full low tiles
    max_registers: int | None = None  # limit per thread; ``None`` for no limit
    high_block_n: int = 64  # keys of a step in the loop over high tiles; divides 128
    high_stages: int = 1  # pipeline stages of that loop
    stage_queries: bool = False  # whether the queries of low tiles pass through memory, see the kernel


@dataclass(frozen=True)
class SplitKVConfig:
    """Configuration of the split-KV kernel."""

    block_m: int  # rows of a block: pairs of query head and position of a kv head
    block_n: int  # keys of a step
    num_warps: int  # warps of a CTA
    num_stages: int  # pipeline stages of keys and values
    ctas_per_sm: int  # CTAs of the grid per SM


@dataclass(frozen=True)
class WarpSpecializedConfig:
    """Configuration of Hopper's warp-specialized kernel, and which calls are long enough for it."""

    kernel: ClassVar[str] = "warp-specialized"  # name of the kernel in reports
    consumer_warpgroups: int  # consumer warpgroups, of 64 query positions each
    stages: int  # pipeline stages of keys and values
    registers: int  # registers per thread of each consumer except the first, which gets the rest
    min_keys: int  # fewest keys of a call
    min_rows: int  # fewest query rows of all heads and batch rows


@dataclass(frozen=True)
class OneWarpgroupConfig:
    """Configuration of Hopper's one-warpgroup kernel, which runs several CTAs per SM."""

    kernel: ClassVar[str] = "one-warpgroup"  # name of the kernel in reports
    value_stages: int  # pipeline stages of values, 1 or 2
    registers: int  # registers per thread
    # most keys that a query attends to on average, in calls that are long enough for the warp-specialized kernel
    max_mean_keys: int


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constexprs of every prefill kernel, which takes one object that holds all of its constexprs.

    A *form* names an operand format (:mod:`dma_kernels.prefill.operands`), a *format* a number format. Triton 3.6
    cannot pass their strings to functions, so kernels first assign each to a ``constexpr``.
    """

    kv_heads: int  # kv heads
    head_dim: int  # channels of queries and keys
    rotate: bool = False  # whether the kernel rotates queries or keys

    @property
    def block_d(self) -> int:
        """``head_dim`` padded."""
        return padded_channels(self.head_dim)

    @property
    def hadamard_size(self) -> int:
        """Order of the rotation's blocks; 0 without rotation."""
        return hadamard_size(self.head_dim) if self.rotate else 0

    @property
    def norm(self) -> float:
        """The scale of the rotation, which makes it orthonormal."""
        return math.pow(self.hadamard_size, -0.5) if self.rotate else 1.0


@dataclass(frozen=True, kw_only=True)
class ValueConstants(Constants):
    """Constexprs of kernels whose values may have other channels than keys."""

    value_dim: int  # channels of values

    @property
    def block_dv(self) -> int:
        """``value_dim`` padded."""
        return padded_channels(self.value_dim)


def select_compute_path(recipe: Recipe, arch: int, channels: int = 128) -> ComputePath:
    """Return how a chip of compute capability ``arch`` (90 is Hopper) computes a recipe.

    ``channels`` is the larger head dimension of keys and values.
    """
    is_block_scaled = has_block_scaled_mma(arch, channels)
    key = RAW if recipe.high == UNQUANTIZED else DEQUANTIZED
    if is_block_scaled:
        key = PACKED.get(recipe.high, key)
    if recipe.is_uniform and recipe.skip_threshold is None:  # all tiles are computed as high ones
        return ComputePath(key)
    formats, low_key = {recipe.query_low, recipe.key_low}, DEQUANTIZED
    tile_scaled = [x for x in TILE_SCALED if formats == {x.holds} and arch >= x.min_arch]
    if recipe.shared_scale == SharedScale.TILE and tile_scaled:
        low_key = tile_scaled[0]
    elif is_block_scaled and (formats <= {MXFP4.name, MXFP8.name} or formats == {NVFP4.name}):
        low_key = PACKED[recipe.key_low]
    elif formats == {E5M2.holds} and arch >= E5M2.min_arch:
        low_key = E5M2
    low_value = RAW
    if recipe.pv == E4M3_VALUES.holds:
        low_value = E4M3_VALUES if arch >= E4M3_VALUES.min_arch else DEQUANTIZED
    return ComputePath(key, low_key, low_value)


def select_config(
    call: AttentionCall, geometry: AttentionGeometry, path: ComputePath, chip: Chip
) -> WarpSpecializedConfig | OneWarpgroupConfig | PortableConfig:
    """Return the configuration of the fastest kernel that computes a call."""
    if not chip.is_interpreted:
        one_warpgroup = configure_one_warpgroup(call, geometry, path, chip)
        warp_specialized = configure_warp_specialized(call, geometry, path, chip)
        if warp_specialized is not None and _is_fastest(warp_specialized, one_warpgroup, call, geometry):
            return warp_specialized
        if one_warpgroup is not None:
            return one_warpgroup
    head_dim, value_dim = call.query.shape[3], call.value.shape[3]
    return portable_config(chip.arch, path, head_dim, value_dim, has_softcap=call.softcap is not None)


def configure_warp_specialized(
    call: AttentionCall, geometry: AttentionGeometry, path: ComputePath, chip: Chip
) -> WarpSpecializedConfig | None:
    """Return the configuration of the warp-specialized kernel for a call; ``None`` if it cannot compute it.

    Head dimensions are multiples of 32 from 64 to 256. Keys of low tiles are in 8 bits with a scale per tile, or
    dequantized; values of low tiles are E4M3 or 16-bit.
    """
    config = warp_specialized_config(chip.arch, path, call.query.shape[3])
    # Four warpgroups lack registers for both ends of a window (H200: 1.17x the time of the one-warpgroup kernel), and
    # for a mask (compiled, not timed).
    is_plain = geometry.window is None and geometry.mask is None
    is_supported = config is not None and (is_plain or config.consumer_warpgroups < 4) and _is_loadable(call, path)
    return config if is_supported else None


def _is_fastest(
    config: WarpSpecializedConfig,
    one_warpgroup: OneWarpgroupConfig | None,
    call: AttentionCall,
    geometry: AttentionGeometry,
) -> bool:
    """Whether a call is long enough for the warp-specialized kernel, so that the one-warpgroup kernel is not faster."""
    batch, heads, q_len, _ = call.query.shape
    seen = geometry.kv_len if geometry.window is None else min(geometry.kv_len, geometry.window)
    if seen < config.min_keys or batch * heads * q_len < config.min_rows:
        return False
    # The instructions of a softcap or a mask outweigh the gain of warp specialization (H200, 12K with a mask: 3,151 us,
    # one-warpgroup kernel 1,947 us).
    is_plain = call.softcap is None and geometry.mask is None
    if one_warpgroup is None or not is_plain:
        return one_warpgroup is None
    # The mean number of keys that a query attends to, if the last one attends to all.
    if geometry.window is None:
        mean_keys = geometry.kv_len - q_len / 2 if geometry.is_causal else geometry.kv_len
    else:
        mean_keys = min(geometry.kv_len, geometry.window if geometry.is_causal else 2 * geometry.window)
    return mean_keys > one_warpgroup.max_mean_keys


def configure_one_warpgroup(
    call: AttentionCall, geometry: AttentionGeometry, path: ComputePath, chip: Chip
) -> OneWarpgroupConfig | None:
    """Return the configuration of the one-warpgroup kernel for a call; ``None`` if it cannot compute it.

    Head dimensions are 64, 96 or 128; values of low tiles are E4M3 or the caller's own.
    """
    is_supported = (
        path.low_value in (E4M3_VALUES, RAW)
        and geometry.query_blocks(call.query.shape[2], ROWS, ROWS) <= MAX_CTAS
        and _is_loadable(call, path)
    )
    return one_warpgroup_config(chip.arch, path, call.query.shape[3]) if is_supported else None


def is_dense_causal(geometry: AttentionGeometry, q_len: int) -> bool:
    """Whether every query attends to all keys up to its own position, and key 0 begins a tile."""
    is_covered = geometry.q_offset + q_len <= geometry.kv_offset + geometry.kv_len
    is_aligned = geometry.kv_offset % TILE == 0
    return geometry.is_causal and is_covered and is_aligned and geometry.window is None and geometry.seq_info is None


def _is_loadable(call: AttentionCall, path: ComputePath) -> bool:
    """Whether TMA can load the operands of both kernels."""
    loaded = [call.query, call.value] + ([call.key] if path.key is RAW else [])
    return (
        not path.is_block_scaled
        and call.query.shape[3] == call.value.shape[3]
        and call.key.numel() > 0
        and all(map(is_describable, loaded))
    )


def portable_config(
    arch: int, path: ComputePath, head_dim: int, value_dim: int, *, has_softcap: bool = False
) -> PortableConfig:
    """Return the configuration of the portable kernel for a compute capability ``arch`` (90 is Hopper).

    A softcap takes registers.
    """
    widest = padded_channels(max(head_dim, value_dim))
    is_hopper = arch == 90
    is_packed = path.is_block_scaled
    are_keys_8bit = path.low_key not in (None, DEQUANTIZED)
    are_values_8bit = path.low_value is E4M3_VALUES
    if arch in TENSOR_MEMORY_ARCHS and widest > 128:
        # 128 rows of 256 channels take half of tensor memory. With scores and operands, most formats do not fit.
        return PortableConfig(64, 64, num_warps=8, num_stages=2)
    if is_packed and arch in TENSOR_MEMORY_ARCHS:
        # Block-scaled MMAs have 128 rows; 4 warps would spill registers (compiled).
        return PortableConfig(128, 128, num_warps=8, num_stages=2)
    if widest <= 128 and is_hopper and (are_keys_8bit or are_values_8bit):
        # Several CTAs share an SM: one computes its softmax while another uses the tensor cores (H200, Triton 3.6).
        config = PortableConfig(64, 128, num_warps=4, num_stages=2, high_stages=2, stage_queries=True)
        if has_softcap or not (are_keys_8bit and are_values_8bit):
            return config  # a softcap would spill under a register limit (compiled)
        # The register limit makes room for a third (head_dim 64: a fourth) CTA.
        if widest == 128:
            return replace(config, max_registers=168, high_stages=1)
        return replace(config, max_registers=128, num_stages=3, high_block_n=32)
    if widest <= 128 and is_hopper and path.low_key is DEQUANTIZED:
        if widest == 128 and not has_softcap:
            # Blocks of 64 queries would double L2 reads; the register limit lets two CTAs share an SM.
            return PortableConfig(128, 64, 8, num_stages=2, max_registers=128, stage_queries=True)
        # With a softcap, high tiles of 64 keys would make the loop over low tiles spill (compiled).
        return PortableConfig(
            64, 64 if widest == 128 else 128, 4, num_stages=3, high_block_n=32 if has_softcap else 64, high_stages=2,
            stage_queries=True,
        )  # fmt: skip
    if widest <= 128 and arch > 90 and are_keys_8bit and are_values_8bit:
        return PortableConfig(64, 128, num_warps=4, num_stages=2 if widest == 128 else 3)
    if widest <= 128 and arch >= 90 and path.low_key is None:
        # All tiles are high, so only their loop matters.
        return PortableConfig(64, 64, num_warps=4, num_stages=2, high_stages=2)
    if widest <= 64:
        return PortableConfig(64, 128, num_warps=4, num_stages=2)
    if widest <= 128:
        # 16-bit operands take twice the shared memory.
        return PortableConfig(64, 64, num_warps=4, num_stages=2)
    # The output of 256 channels takes half of Hopper's registers.
    if is_hopper and are_values_8bit:
        return PortableConfig(64, 128, num_warps=8, num_stages=2, stage_queries=True)  # fastest of six (H200)
    if is_hopper and are_keys_8bit:
        return PortableConfig(64, 64, num_warps=4, num_stages=2, stage_queries=True)  # fastest although it spills
    if is_hopper:
        return PortableConfig(128, 64, num_warps=8, num_stages=2, stage_queries=True)
    if arch == 80:
        # Fewest spills in the loop over low tiles (compiled, not timed).
        return PortableConfig(128, 32, num_warps=8, num_stages=2, high_block_n=16, stage_queries=True)
    # Consumer chips have 99 KB of shared memory; 16-bit and block-scaled operands spill with 4 warps (compiled).
    num_warps = 4 if are_keys_8bit and are_values_8bit and not is_packed else 8
    return PortableConfig(64, 32, num_warps=num_warps, num_stages=1, high_block_n=32, stage_queries=num_warps == 8)


def split_kv_config(arch: int, head_dim: int, value_dim: int, rows: int) -> SplitKVConfig:
    """Return the configuration of the split-KV kernel for ``rows`` pairs of query head and position of a kv head."""
    widest = padded_channels(max(head_dim, value_dim))
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    # Two CTAs of consumer chips share 99 KB of shared memory.
    has_room = (arch == 80 or arch == 90 or arch in TENSOR_MEMORY_ARCHS) and (block_m < 64 or widest <= 128)
    return SplitKVConfig(
        block_m=block_m,
        block_n=64 if widest <= 128 else 32,
        num_warps=8 if block_m == 64 and widest > 64 else 4,
        num_stages=3 if has_room or widest <= 64 else 2,
        ctas_per_sm=2,
    )


def one_warpgroup_config(arch: int, path: ComputePath, head_dim: int) -> OneWarpgroupConfig | None:
    """Return the configuration of the one-warpgroup kernel; ``None`` if there is none."""
    if arch != 90 or head_dim not in ONE_WARPGROUP_HEAD_DIMS or path.low_key is None:
        return None
    if head_dim == 64:
        return OneWarpgroupConfig(value_stages=2, registers=128, max_mean_keys=7_168)  # four CTAs per SM
    are_keys_8bit, are_values_8bit = path.low_key is not DEQUANTIZED, path.low_value is E4M3_VALUES
    # Three CTAs per SM. Faster than the warp-specialized kernel up to this many keys (H200, Triton 3.6).
    max_mean_keys = {2: 4_096, 1: 2_560, 0: 1_536}[are_keys_8bit + are_values_8bit]
    return OneWarpgroupConfig(value_stages=1, registers=168, max_mean_keys=max_mean_keys)


def warp_specialized_config(arch: int, path: ComputePath, head_dim: int) -> WarpSpecializedConfig | None:
    """Return the configuration of the warp-specialized kernel; ``None`` if there is none."""
    if arch != 90 or head_dim not in WARP_SPECIALIZED_HEAD_DIMS or path.low_key is None:
        return None
    are_keys_8bit, are_values_8bit = path.low_key is not DEQUANTIZED, path.low_value is E4M3_VALUES
    if head_dim > 128:
        if not (are_keys_8bit and are_values_8bit):
            return None
        # The output takes 128 registers per thread, so two consumer warpgroups fit. It pays from 1K keys (H200).
        return WarpSpecializedConfig(2, stages=2, registers=240, min_keys=1_024, min_rows=16_384)
    if head_dim == 64 and are_keys_8bit and are_values_8bit:
        # The output takes half the registers, so four fit: 16K takes 1,923 us, with three 2,061 us (H200).
        return WarpSpecializedConfig(4, stages=4, registers=112, min_keys=4_096, min_rows=32 * 8_192)
    if head_dim == 64 and are_keys_8bit:
        return None  # the one-warpgroup kernel is faster at any length
    # As many stages as fit in shared memory at 128 channels.
    stages = {(True, True): 4, (True, False): 3, (False, True): 3, (False, False): 2}[are_keys_8bit, are_values_8bit]
    # One CTA fills an SM, so it needs long rows to hide its prologue and epilogue.
    min_rows = 32 * (8_192 if are_keys_8bit and are_values_8bit else 4_096)
    return WarpSpecializedConfig(3, stages=stages, registers=160, min_keys=4_096, min_rows=min_rows)


def select_swizzle_group(kv_heads: int, bytes_per_head: int) -> int:
    """Return the number of kv heads, of the ``kv_heads`` of all batch rows, per L2 swizzle group.

    As many as fit in the L2 cache. In a group the longest rows go first, so SMs idle only at the end of the last group.
    """
    return max(1, min(kv_heads, L2_BYTES // max(1, bytes_per_head)))
