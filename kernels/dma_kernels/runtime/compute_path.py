"""The compute path of a recipe on a chip: the operand formats in which keys and values are stored and multiplied.

``8bit``
    8-bit elements in low tiles, on INT8 or FP8 tensor cores. One descale per query row and one per key tile, so scores
    need none of their own. Exact for MXINT8 and MXFP8 with ``shared_scale = "tile"``, and for MXFP4 in E5M2.
``scaled``
    MXFP4, MXFP8 and NVFP4 elements and block scales, on block-scaled tensor cores.
``portable``
    Operands dequantized to 16 bits, which is exact, and multiplied in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..numerics.formats import MXFP4, MXFP8, NVFP4, UNQUANTIZED, SharedScale
from ..numerics.recipe import Recipe
from .chip import has_block_scaled_mma
from .operand_formats import DEQUANTIZED, E4M3_VALUES, E5M2, PACKED, RAW, TILE_SCALED, OperandFormat, Scale


@dataclass(frozen=True)
class ComputePath:
    """How a recipe runs on a chip."""

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
        return any(key is not None and key.scale is Scale.BLOCK for key in (self.key, self.low_key))


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
    low_value = RAW
    if recipe.pv == E4M3_VALUES.holds:
        low_value = E4M3_VALUES if arch >= E4M3_VALUES.min_arch else DEQUANTIZED
    return ComputePath(key, _low_key(recipe, arch, is_block_scaled), low_value)


def _low_key(recipe: Recipe, arch: int, is_block_scaled: bool) -> OperandFormat:
    formats = {recipe.query_low, recipe.key_low}
    if recipe.shared_scale == SharedScale.TILE:
        for candidate in TILE_SCALED:
            if formats == {candidate.holds} and arch >= candidate.min_arch:
                return candidate
    if is_block_scaled and (formats <= {MXFP4.name, MXFP8.name} or formats == {NVFP4.name}):
        return PACKED[recipe.key_low]
    if formats == {E5M2.holds} and arch >= E5M2.min_arch:
        return E5M2
    return DEQUANTIZED
