"""Argument checks for attention, with and without a cache.

Each takes tensors or their layouts (:class:`~dma_kernels.numerics.layout.TensorLayout`). It raises ``TypeError`` for a
wrong type or dtype, and ``ValueError`` for a wrong shape, device or number.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from .formats import MAX_POSITION
from .layout import TensorLayout
from .recipe import Recipe

if TYPE_CHECKING:
    from .call import AttentionCall

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MIN_HEAD_DIM, MAX_HEAD_DIM = 1, 256


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer, possibly a compiler's symbolic one, and not a bool."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def is_integer(tensor: Any) -> bool:
    """Whether a tensor holds integers."""
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def check_options(*, is_causal: Any, window: Any, scale: Any, softcap: Any) -> None:
    """Check the options that are not tensors. ``scale`` and ``softcap`` must be positive and finite, or ``None``."""
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be true or false, got {is_causal!r}")
    if scale is not None:
        _check_positive("scale", scale)
    if softcap is not None:
        _check_positive("softcap", softcap)
    if window is not None and not (is_int(window) and window >= 1):
        raise ValueError(f"window must be an integer of at least 1, got {window!r}")


def check_kind(name: str, tensor: Any, other: Any, whose: str = "query") -> None:
    """Check that an argument is a tensor on the device of ``other``, which messages call ``whose``."""
    if not isinstance(tensor, (Tensor, TensorLayout)):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device != other.device:
        raise ValueError(f"{name} must be on the device of {whose}, {other.device}, got {tensor.device}")


def check_sinks(sinks: Any, query: Any) -> None:
    """Check the sink logits of queries ``[B, Hq, T, D]``: floating point, ``[Hq]``."""
    check_kind("sinks", sinks, query)
    if sinks.shape != (query.shape[1],):
        raise ValueError(f"sinks must be [{query.shape[1]}], one logit per query head, got {list(sinks.shape)}")
    if not sinks.dtype.is_floating_point:
        raise TypeError(f"sinks must be floating point, got {sinks.dtype}")


def check_mask(mask: Any, query: Any, columns: int | None) -> None:
    """Check that a mask is boolean and broadcasts to ``[B, Hq, T, columns]``; ``None`` for any number of columns."""
    check_kind("mask", mask, query)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, got {mask.dtype}")
    shape = (*(1,) * (4 - mask.ndim), *mask.shape)
    full = (*query.shape[:3], shape[-1] if columns is None else columns)
    if len(shape) > 4 or any(size not in (1, whole) for size, whole in zip(shape, full, strict=True)):
        raise ValueError(f"mask must be broadcastable to {list(full)}, got {list(mask.shape)}")


def of_four_dimensions(mask: Any) -> Any:
    """Prepend dimensions of size 1 to a mask, or to its layout, to make four."""
    if mask is None or mask.ndim == 4:
        return mask
    missing = 4 - mask.ndim
    shape = (*(1,) * missing, *mask.shape)
    if isinstance(mask, TensorLayout):
        return mask._replace(shape=torch.Size(shape), strides=(*(0,) * missing, *mask.strides))
    return mask.reshape(*shape)


def check_call(call: AttentionCall) -> None:
    """Check the layouts and offsets of a call, as :func:`dma_kernels.attention` describes them."""
    query, key, kv_range, q_offset, kv_offset = call.query, call.key, call.kv_range, call.q_offset, call.kv_offset
    _check_query_key_value(query, key, call.value)
    batch = query.shape[0]
    if call.sinks is not None:
        check_sinks(call.sinks, query)
    if kv_range is not None:
        check_kind("kv_range", kv_range, query)
        if not is_integer(kv_range) or kv_range.shape != (batch, 2):
            raise ValueError(f"kv_range must be integer [{batch}, 2], got {kv_range.dtype} {list(kv_range.shape)}")
    if call.mask is not None:
        check_mask(call.mask, query, key.shape[2])
    if call.tile_counts is not None:
        _check_tile_counts(call.tile_counts, query, call.recipe)
    _check_offset("kv_offset", kv_offset, query)
    if q_offset is not None:
        _check_offset("q_offset", q_offset, query)
    if call.is_causal and is_int(q_offset) and is_int(kv_offset):
        last = kv_offset + key.shape[2] - query.shape[2]
        if q_offset < kv_offset and q_offset < last:
            raise ValueError(
                f"q_offset must be at least kv_offset, {kv_offset}, where attention is causal and a query before key 0 "
                f"sees nothing; got {q_offset}"
            )


def _check_query_key_value(query: Any, key: Any, value: Any) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_kind(name, tensor, query)
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be [batch, heads, tokens, head_dim], got shape {list(tensor.shape)}")
    if query.dtype not in DTYPES:
        raise TypeError(f"query must be bf16, fp16, fp32 or fp64, got {query.dtype}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have the dtype of query, {query.dtype}, got {tensor.dtype}")
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(f"{name} must have the batch size of query, {query.shape[0]}, got {tensor.shape[0]}")
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(
            f"value must have the heads and tokens of key, {list(key.shape[1:3])}, got {list(value.shape[1:3])}"
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] != 0:
        raise ValueError(f"the {key.shape[1]} key heads must divide the {query.shape[1]} query heads")
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key must have the head_dim of query, {query.shape[3]}, got {key.shape[3]}")
    for name, size in (("query", query.shape[3]), ("value", value.shape[3])):
        if not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            raise ValueError(f"the head_dim of {name} must be in {MIN_HEAD_DIM}..{MAX_HEAD_DIM}, got {size}")


def _check_tile_counts(tile_counts: Any, query: Any, recipe: Recipe) -> None:
    check_kind("tile_counts", tile_counts, query)
    is_shaped = tile_counts.dtype == torch.int64 and tile_counts.shape == (query.shape[1], 2)
    if not (is_shaped and tile_counts.is_contiguous()):
        raise ValueError(
            f"tile_counts must be int64 [{query.shape[1]}, 2], contiguous; got {tile_counts.dtype} "
            f"{list(tile_counts.shape)} with strides {list(tile_counts.stride())}"
        )
    if recipe.skip_threshold is None:
        raise ValueError("tile_counts needs a recipe that skips tiles; its skip_threshold is None")


def _check_offset(name: str, offset: Any, query: Any) -> None:
    batch = query.shape[0]
    if is_int(offset):
        if not -MAX_POSITION <= offset <= MAX_POSITION:
            raise ValueError(f"{name} must be within 2**30 of 0, got {offset}")
        return
    if not isinstance(offset, (Tensor, TensorLayout)):
        raise TypeError(f"{name} must be an int or an integer tensor of shape [{batch}], got {offset!r}")
    is_shaped = offset.ndim == 0 or (offset.ndim == 1 and (offset.shape[0] == 1 or offset.shape[0] == batch))
    if not (is_integer(offset) and is_shaped):
        raise ValueError(
            f"{name} must be an int or an integer tensor of shape [{batch}], got {offset.dtype} {list(offset.shape)}"
        )
    check_kind(name, offset, query)


def _check_positive(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a positive finite number, got {number!r}")
    if not 0.0 < number < math.inf:
        raise ValueError(f"{name} must be a positive finite number, got {number!r}")
