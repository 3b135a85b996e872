"""Quantise the keys and values of a call, for every compute path, in one launch.

What depends on other tiles (the mean key, scales of E4M3 values, NVFP4's global scale) comes from the first tile, which
every CTA reads itself. Inputs may have any strides; nothing is copied beforehand.

Results equal :mod:`dma_kernels.numerics.quantize` bit for bit, given the same mean key: a sum of up to 128 numbers in
another order, rounded to bfloat16. Design: ``benchmarks/quantizer.md``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..numerics.formats import NVFP4, TILE, padded_channels
from ..numerics.recipe import Recipe
from ..numerics.saturation import saturation_counter
from ..numerics.transforms import hadamard_size
from ..runtime import chip
from ..runtime.compute_path import ComputePath
from ..runtime.descriptors import Strided
from ..runtime.launch import Launcher
from ..runtime.operand_formats import DEQUANTIZED, E5M2, RAW, TILE_SCALED, OperandFormat, Scale, dequantized_dtype
from .operands import Operands, TileOperands
from .quantizer_kernel import quantize_kernel

NONE = "none"
CTAS_PER_SM = 3
"""As many as fit with 80 registers a thread; they loop over tiles."""


def quantize_keys_values(
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    path: ComputePath,
    *,
    kv_offset: int,
    seq_info: Tensor | None,
    low_tiles: range | None = None,
) -> Operands:
    """Write the key and value operands of a call; zeros in place of keys and values that no query can attend to.

    Args:
        key: 16-bit ``[B, Hkv, Tk, D]``, any strides.
        value: 16-bit ``[B, Hkv, Tk, Dv]``, any strides.
        recipe: The precisions.
        path: Their operand formats.
        kv_offset: Position of key 0, where ``seq_info`` is ``None``.
        seq_info: int32 ``[B, 4]``: for each batch row the positions of query 0 and key 0, the first visible key and the
            one past the last.
        low_tiles: Tiles of tile-padded storage that are low for some query; ``None`` for all. Where high tiles read the
            caller's own keys, only these are written.

    Returns:
        The operands, without ``query_global_scale``.
    """
    batch, heads, kv_len, head_dim = key.shape
    quantizer = _quantizer(
        recipe, path, key.dtype, heads, head_dim, value.shape[3], seq_info is not None, chip.supports_pdl(key.device)
    )
    # Per-row offsets are read on the device: up to 127 entries before a row stay empty.
    first = kv_offset % TILE if seq_info is None else TILE - 1
    tiles = max(1, -(-(kv_len + first) // TILE))
    valid = low_tiles if low_tiles is not None and path.key is RAW else range(tiles)
    made = {
        name: key.new_empty(output.size(batch, heads, tiles), dtype=output.dtype) for name, output in quantizer.outputs
    }
    if quantizer.launch is not None:
        sizes = (kv_offset, kv_len, tiles, valid.start, valid.stop)
        share = CTAS_PER_SM * chip.sm_count(key.device) // max(1, batch * heads * quantizer.layers)
        ctas = max(1, min(len(valid), share))
        outputs = *map(made.get, _KERNEL_OUTPUTS), saturation_counter() if "value" in made else None
        grid = (batch * heads, ctas, quantizer.layers)
        quantizer.launch(grid, Strided.of(key), Strided.of(value), seq_info, *outputs, *sizes)
    return _operands(key, value, path, tiles, valid, made)


@dataclass(frozen=True)
class _Output:
    """Shape and dtype of a tensor that the kernels write, ``[B, Hkv, *shape]`` or, by tile, ``[B, Hkv, S, *shape]``.

    Attributes:
        shape: What follows the kv head, or the ``rows_per_tile`` entries of each tile.
        dtype: Of the tensor.
        rows_per_tile: Entries for each tile; 0 where there is no such dimension.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows_per_tile: int = 0

    def size(self, batch: int, heads: int, tiles: int) -> tuple[int, ...]:
        """Return the shape for storage of so many tiles."""
        if self.rows_per_tile == 0:
            return (batch, heads, *self.shape)
        return (batch, heads, tiles * self.rows_per_tile, *self.shape)


# The tensors that the kernel writes, in the order of its parameters.
_KERNEL_OUTPUTS = (
    "mean", "high", "high_scale", "low", "low_scale", "key_descale", "key_global_scale", "value", "value_descale",
)  # fmt: skip


@dataclass(frozen=True)
class _Quantizer:
    """What does not depend on lengths: the launcher, ``None`` if nothing is written, and the outputs by name."""

    launch: Launcher | None
    layers: int
    outputs: tuple[tuple[str, _Output], ...]


