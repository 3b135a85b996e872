"""The entry point of the attention operation: check the options, plan the call, run the plan.

A backend that is requested by name runs or raises; nothing falls back silently. Under a compiler, autograd or a tensor
mode, the operation is a single operator (:mod:`dma_kernels.operators`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .numerics.call import AttentionCall, check_call, check_options, is_int, of_four_dimensions
from .numerics.layout import ALIGNMENT
from .numerics.recipe import Recipe
from .operators import needs_operator, register
from .prefill.plan import plan, sdpa
from .reference.attention import EXACT, attention_gradient
from .runtime.chip import check_backend


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    q_offset: int | Tensor | None = None,
    kv_offset: int | Tensor = 0,
    kv_range: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    tile_counts: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute diagonal-tiled mixed-precision attention (arXiv 2604.03950).

    The backward pass is a straight-through estimator: the gradient of exact attention, including skipped tiles. Every
    backend computes it in PyTorch (:func:`~dma_kernels.reference.attention.attention_gradient`).

    Position 0 is that of the first key that a batch row may see. Query ``i`` is at ``q_offset + i``, and key ``j`` at
    ``kv_offset + j``. Positions determine causality, the window and the high tiles.

    Keys and values outside ``kv_range`` may hold anything. With the Triton backend, those that a mask, causality or the
    window hides must be finite: a NaN reaches other queries near those that see it.

    A short call attends exactly: a causal one with fewer than 64 queries and with more keys than queries, if the
    recipe's high tiles are unquantized (``high = "bf16"``). It has no low tiles.

    Args:
        query: ``[B, Hq, Tq, D]`` in bf16, fp16, fp32 or fp64, ``D <= 256``, any strides.
        key: ``[B, Hkv, Tk, D]``, the same dtype and device; ``Hkv`` divides ``Hq`` (GQA, MQA).
        value: ``[B, Hkv, Tk, Dv]``, the same dtype and device; ``Dv <= 256``.
        recipe: The precision of every tile.
        is_causal: Whether a query sees no key after its own position.
        scale: Scale of the scores; ``D ** -0.5`` by default.
        q_offset: Position of query 0: an int, or one per batch row, integer ``[B]``. By default, causal queries are at
            the last positions of the sequence (``kv_offset + Tk - Tq``), and bidirectional ones start at 0. A given int
            of a causal call must not be below ``kv_offset``. Positions are at most 2^30 from 0. Tensors of dtypes
            that hold more than int32 are clipped to that.
        kv_offset: Position of key 0: an int, or integer ``[B]``. For a left-padded row it is minus the padding.
        kv_range: Index of the first visible key and index after the last, integer ``[B, 2]``; all keys by default. It
            is clipped to ``0..Tk``. A row with an empty range sees no key.
        window: Sliding window. Causal: a query sees its own position and the ``window - 1`` before it. Bidirectional:
            it sees keys at most ``window`` positions away.
        softcap: Caps scores: ``softcap * tanh(score / softcap)``, after ``scale``.
        sinks: One logit per query head, ``[Hq]``, that takes part in the softmax without a value.
        mask: Boolean, broadcastable to ``[B, Hq, Tq, Tk]``, for example ``[Tq, Tk]``. False hides a key.
        tile_counts: int64 ``[Hq, 2]``, contiguous; needs a recipe with ``skip_threshold``. For each query head, the
            call adds the number of pairs of query block and low tile that it skipped, and the number that it examined.
            Only complete blocks of 64 positions count, with the tiles in which they see a key.
        backend: ``reference`` (PyTorch, any device), ``triton`` (bf16 and fp16 on CUDA), or ``auto``, which uses Triton
            if it can run on CUDA and the reference otherwise.

    Returns:
        ``[B, Hq, Tq, Dv]`` in the dtype of ``query``. Its ``.transpose(1, 2)`` is contiguous, except that an output of
        PyTorch's attention keeps its strides. Rows that attend to no key are 0.

    Raises:
        ValueError: A shape, a head dimension, an option or the backend's name is invalid.
        TypeError: A tensor, a dtype, an option or the recipe has the wrong type.
        RuntimeError: The requested backend cannot run on this device.
        NotImplementedError: A forward-mode derivative is requested.
    """
    call = AttentionCall(
        query, key, value, recipe, is_causal, scale, q_offset, kv_offset, kv_range, window, softcap, sinks, mask,
        tile_counts, backend, needs_lse=False,
    )  # fmt: skip
    return _compute(call)[0]


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    q_offset: int | Tensor | None = None,
    kv_offset: int | Tensor = 0,
    kv_range: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    tile_counts: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute attention and the log-sum-exp of the scores. The arguments are those of :func:`attention`.

    Returns:
        The output, and the natural logarithm of the softmax denominator, including sinks, ``[B, Hq, Tq]``, fp32 (fp64
        for fp64). It has no gradient. In rows that attend to no key it is the sink logit, or ``-inf`` without sinks.
    """
    call = AttentionCall(
        query, key, value, recipe, is_causal, scale, q_offset, kv_offset, kv_range, window, softcap, sinks, mask,
        tile_counts, backend,
    )  # fmt: skip
    out, lse = _compute(call)
    return out, lse


class PreparedAttention:
    """:func:`attention` for calls that differ in the contents of their tensors alone, such as those of many layers.

    Attributes:
        kernel: Name of the kernel that computes the calls, as in :mod:`dma_kernels.runtime.reports`.
    """

    def __init__(self, call: AttentionCall) -> None:
        if call.sinks is not None:
            call = call._replace(sinks=call.sinks.contiguous())
        self._plan = plan(call.layouts())
        self._strides = _aligned_strides(call)
        self.kernel = self._plan.kernel
        self._call = call._replace(query=None, key=None, value=None, sinks=None)  # keeps no tensors

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, **options: Any) -> PreparedAttention | None:
        """Check and prepare calls with these arguments of :func:`attention`, which says what it raises.

        Returns:
            ``None`` if a compiler, autograd or a tensor mode must see each call as one operation.
        """
        call = AttentionCall(query, key, value, recipe, **options, needs_lse=False)
        check_settings(call)
        return None if needs_operator(_tensors_of(call)) else cls(call)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Return the output for other tensors of the same shapes and dtypes, ``[B, Hq, Tq, Dv]``, with any strides."""
        if self.kernel == "sdpa":
            return sdpa(query, key, value, self._call.scale)
        sinks = None if sinks is None else sinks.contiguous()
        call = self._call._replace(query=query, key=key, value=value, sinks=sinks)
        strides = _aligned_strides(call)
        is_alike = strides is not None and strides == self._strides
        return (self._plan if is_alike else plan(call.layouts())).run(call)[0]


