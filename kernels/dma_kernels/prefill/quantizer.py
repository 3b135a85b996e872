"""Fused quantisers: the key and value operands of every lowering, in one Triton launch or two.

Where a tile must know of others (``smooth_k``, values of ``pv = "fp8"``, NVFP4) a first launch gathers what it needs
(:mod:`dma_kernels.prefill.statistics`); one more launch writes every operand
(:mod:`dma_kernels.prefill.quantizer_kernel`). Inputs may have any strides; nothing is copied beforehand.

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

from ..numerics.formats import BLOCK_FORMATS, TILE, UNQUANTIZED, ScaleFormat, padded_channels
from ..numerics.recipe import Recipe
from ..numerics.transforms import hadamard_size
from ..runtime.launch import Launcher, blocks_of_heads
from ..runtime.lowering import Form, Lowering, dequantized_dtype
from .operands import Operands, TileOperands
from .quantizer_kernel import quantize_kernel
from .statistics import CHUNKS, query_factor_kernel, statistics_kernel

NVFP4 = "nvfp4"
NONE = "none"
QUERY_BLOCK = 64


def quantize_keys_values(
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    lowering: Lowering,
    *,
    kv_offset: int,
    rows: Tensor | None,
    use_pdl: bool = False,
) -> Operands:
    """Write the key and value operands of a call. What no query can see is zeros in aligned storage.

    Args:
        key: 16-bit ``[B, Hkv, Tk, D]``, any strides.
        value: 16-bit ``[B, Hkv, Tk, Dv]``, any strides.
        recipe: The precisions.
        lowering: Their forms.
        kv_offset: Position of key 0, where ``rows`` is ``None``.
        rows: int32 ``[B, 4]``: for each batch row the positions of query 0 and key 0, the first visible key and the
            one past the last.
        use_pdl: Whether kernels may start before the one that they follow has ended (programmatic dependent launch);
            Hopper and later.

    Returns:
        The operands, without ``query_factor``.
    """
    batch, heads, kv_len, head_dim = key.shape
    plan = _plan(recipe, lowering, key.dtype, heads, head_dim, value.shape[3], rows is not None, use_pdl)
    # Where a row starts inside its first tile is known on the device alone: up to 127 entries stay empty before it.
    first = kv_offset % TILE if rows is None else TILE - 1
    tiles = max(1, -(-(kv_len + first) // TILE))
    made = {name: key.new_empty(output.size(batch, heads, tiles), dtype=output.dtype) for name, output in plan.outputs}
    get = made.get
    chunks = min(2 * tiles, CHUNKS)
    sizes = (*key.stride(), *value.stride(), kv_offset, kv_len, tiles, chunks)
    statistics = tuple(map(get, _STATISTICS))
    if plan.statistics is not None:
        grid = (batch * heads, chunks if plan.has_maxima else 1, plan.statistics_layers)
        plan.statistics(grid, key, value, *statistics, rows, *sizes)
    if plan.quantize is not None:
        grid = (batch * heads, tiles, plan.layers)
        plan.quantize(grid, key, value, *statistics, rows, *map(get, _WRITTEN), *sizes)
    return _operands(key, value, lowering, tiles, made, lets_next_start=plan.uses_pdl)


def query_factor(query: Tensor, recipe: Recipe) -> Tensor | None:
    """Return NVFP4's scale of the transformed queries of each head, fp32 ``[B, Hq]``; ``None`` for other formats.

    Args:
        query: 16-bit ``[B, Hq, Tq, D]``, any strides.
        recipe: The precisions.
    """
    if NVFP4 not in (recipe.query_low, recipe.high):
        return None
    batch, heads, q_len, head_dim = query.shape
    factor = torch.zeros((batch, heads), dtype=torch.int32, device=query.device)
    launch = _query_launcher(heads, head_dim, recipe.rotate, recipe.scale_rounding)
    launch(blocks_of_heads(batch * heads, -(-q_len // QUERY_BLOCK)), query, factor, *query.stride(), q_len)
    return factor.view(torch.float32)


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


# The tensors that the two kernels write, in their order.
_STATISTICS = ("mean", "key_head", "channels")
_WRITTEN = (
    "high", "high_scale", "low", "low_scale", "key_factor", "head_factor", "value", "value_factor",
)  # fmt: skip


# Parameters of both kernels that stay as they are for a plan: what is allocated here, and lengths.
_SETTLED = frozenset({"kv_offset", "kv_len", "tiles", "chunks"} | {f"{name}_ptr" for name in (*_STATISTICS, *_WRITTEN)})


@dataclass(frozen=True)
class _Plan:
    """What does not depend on lengths: the launches, and the outputs by name."""

    statistics: Launcher | None
    quantize: Launcher | None
    has_maxima: bool
    uses_pdl: bool
    statistics_layers: int
    layers: int
    outputs: tuple[tuple[str, _Output], ...]


@functools.lru_cache(maxsize=256)
def _plan(
    recipe: Recipe,
    lowering: Lowering,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    value_dim: int,
    has_rows: bool,
    use_pdl: bool,
) -> _Plan:
    outputs = _outputs(recipe, lowering, dtype, head_dim, value_dim)
    has_mean, has_key_head = "mean" in outputs, "key_head" in outputs
    writes_keys = "high" in outputs or "low" in outputs
    writes_values = "value" in outputs
    has_statistics = has_mean or has_key_head or writes_values
    # The first launch waits for all that the caller's kernels write. Without it the attention gains nothing: 109 us for
    # ``paper`` at 2K, 117 with an early start.
    uses_pdl = use_pdl and has_statistics
    shape: dict[str, Any] = {
        "KV_HEADS": heads,
        "D": head_dim,
        "DV": value_dim,
        "BLOCK_D": padded_channels(head_dim),
        "BLOCK_DV": padded_channels(value_dim),
        "HAS_ROWS": has_rows,
        "HAS_MEAN": has_mean,
        "HAS_KEY_HEAD": has_key_head,
        "USE_PDL": uses_pdl,
        **_rotation(recipe.rotate, head_dim),
    }
    has_few_registers = max(head_dim, value_dim) <= 128
    maxima = {
        "HAS_CHANNELS": writes_values,
        # Six blocks on their way, not four: on an H200 67.6 us, not 74.0, for the values of 131,072 tokens and 8 heads
        # of 128; 216, not 247, for keys and values in NVFP4. But their 80 KB of shared memory leave no room for a
        # kernel that starts early: ``balanced`` at 2K takes 90 us, 80 with four.
        "ROWS": 64 if has_few_registers else 32,
        "STAGES": 4 if uses_pdl else 6,
    }
    forms = {
        "HIGH_FORM": lowering.key.value,
        "HIGH_FORMAT": recipe.high,
        "LOW_FORM": NONE if lowering.low_key is None else lowering.low_key.value,
        "LOW_FORMAT": recipe.key_low,
        "SHARED": recipe.shared_scale,
        "VALUE_FORM": (lowering.low_value or Form.RAW).value,
        "ROUNDING": recipe.scale_rounding,
    }
    options: dict[str, Any] = {"num_warps": 8}
    # On an H200, 32K tokens and 8 kv heads of 128: 4 warps against 8 take 79 us and 94 for MXINT8 keys and FP8 values.
    # Tiles of all heads in turn, not head after head: 75 against 79 (131,072 tokens: 271 against 281). What else was
    # tried was slower (80 us in that run): keys written beside the statistics of the values, 91; that with 8 warps, or
    # with two key tiles in flight, 87 to 91; one launch whose programs wait for the statistics of their head, so that
    # values are read from the L2 cache, 84. All programs of a launch have the registers of the largest, and too few of
    # them then share a multiprocessor. Hints to the L2 cache change nothing.
    if has_few_registers and not recipe.rotate:
        if lowering.key is Form.RAW and lowering.low_key in (None, Form.INT8, Form.E4M3):
            options = {"num_warps": 4}
        # MXFP4 and MXFP8 keys: 54.4 us, 82 with 8 warps, 73 with 4.
        elif lowering.low_key is Form.E5M2:
            options = {"num_warps": 16}
    # NVFP4 keys and FP8 values, beside their statistics: 109 us, 120 with the registers that the compiler likes.
    elif has_few_registers and lowering.low_key is Form.DEQUANTIZED and lowering.low_value is Form.E4M3:
        options["maxnreg"] = 80
    statistics = quantize = None
    if has_statistics:
        warps = 4 if has_few_registers and not has_key_head else 8
        statistics = Launcher(statistics_kernel, shape | maxima, settled=_SETTLED, num_warps=warps)
    if writes_keys or writes_values:
        quantize = Launcher(quantize_kernel, shape | forms, settled=_SETTLED, launch_pdl=uses_pdl, **options)
    return _Plan(
        statistics=statistics,
        quantize=quantize,
        has_maxima=has_key_head or writes_values,
        uses_pdl=uses_pdl,
        statistics_layers=int(writes_values) + int(has_mean or has_key_head),
        layers=int(writes_values) + int(writes_keys),
        outputs=tuple(outputs.items()),
    )


def _outputs(
    recipe: Recipe, lowering: Lowering, dtype: torch.dtype, head_dim: int, value_dim: int
) -> dict[str, _Output]:
    """Return what the two kernels write, by the names of their parameters."""
    outputs: dict[str, _Output] = {}
    if recipe.smooth_k:
        outputs["mean"] = _Output((head_dim,), torch.float32)
    if lowering.key is not Form.RAW:
        target = dequantized_dtype(dtype, recipe.high, recipe.high)
        outputs |= _key_outputs("high", lowering.key, recipe.high, head_dim, target)
    if lowering.low_key is not None:
        target = dequantized_dtype(dtype, recipe.query_low, recipe.key_low)
        outputs |= _key_outputs("low", lowering.low_key, recipe.key_low, head_dim, target)
    if ("high" in outputs and recipe.high == NVFP4) or ("low" in outputs and recipe.key_low == NVFP4):
        outputs["key_head"] = _Output((CHUNKS,), torch.int32)
        outputs["head_factor"] = _Output((), torch.float32)
    if lowering.low_value is Form.E4M3:
        outputs["value"] = _Output((value_dim, TILE), torch.float8_e4m3fn, rows_per_tile=1)
        outputs["value_factor"] = _Output((value_dim,), torch.float32)
    elif lowering.low_value is Form.DEQUANTIZED:
        outputs["value"] = _Output((value_dim,), torch.bfloat16, rows_per_tile=TILE)
    if "value" in outputs:
        outputs["channels"] = _Output((CHUNKS, value_dim), torch.int32)
    return outputs


def _key_outputs(name: str, form: Form, format: str, head_dim: int, dequantized: torch.dtype) -> dict[str, _Output]:
    """Return the outputs of keys in one form."""
    if form is Form.DEQUANTIZED:
        return {name: _Output((head_dim,), dequantized, rows_per_tile=TILE)}
    assert format != UNQUANTIZED
    block = BLOCK_FORMATS[format]
    width = -(-head_dim // block.block_size) * block.block_size
    if form is Form.PACKED:
        is_e2m1 = block.element.bits == 4
        dtype = torch.uint8 if is_e2m1 else torch.float8_e4m3fn
        scale_dtype = torch.uint8 if block.scale is ScaleFormat.E8M0 else torch.float8_e4m3fn
        return {
            name: _Output((width // 2 if is_e2m1 else width,), dtype, rows_per_tile=TILE),
            f"{name}_scale": _Output((width // block.block_size,), scale_dtype, rows_per_tile=TILE),
        }
    dtype = {Form.INT8: torch.int8, Form.E4M3: torch.float8_e4m3fn, Form.E5M2: torch.float8_e5m2}[form]
    return {
        name: _Output((width,), dtype, rows_per_tile=TILE),
        "key_factor": _Output((), torch.float32, rows_per_tile=1),
    }


def _operands(
    key: Tensor,
    value: Tensor,
    lowering: Lowering,
    tiles: int,
    made: dict[str, Tensor],
    *,
    lets_next_start: bool,
) -> Operands:
    head_factor = made.get("head_factor")
    if head_factor is not None:
        head_factor = head_factor[..., None].expand(-1, -1, tiles)

    def tile_operands(name: str, form: Form, value_form: Form) -> TileOperands:
        own_value = None if value_form is Form.RAW else made["value"]
        own_key, scale = made.get(name), made.get(f"{name}_scale")
        has_tile_factor = form in (Form.INT8, Form.E4M3, Form.E5M2)
        is_nvfp4 = scale is not None and scale.dtype == torch.float8_e4m3fn
        return TileOperands(
            key=key if own_key is None else own_key,
            value=value if own_value is None else own_value,
            key_form=form,
            value_form=value_form,
            key_layout="caller" if own_key is None else "aligned",
            value_layout="caller" if own_value is None else "aligned",
            key_scale=scale,
            key_factor=made["key_factor"] if has_tile_factor else head_factor if is_nvfp4 else None,
            value_factor=made.get("value_factor") if value_form is Form.E4M3 else None,
        )

    high = tile_operands("high", lowering.key, Form.RAW)
    low = None
    if lowering.low_key is not None and lowering.low_value is not None:
        low = tile_operands("low", lowering.low_key, lowering.low_value)
    return Operands(high=high, low=low, key_mean=made.get("mean"), lets_next_start=lets_next_start)


@functools.lru_cache(maxsize=256)
def _query_launcher(heads: int, head_dim: int, rotate: bool, rounding: str) -> Launcher:
    shape = {
        "ROUNDING": rounding,
        "Q_HEADS": heads,
        "D": head_dim,
        "BLOCK_D": padded_channels(head_dim),
        "BLOCK_T": QUERY_BLOCK,
    }
    return Launcher(query_factor_kernel, shape | _rotation(rotate, head_dim), num_warps=4)


def _rotation(rotate: bool, head_dim: int) -> dict[str, Any]:
    size = hadamard_size(head_dim)
    return {"ROTATE": rotate, "HADAMARD_SIZE": size, "NORM": math.pow(size, -0.5)}
