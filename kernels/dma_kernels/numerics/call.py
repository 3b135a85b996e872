"""A call of attention: its arguments, and the key of its plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import is_int
from .formats import MAX_POSITION, UNQUANTIZED
from .layout import ALIGNMENT, TensorLayout
from .recipe import Recipe

MAX_INT32 = (1 << 31) - 1
SHORT_CALL = 64
"""A causal call with fewer queries is short if it continues a sequence."""


def narrow_positions(positions: Tensor) -> Tensor:
    """Return positions as int32; those of 64 bits are clipped to 2^30 on either side of 0, not taken modulo 2^32."""
    if positions.dtype.itemsize > 4:
        positions = positions.clamp(-MAX_POSITION, MAX_POSITION)
    return positions.to(torch.int32)


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
    def effective_recipe(self) -> Recipe:
        """The recipe that the call computes: ``recipe``, or exact attention if the call is short."""
        return self.recipe.of_high_tiles if self.is_short else self.recipe

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
