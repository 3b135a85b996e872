"""Fused quantiser: the key and value operands of every path, in one Triton launch.

What a tile must know of others (``smooth_k``, values of ``pv = "fp8"``, NVFP4) is a matter of the first tile, which
every program reads beside its own. Inputs may have any strides; nothing is copied beforehand.

Results equal :mod:`dma_kernels.numerics.quantize` to the bit, given the same mean key. That mean is a sum of up to 128
numbers in another order, rounded to bfloat16.
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
from ..runtime.launch import Launcher
from ..runtime.operand_formats import DEQUANTIZED, E5M2, RAW, TILE_SCALED, OperandFormat, Scale, dequantized_dtype
from .operands import Operands, TileOperands
from .quantizer_kernel import quantize_kernel

NONE = "none"
PROGRAMS = 3
"""For each multiprocessor; they go through tiles until all are done. ``balanced`` on an H200 (PyTorch 2.11, Triton
3.6), keys and values of 8 kv heads of 128, 8K and 8 x 4K tokens, 80 registers: with two 27.3 and 89.5 us, three 25.7
and 76.1, four 28.9 and 87.2, six 28.3 and 75.1, eight 32.0 and 81.4; with 112 registers two 25.8 and 82.1, four 25.3
and 74.1. A copy of as many bytes takes 15.7 and 49."""


def quantize_keys_values(
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    path: ComputePath,
    *,
    kv_offset: int,
    rows: Tensor | None,
    low_tiles: range | None = None,
) -> Operands:
    """Write the key and value operands of a call. What no query can see is zeros in the tiles that are written.

    Args:
        key: 16-bit ``[B, Hkv, Tk, D]``, any strides.
        value: 16-bit ``[B, Hkv, Tk, Dv]``, any strides.
        recipe: The precisions.
        path: Their forms.
        kv_offset: Position of key 0, where ``rows`` is ``None``.
        rows: int32 ``[B, 4]``: for each batch row the positions of query 0 and key 0, the first visible key and the
            one past the last.
        low_tiles: Tiles of aligned storage that a query may see as low ones; ``None`` for all. Where high tiles read
            the caller's own keys, only these are written.

    Returns:
        The operands, without ``query_factor``.
    """
    batch, heads, kv_len, head_dim = key.shape
    plan = _plan(
        recipe, path, key.dtype, heads, head_dim, value.shape[3], rows is not None, chip.starts_early(key.device)
    )
    # Where a row starts inside its first tile is known on the device alone: up to 127 entries stay empty before it.
    first = kv_offset % TILE if rows is None else TILE - 1
    tiles = max(1, -(-(kv_len + first) // TILE))
    valid = low_tiles if low_tiles is not None and path.key is RAW else range(tiles)
    made = {name: key.new_empty(output.size(batch, heads, tiles), dtype=output.dtype) for name, output in plan.outputs}
    if plan.launch is not None:
        sizes = (*key.stride(), *value.stride(), kv_offset, kv_len, tiles, valid.start, valid.stop)
        share = PROGRAMS * chip.processors(key.device) // max(1, batch * heads * plan.layers)
        programs = max(1, min(len(valid), share))
        outputs = *map(made.get, _WRITTEN), saturation_counter() if "value" in made else None
        plan.launch((batch * heads, programs, plan.layers), key, value, rows, *outputs, *sizes)
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


# The tensors that the kernel writes, in its order.
_WRITTEN = (
    "mean", "high", "high_scale", "low", "low_scale", "key_factor", "head_factor", "value", "value_factor",
)  # fmt: skip


@dataclass(frozen=True)
class _Plan:
    """What does not depend on lengths: the launch, ``None`` if nothing is written, and the outputs by name."""

    launch: Launcher | None
    layers: int
    outputs: tuple[tuple[str, _Output], ...]


@functools.lru_cache(maxsize=256)
def _plan(
    recipe: Recipe,
    path: ComputePath,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    value_dim: int,
    has_rows: bool,
    is_early: bool,
) -> _Plan:
    outputs = _outputs(recipe, path, dtype, head_dim, value_dim)
    writes_keys = "high" in outputs or "low" in outputs
    writes_values = "value" in outputs
    if not (writes_keys or writes_values):
        return _Plan(None, layers=0, outputs=())
    size = hadamard_size(head_dim)
    constants: dict[str, Any] = {
        "KV_HEADS": heads,
        "D": head_dim,
        "DV": value_dim,
        "BLOCK_D": padded_channels(head_dim),
        "BLOCK_DV": padded_channels(value_dim),
        "HAS_ROWS": has_rows,
        "HAS_MEAN": "mean" in outputs,
        "HAS_KEY_HEAD": "head_factor" in outputs,
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
        "IS_EARLY": is_early,
    }
    is_wide = max(head_dim, value_dim) > 128
    options: dict[str, Any] = {"num_warps": 8}
    if path.low_key in TILE_SCALED:
        # Of a tile of keys a thread has 64 numbers. The cap makes room for three programs: PROGRAMS has the times.
        options = {"num_warps": 16} if is_wide else {"num_warps": 8, "maxnreg": 80}
    elif path.low_key is E5M2 and not recipe.rotate and not is_wide:
        # MXFP4 and MXFP8 keys, 8 kv heads of 128, 8K and 8 x 4K tokens: 20.0 and 69.0 us on an H200, with 8 warps 21.9
        # and 86.8.
        options = {"num_warps": 16}
    return _Plan(
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
        outputs["head_factor"] = _Output((), torch.float32)
    if path.low_value is DEQUANTIZED:
        outputs["value"] = _Output((value_dim,), torch.bfloat16, rows_per_tile=TILE)
    elif path.low_value is not None and path.low_value.dtype is not None:
        outputs["value"] = _Output((value_dim, TILE), path.low_value.dtype, rows_per_tile=1)
        outputs["value_factor"] = _Output((value_dim,), torch.float32)
    return outputs


def _key_outputs(name: str, format: OperandFormat, head_dim: int, dequantized: torch.dtype) -> dict[str, _Output]:
    """Return the outputs of keys in one format."""
    elements = _Output((format.stored_channels(head_dim),), format.dtype or dequantized, rows_per_tile=TILE)
    outputs = {name: elements}
    if format.scale is Scale.TILE:
        outputs["key_factor"] = _Output((), torch.float32, rows_per_tile=1)
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
    head_factor = made.get("head_factor")
    if head_factor is not None:
        batch, heads = head_factor.shape
        head_factor = head_factor.as_strided((batch, heads, tiles), (heads, 1, 0))

    def tile_operands(name: str, key_format: OperandFormat, value_format: OperandFormat) -> TileOperands:
        factor = made.get("key_factor") if key_format.scale is Scale.TILE else None
        if key_format.holds == NVFP4.name:
            factor = head_factor
        return TileOperands(
            key=made.get(name, key),
            value=value if value_format is RAW else made["value"],
            key_format=key_format,
            value_format=value_format,
            key_scale=made.get(f"{name}_scale"),
            key_factor=factor,
            value_factor=made.get("value_factor") if value_format.scale is Scale.CHANNEL else None,
        )

    high = tile_operands("high", path.key, RAW)
    low = None
    if path.low_key is not None and path.low_value is not None:
        low = tile_operands("low", path.low_key, path.low_value)
    return Operands(high=high, low=low, key_mean=made.get("mean"), valid_tiles=valid)