@functools.lru_cache(maxsize=256)
def _quantizer(
    recipe: Recipe,
    path: ComputePath,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    value_dim: int,
    has_seq_info: bool,
    use_pdl: bool,
) -> _Quantizer:
    outputs = _outputs(recipe, path, dtype, head_dim, value_dim)
    writes_keys = "high" in outputs or "low" in outputs
    writes_values = "value" in outputs
    if not (writes_keys or writes_values):
        return _Quantizer(None, layers=0, outputs=())
    size = hadamard_size(head_dim)
    constants: dict[str, Any] = {
        "KV_HEADS": heads,
        "D": head_dim,
        "DV": value_dim,
        "BLOCK_D": padded_channels(head_dim),
        "BLOCK_DV": padded_channels(value_dim),
        "HAS_SEQ_INFO": has_seq_info,
        "HAS_MEAN": "mean" in outputs,
        "HAS_KEY_GLOBAL_SCALE": "key_global_scale" in outputs,
        "ROTATE": recipe.rotate,
        "HADAMARD_SIZE": size,
        "NORM": math.pow(size, -0.5),
        "HIGH_FORM": path.key.name,
        "HIGH_FORMAT": recipe.high,
        "LOW_FORM": NONE if path.low_key is None else path.low_key.name,
        "LOW_FORMAT": recipe.key_low,
        "IS_TILE_SCALED": path.low_key in TILE_SCALED,
        "SHARED": recipe.shared_scale,
        "VALUE_FORM": (path.low_value or RAW).name,
        "ROUNDING": recipe.scale_rounding,
        "USE_PDL": use_pdl,
    }
    is_wide = max(head_dim, value_dim) > 128
    options: dict[str, Any] = {"num_warps": 8}
    if path.low_key in TILE_SCALED:
        # A thread holds 64 numbers of a tile. The cap on registers makes room for CTAS_PER_SM.
        options = {"num_warps": 16} if is_wide else {"num_warps": 8, "maxnreg": 80}
    elif path.low_key is E5M2 and not recipe.rotate and not is_wide:
        # Less time for 8 x 4K tokens than with 8 warps (H200).
        options = {"num_warps": 16}
    return _Quantizer(
        launch=Launcher(quantize_kernel, constants, **options),
        layers=int(writes_values) + int(writes_keys),
        outputs=tuple(outputs.items()),
    )


def _outputs(
    recipe: Recipe, path: ComputePath, dtype: torch.dtype, head_dim: int, value_dim: int
) -> dict[str, _Output]:
    """Return what the kernel writes, by the names of its parameters."""
    outputs: dict[str, _Output] = {}
    if recipe.smooth_k:
        outputs["mean"] = _Output((head_dim,), torch.float32)
    if path.key is not RAW:
        outputs |= _key_outputs("high", path.key, head_dim, dequantized_dtype(dtype, recipe.high, recipe.high))
    if path.low_key is not None:
        target = dequantized_dtype(dtype, recipe.query_low, recipe.key_low)
        outputs |= _key_outputs("low", path.low_key, head_dim, target)
    if ("high" in outputs and recipe.high == NVFP4.name) or ("low" in outputs and recipe.key_low == NVFP4.name):
        outputs["key_global_scale"] = _Output((), torch.float32)
    if path.low_value is DEQUANTIZED:
        outputs["value"] = _Output((value_dim,), torch.bfloat16, rows_per_tile=TILE)
    elif path.low_value is not None and path.low_value.dtype is not None:
        outputs["value"] = _Output((value_dim, TILE), path.low_value.dtype, rows_per_tile=1)
        outputs["value_descale"] = _Output((value_dim,), torch.float32)
    return outputs


def _key_outputs(name: str, format: OperandFormat, head_dim: int, dequantized: torch.dtype) -> dict[str, _Output]:
    """Return the outputs of keys in one format."""
    elements = _Output((format.stored_channels(head_dim),), format.dtype or dequantized, rows_per_tile=TILE)
    outputs = {name: elements}
    if format.scale is Scale.TILE:
        outputs["key_descale"] = _Output((), torch.float32, rows_per_tile=1)
    elif format.scale_dtype is not None:
        blocks = format.padded(head_dim) // format.padding
        outputs[f"{name}_scale"] = _Output((blocks,), format.scale_dtype, rows_per_tile=TILE)
    return outputs


def _operands(
    key: Tensor,
    value: Tensor,
    path: ComputePath,
    tiles: int,
    valid: range,
    made: dict[str, Tensor],
) -> Operands:
    key_global_scale = made.get("key_global_scale")
    if key_global_scale is not None:
        batch, heads = key_global_scale.shape
        key_global_scale = key_global_scale.as_strided((batch, heads, tiles), (heads, 1, 0))

    def tile_operands(name: str, key_format: OperandFormat, value_format: OperandFormat) -> TileOperands:
        descale = made.get("key_descale") if key_format.scale is Scale.TILE else None
        if key_format.holds == NVFP4.name:
            descale = key_global_scale
        return TileOperands(
            key=made.get(name, key),
            value=value if value_format is RAW else made["value"],
            key_format=key_format,
            value_format=value_format,
            key_scale=made.get(f"{name}_scale"),
            key_descale=descale,
            value_descale=made.get("value_descale") if value_format.scale is Scale.CHANNEL else None,
        )

    high = tile_operands("high", path.key, RAW)
    low = None
    if path.low_key is not None and path.low_value is not None:
        low = tile_operands("low", path.low_key, path.low_value)
    return Operands(high=high, low=low, key_mean=made.get("mean"), valid_tiles=valid)