def _aligned_strides(call: AttentionCall) -> tuple[tuple[int, ...], ...] | None:
    """Return the strides of queries, keys and values, ``None`` if the address of one, or of sinks, is not aligned."""
    addresses = call.query.data_ptr() | call.key.data_ptr() | call.value.data_ptr()
    if call.sinks is not None:
        addresses |= call.sinks.data_ptr()
    return None if addresses % ALIGNMENT else (call.query.stride(), call.key.stride(), call.value.stride())


def _tensors_of(call: AttentionCall) -> list[Any]:
    """Return the tensors of a call."""
    given: list[Any] = [call.query, call.key, call.value]
    for other in (call.kv_range, call.sinks, call.mask, call.tile_counts):
        if other is not None:
            given.append(other)
    for offset in (call.q_offset, call.kv_offset):
        if offset is not None and not is_int(offset):
            given.append(offset)
    return given


def check_settings(call: AttentionCall) -> None:
    """Check what is not a tensor in the arguments of a call, except offsets."""
    if not isinstance(call.recipe, Recipe):
        raise TypeError(f"recipe must be a dma_kernels.Recipe, got {type(call.recipe).__name__}")
    check_backend(call.backend)
    check_options(is_causal=call.is_causal, window=call.window, scale=call.scale, softcap=call.softcap)


def _compute(call: AttentionCall) -> Sequence[Tensor]:
    """Check the settings, then run the plan, which checks the tensors, directly or through the operator."""
    check_settings(call)
    if not needs_operator(_tensors_of(call)):
        if call.sinks is not None:
            call = call._replace(sinks=call.sinks.contiguous())
        return plan(call.layouts()).run(call)
    check_call(call)
    (q_offset, q_rows), (kv_offset, kv_rows) = map(_split_offset, (call.q_offset, call.kv_offset))
    return _attention(
        call, call.query, call.key, call.value, q_offset, kv_offset or 0, q_rows, kv_rows, call.kv_range,
        of_four_dimensions(call.mask), call.sinks,
    )  # fmt: skip


def _split_offset(offset: Any) -> tuple[Any, Tensor | None]:
    """Return an offset as an int and a tensor, one of them ``None``: an op's argument has a single type."""
    return (offset, None) if offset is None or is_int(offset) else (None, offset)


def _call_of(arguments: Sequence[Any], recipe: Recipe, backend: str, tile_counts: Tensor | None) -> AttentionCall:
    """Rebuild the call from an operator's arguments and options."""
    query, key, value, q_offset, kv_offset, q_rows, kv_rows, kv_range, mask, sinks, *options = arguments
    is_causal, window, scale, softcap = options
    return AttentionCall(
        query, key, value, recipe, is_causal, scale, q_offset if q_rows is None else q_rows,
        kv_offset if kv_rows is None else kv_rows, kv_range, window, softcap,
        None if sinks is None else sinks.contiguous(), mask, tile_counts, backend,
    )  # fmt: skip


def _run_operator(*arguments: Any) -> tuple[Tensor, ...]:
    *given, recipe, backend, tile_counts = arguments
    call = _call_of(given, recipe, backend, tile_counts)
    return tuple(plan(call.layouts()).run(call))


def _run_fake(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    batch, q_heads, q_len, _ = query.shape
    out = query.new_empty((batch, q_len, q_heads, value.shape[-1])).transpose(1, 2)
    return out, query.new_empty((batch, q_heads, q_len), dtype=torch.promote_types(query.dtype, torch.float32))


def _run_gradient(grad_out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return attention_gradient(grad_out, _call_of(arguments, EXACT, "reference", None))


_attention = register(
    "dma_kernels::attention",
    "Tensor query, Tensor key, Tensor value, SymInt? q_offset, SymInt kv_offset, Tensor? q_offset_rows, "
    "Tensor? kv_offset_rows, Tensor? kv_range, Tensor? mask, Tensor? sinks",
    _run_operator, _run_fake, _run_gradient, results=2, has_vmap=True,
)  # fmt: skip
