"""A call of attention: its arguments, their checks, and the key of its plan.

Checks take tensors or their layouts (:class:`~dma_kernels.numerics.layout.TensorLayout`), and serve calls with a cache
too. They raise ``TypeError`` for a wrong type or dtype, and ``ValueError`` for a wrong shape, device or number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from .formats import MAX_POSITION, UNQUANTIZED
from .layout import ALIGNMENT, TensorLayout
from .recipe import Recipe

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MIN_HEAD_DIM, MAX_HEAD_DIM = 1, 256
MAX_INT32 = (1 << 31) - 1
MAX_FP32 = torch.finfo(torch.float32).max
SHORT_CALL = 64
"""A causal call with fewer queries is short if it continues a sequence."""


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer, possibly a compiler's symbolic one, and not a bool."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def narrow_positions(positions: Tensor) -> Tensor:
    """Return positions as int32; those that int32 may not hold are clipped to 2^30 on either side of 0."""
    if positions.dtype.itemsize < 4 or positions.dtype == torch.int32:
        return positions.to(torch.int32)
    if not positions.dtype.is_signed:  # torch cannot clamp them
        positions = positions.long()
    return positions.clamp(-MAX_POSITION, MAX_POSITION).to(torch.int32)


class AttentionCall(NamedTuple):
    """The arguments of :func:`dma_kernels.attention`, which describes them.

    With layouts in place of tensors (:meth:`layouts`), it decides the call's plan. ``needs_lse`` says whether to return
    the log-sum-exp.
    """

    query: Any
    key: Any
    value: Any
    recipe: Recipe
    is_causal: bool = True
    scale: float | None = None
    q_offset: Any = None
    kv_offset: Any = 0
    kv_range: Any = None
    window: Any = None
    softcap: float | None = None
    sinks: Any = None
    mask: Any = None
    tile_counts: Any = None
    backend: str = "auto"
    needs_lse: bool = True

    def layouts(self) -> AttentionCall:
        """Return the call without the contents of its tensors."""
        fields = list(self)
        for i in _TENSORS:
            tensor = fields[i]
            if tensor is not None and not isinstance(tensor, int):
                misalignment = tensor.data_ptr() % ALIGNMENT  # written out: the call of a function for each adds up
                layout = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, misalignment)
                fields[i] = tuple.__new__(TensorLayout, layout)
        return tuple.__new__(AttentionCall, fields)  # hot path: the constructor is Python code

    @property
    def score_scale(self) -> float:
        """``scale`` or its default."""
        return self.query.shape[3] ** -0.5 if self.scale is None else float(self.scale)

    @property
    def is_short(self) -> bool:
        """Whether all tiles are high because the call has few queries, such as a decoding step.

        A short call is causal, has fewer than 64 queries, and continues a sequence: it has more keys than queries. Its
        time goes into reading the keys and values. Quantizing them would take longer and lose accuracy. This
        needs unquantized high tiles: a recipe that quantizes them, such as ``paper``, keeps its low tiles.
        """
        q_len, kv_len = self.query.shape[2], self.key.shape[2]
        return bool(self.is_causal and q_len < SHORT_CALL and kv_len > q_len and self.recipe.high == UNQUANTIZED)

    @property
    def first_query(self) -> Any:
        """Position of query 0, or one per batch row: ``q_offset`` or its default."""
        if self.q_offset is not None:
            return self.q_offset
        if not self.is_causal:
            return 0
        offset = self.kv_offset if is_int(self.kv_offset) else narrow_positions(self.kv_offset)
        return offset + self.key.shape[2] - self.query.shape[2]

    @property
    def row_tensors(self) -> tuple[Any, Any, Any]:
        """``q_offset``, ``kv_offset`` and ``kv_range`` where they are tensors; otherwise ``None``.

        Where ``kv_offset`` is a tensor and ``q_offset`` has its default, both are ``None``: they differ by a constant.
        """
        if self.q_offset is None:
            return None, None, self.kv_range
        q_offset, kv_offset = (None if is_int(offset) else offset for offset in (self.q_offset, self.kv_offset))
        return q_offset, kv_offset, self.kv_range

    @property
    def lead_of_last(self) -> int:
        """Position of query 0 minus that of key 0 if the last query is at the position of the last key."""
        return int(self.key.shape[2] - self.query.shape[2])

    @property
    def lead(self) -> int:
        """Position of query 0 minus that of key 0 in a causal call, with 0 for those in :attr:`row_tensors`."""
        if self.q_offset is None:
            return self.lead_of_last
        q_offset, kv_offset = (offset if is_int(offset) else 0 for offset in (self.q_offset, self.kv_offset))
        return q_offset - kv_offset

    @property
    def has_seq_info(self) -> bool:
        """Whether positions or visible ranges are read on the device."""
        if self.kv_range is not None or not is_int(self.kv_offset):
            return True
        return self.q_offset is not None and not is_int(self.q_offset)

    def seq_info(self) -> Tensor | None:
        """Return ``AttentionGeometry.seq_info``; ``None`` if nothing is read on the device."""
        if not self.has_seq_info:
            return None
        kv_len = self.key.shape[2]
        info = torch.empty((self.key.shape[0], 4), dtype=torch.int32, device=self.key.device)
        for column, position in enumerate((self.first_query, self.kv_offset)):
            info[:, column] = position if is_int(position) else narrow_positions(position)
        info[:, 2], info[:, 3] = 0, kv_len
        if self.kv_range is not None:
            info[:, 2:] = self.kv_range.long().clamp(0, kv_len)  # clamp before narrowing to 32 bits
        return info


class ShortKey(AttentionCall):
    """Key of the plan of short calls that differ in their number of keys alone, as the steps over a growing cache do.

    ``None`` stands for that number. Strides of keys, values and masks are those that Triton specializes on alike.
    """

    call: AttentionCall  # the first call with this key, with layouts

    @classmethod
    def of(cls, call: AttentionCall) -> AttentionCall:
        """Return the key of a call with layouts: ``call`` itself if it is not short, or its plan has a number of keys.

        Nothing has been checked.
        """
        for states in (call.query, call.key, call.value):
            if not isinstance(states, TensorLayout) or len(states.shape) != 4:
                return call
        if not call.is_short or not (call.mask is None or (isinstance(call.mask, TensorLayout) and call.mask.shape)):
            return call
        kv_len, q_offset, window = call.key.shape[2], call.q_offset, call.window
        if is_int(q_offset):
            if not is_int(call.kv_offset) or q_offset != call.kv_offset + call.lead_of_last:
                return call
            q_offset = None  # the default
        made = cls._make(call._replace(
            key=_without_length(call.key, 2, kv_len),
            value=_without_length(call.value, 2, kv_len),
            mask=None if call.mask is None else _without_length(call.mask, call.mask.ndim - 1, kv_len),
            q_offset=q_offset,
            window=None if window is None else (window, window < kv_len),  # and whether it hides a key
        ))  # fmt: skip
        made.call = call
        return made


def _without_length(layout: TensorLayout, dim: int, length: int) -> TensorLayout:
    """Return a layout without the size of a dimension, if that is ``length``, and with a representative of strides."""
    shape: Any = layout.shape
    if dim < len(shape) and shape[dim] == length:
        shape = (*shape[:dim], None, *shape[dim + 1 :])
    strides = []
    for stride in layout.strides:
        strides.append(stride if stride == 1 or stride > MAX_INT32 else ALIGNMENT if stride % ALIGNMENT == 0 else 2)
    return layout._replace(shape=shape, strides=tuple(strides))


_TENSORS = tuple(map(AttentionCall._fields.index, (
    "query", "key", "value", "q_offset", "kv_offset", "kv_range", "sinks", "mask", "tile_counts",
)))  # fmt: skip


def is_integer(tensor: Any) -> bool:
    """Whether a tensor holds integers."""
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def check_options(*, is_causal: Any, window: Any, scale: Any, softcap: Any) -> None:
    """Check the options that are not tensors. ``scale`` and ``softcap``, if given, are positive and finite in fp32."""
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be true or false, got {is_causal!r}")
    if scale is not None:
        _check_positive("scale", scale)
    if softcap is not None:
        _check_positive("softcap", softcap)
    check_window(window)


def check_window(window: Any) -> None:
    """Check a sliding window, if there is one."""
    if window is not None and not (is_int(window) and window >= 1):
        raise ValueError(f"window must be an integer of at least 1, got {window!r}")


def check_count(name: str, count: Any) -> None:
    """Check a number of tokens or tiles."""
    if not (is_int(count) and count >= 0):
        raise ValueError(f"{name} must be an integer of at least 0, got {count!r}")


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, (Tensor, TensorLayout)):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")


def check_kind(name: str, tensor: Any, other: Any, whose: str = "query") -> None:
    """Check that an argument is a tensor on the device of ``other``, which messages call ``whose``."""
    _check_tensor(name, tensor)
    if tensor.device != other.device:
        raise ValueError(f"{name} must be on the device of {whose}, {other.device}, got {tensor.device}")


def check_floating(name: str, tensor: Any) -> None:
    """Check that an argument is a floating-point tensor."""
    _check_tensor(name, tensor)
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{name} must be floating point, got {tensor.dtype}")


def check_sinks(sinks: Any, query: Any) -> None:
    """Check the sink logits of queries ``[B, Hq, T, D]``: floating point, ``[Hq]``."""
    check_kind("sinks", sinks, query)
    if sinks.shape != (query.shape[1],):
        raise ValueError(f"sinks must be [{query.shape[1]}], one logit per query head, got {list(sinks.shape)}")
    check_floating("sinks", sinks)


def is_broadcastable(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Whether a tensor of a shape broadcasts to the full shape."""
    missing = len(full) - len(shape)
    return missing >= 0 and all(size in (1, whole) for size, whole in zip(shape, full[missing:], strict=True))


def check_mask(mask: Any, query: Any, columns: int | None) -> None:
    """Check that a mask is boolean and broadcasts to ``[B, Hq, T, columns]``; ``None`` for any number of columns."""
    check_kind("mask", mask, query)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, got {mask.dtype}")
    full = (*query.shape[:3], (1, *mask.shape)[-1] if columns is None else columns)
    if not is_broadcastable(mask.shape, full):
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
    if not 0.0 < number <= MAX_FP32:
        raise ValueError(f"{name} must be a positive finite number, got {number!r}")
