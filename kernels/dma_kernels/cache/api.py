"""Attention over a KV cache: validate, dispatch to a backend, store the new keys and values.

The operation writes into the tensors of a :class:`~dma_kernels.cache.storage.LayerStorage`. For ``torch.compile`` it is
a custom op that declares so; a decode step with a cache of fixed size is one graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..numerics.call import (
    check_count,
    check_kind,
    check_mask,
    check_options,
    check_sinks,
    is_integer,
    of_four_dimensions,
)
from ..numerics.formats import MAX_POSITION
from ..runtime.chip import resolve_backend
from ..runtime.reports import report
from .reference import CacheOptions, cached_attention_reference
from .storage import TENSORS, LayerStorage


def cached_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    storage: LayerStorage,
    *,
    is_causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    mask_position: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend to cached and new keys, and store the new ones. Inference only.

    Exact attention over the stored KV: unquantized in the sinks and in the band of each query, dequantized elsewhere
    (:mod:`dma_kernels.cache.storage`). The last query is at the position of the last key. A causal call with several
    new tokens equals single-token calls. The cache must have pages for the tiles that the new keys complete
    (:meth:`LayerStorage.reserve`).

    A bidirectional call with over 128 new tokens over a cache with a window reads them unquantized with the Triton
    backend, and dequantized outside the band with the reference.

    Args:
        query: ``[B, Hq, T, D]`` in the dtype of the cache.
        key: New keys ``[B, Hkv, T, D]``; ``None`` if they are stored already. Then ``T`` is at most
            :attr:`LayerStorage.spare_tokens`, less the tokens that are rolled back.
        value: New values ``[B, Hkv, T, Dv]``; ``None`` with ``key``.
        storage: The cache of the layer; written in place.
        is_causal: Whether a query attends to no key after its own position.
        window: Sliding window; not larger than that of the storage, if it has one.
        scale: Scale of the scores; ``D ** -0.5`` by default.
        softcap: Scores become ``softcap * tanh(score / softcap)``, after ``scale``.
        sinks: One logit per query head, ``[Hq]``, that takes part in the softmax without a value.
        mask: Boolean, broadcastable to ``[B, Hq, T, K]``: which of ``K`` consecutive positions are visible.
        mask_position: Position of column 0 of ``mask``, integer ``[B]``; required unless ``K`` is 1.
        backend: ``reference``, ``triton`` or ``auto``, as for :func:`dma_kernels.attention`.

    Returns:
        ``[B, Hq, T, Dv]`` in the dtype of ``query``; 0 in rows that see no key.

    Raises:
        ValueError: Shapes, devices or options are invalid, or there are too few pages; nothing was stored.
        TypeError: Types or dtypes are invalid; nothing was stored.
        RuntimeError: The requested backend cannot run; or, in ``backward``, a gradient was requested.
    """
    if (key is None) != (value is None):
        raise ValueError("key and value must be given together, or both be None")
    if key is None or value is None:
        key, value = storage.empty_kv()
    check_fits(storage, key, value)
    _check_query(query, key, storage)
    check_options(is_causal=is_causal, window=window, scale=scale, softcap=softcap)
    if storage.window is not None and (window is None or window > storage.window):
        raise ValueError(f"window must be at most {storage.window}, what the cache keeps; got {window!r}")
    mask = _check_mask(mask, mask_position, query)
    if sinks is not None:
        check_sinks(sinks, query)
    options = cache_options(
        query, is_causal=is_causal, window=window, scale=scale, softcap=softcap, sinks=sinks, mask=mask,
        mask_position=mask_position,
    )  # fmt: skip
    with torch.no_grad():
        if torch.compiler.is_compiling():
            out: Tensor = _cached_attention(query, key, value, *_op_arguments(storage), *options, backend)
            storage.count_appended(key.shape[2])
        else:
            out = _attend(query, key, value, storage, options, backend)
    inputs = [query, key, value] if sinks is None else [query, key, value, sinks]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return _NoGradient.apply(out, *inputs)  # type: ignore[no-any-return,no-untyped-call]
    return out


def cache_options(
    query: Tensor, *, scale: float | None = None, window: int | None = None, softcap: float | None = None, **others: Any
) -> CacheOptions:
    """Return the options of a call of :func:`cached_attention` with valid arguments."""
    return CacheOptions(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        # A window that covers every position is none, and kernels compute in int32.
        window=None if window is not None and window >= MAX_POSITION else window,
        softcap=None if softcap is None else float(softcap),
        **others,
    )


def repeat_attention(
    query: Tensor, key: Tensor, value: Tensor, storage: LayerStorage, options: CacheOptions, backend: str
) -> Tensor:
    """Compute :func:`cached_attention` without its checks, for layers that repeat a call which was checked.

    Args:
        query: ``[B, Hq, T, D]``. It requires no gradient. All shapes, dtypes and devices are those of the checked call.
        key: New keys ``[B, Hkv, T, D]``.
        value: New values ``[B, Hkv, T, Dv]``.
        storage: The cache of the layer; written in place.
        options: Options like those of the checked call: causal, and without a mask.
        backend: As for :func:`cached_attention`.
    """
    if storage.repeated_step is not None and backend != "reference":
        from .decode import repeat_step

        out = repeat_step(query, key, value, storage, options)
        if out is not None:
            return out
    return _attend(query, key, value, storage, options, backend)


def append(storage: LayerStorage, key: Tensor, value: Tensor) -> None:
    """Store new keys and values without attending; arguments as for :func:`cached_attention`.

    Raises:
        ValueError: They do not fit the cache; nothing was stored.
        TypeError: Likewise.
    """
    check_fits(storage, key, value)
    if torch.compiler.is_compiling():
        _append(key, value, *_op_arguments(storage))
        storage.count_appended(key.shape[2])
    else:
        with torch.no_grad():
            _store(storage, key, value)


def restore(storage: LayerStorage, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return cached keys and values in the model's dtype, with the precision of the cache.

    Args:
        storage: The cache of a layer.
        position: First position for each row, integer ``[B]``; negative positions are padding.
        length: Positions per row.

    Returns:
        Keys ``[B, Hkv, length, D]`` and values ``[B, Hkv, length, Dv]``; zeros where nothing is stored.

    Raises:
        ValueError: ``position`` is not integer ``[B]``, or on another device than the cache, or ``length`` is invalid.
        TypeError: ``position`` is not a tensor.
    """
    check_count("length", length)
    _check_positions("position", position, storage.lengths, "the cache")
    if torch.compiler.is_compiling():
        keys, values = _restore(position, length, *_op_arguments(storage))
        return keys, values
    with torch.no_grad():
        return _restore_eagerly(storage, position, length)


def check_fits(storage: LayerStorage, key: Tensor, value: Tensor) -> None:
    """Check that new keys and values fit a cache.

    Raises:
        ValueError: Batch, heads, head dimensions or the device differ, or ``key`` and ``value`` differ in length.
        TypeError: They are not tensors, or of another dtype.
    """
    for name, tensor, stored in (("key", key, storage.key_residual), ("value", value, storage.value_residual)):
        check_kind(name, tensor, stored, "the cache")
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be [batch, heads, tokens, head_dim], got shape {list(tensor.shape)}")
        batch, (_, heads, _, channels) = len(storage.lengths), stored.shape
        if (tensor.shape[0], tensor.shape[1], tensor.shape[3]) != (batch, heads, channels):
            raise ValueError(
                f"{name} must be [{batch}, {heads}, tokens, {channels}] as in the cache, got {list(tensor.shape)}; "
                "reset the cache, or use another one, for another batch"
            )
        if tensor.dtype != stored.dtype:
            raise TypeError(f"{name} must have the dtype of the cache, {stored.dtype}, got {tensor.dtype}")
    if key.shape[2] != value.shape[2]:
        raise ValueError(f"value must have as many tokens as key, {key.shape[2]}, got {value.shape[2]}")


def _check_query(query: Tensor, key: Tensor, storage: LayerStorage) -> None:
    check_kind("query", query, storage.key_residual, "the cache")
    batch, (_, heads, _, head_dim) = len(storage.lengths), storage.key_residual.shape
    if query.ndim != 4 or query.shape[0] != batch or query.shape[3] != head_dim or query.shape[1] % heads:
        raise ValueError(
            f"query must be [{batch}, a multiple of {heads}, tokens, {head_dim}] as in the cache, "
            f"got {list(query.shape)}"
        )
    if query.dtype != storage.key_residual.dtype:
        raise TypeError(f"query must have the dtype of the cache, {storage.key_residual.dtype}, got {query.dtype}")
    if key.shape[2] not in (0, query.shape[2]):
        raise ValueError(f"key must have as many tokens as query, {query.shape[2]}, got {key.shape[2]}")
    limit = storage.spare_tokens - storage.rolled_back
    if key.shape[2] == 0 and query.shape[2] > limit:
        raise ValueError(
            f"query must have at most {limit} tokens if their keys are stored already, got {query.shape[2]}; the cache "
            "no longer holds all keys that the first of them attends to in 16 bits"
        )


def _check_mask(mask: Tensor | None, position: Tensor | None, query: Tensor) -> Tensor | None:
    """Check a mask and the position of its first column; return the mask with four dimensions."""
    if mask is None:
        return None
    check_mask(mask, query, None)
    mask = of_four_dimensions(mask)
    assert mask is not None
    if mask.shape[3] == 1:
        return mask
    if position is None:
        raise ValueError(f"mask_position must say which position column 0 of mask {list(mask.shape)} is, got None")
    _check_positions("mask_position", position, query, "query")
    return mask


def _check_positions(name: str, position: Any, other: Tensor, whose: str) -> None:
    """Check one position per batch row; the batch is the first dimension of ``other``."""
    check_kind(name, position, other, whose)
    if not is_integer(position) or position.shape != (len(other),):
        raise ValueError(f"{name} must be integer [{len(other)}], got {position.dtype} {list(position.shape)}")


def _attend(
    query: Tensor, key: Tensor, value: Tensor, storage: LayerStorage, options: CacheOptions, backend: str
) -> Tensor:
    """Resolve the backend, which a compiler cannot trace because it queries the device, and run it."""
    if resolve_backend(backend, query.device, query.dtype) == "triton":
        storage.check_room(key.shape[2])
        from .chunked_prefill import chunk_attention
        from .decode import MAX_QUERIES, decode_step

        # A decode step stores its keys before its queries attend.
        limit = min(MAX_QUERIES, storage.spare_tokens)
        if query.shape[2] > limit or options.mask is not None or not options.is_causal:
            return chunk_attention(query, key, value, storage, options)
        return decode_step(query, key, value, storage, options)
    report("reference")
    out, _ = cached_attention_reference(query, key, value, storage, options)
    if key.shape[2]:
        _store(storage, key, value)
    return out


def _store(storage: LayerStorage, key: Tensor, value: Tensor) -> None:
    """Append in Triton where ``auto`` selects it, else in torch; the results have the same bits."""
    if resolve_backend("auto", key.device, key.dtype) == "triton":
        storage.check_room(key.shape[2])
        from .append import append_tokens

        append_tokens(storage, key, value)
    else:
        storage.append(key, value)


def _restore_eagerly(storage: LayerStorage, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Restore in Triton where ``auto`` selects it, else in torch; the results have the same bits."""
    if resolve_backend("auto", storage.key_residual.device, storage.key_residual.dtype) == "triton":
        from .restore import restore_dense

        return restore_dense(storage, position, length)
    return storage.restore(position, length)


def _op_arguments(storage: LayerStorage) -> tuple[list[Tensor], Tensor | None, str, list[int]]:
    """Return a storage as arguments of a custom op, which takes no objects."""
    numbers = [storage.window or 0, storage.rolled_back, storage.slack_tiles]
    return list(storage.tensors().values()), storage.unquantized_rows, storage.format, numbers


def _storage_of(tensors: list[Tensor], rows: Tensor | None, format: str, numbers: list[int]) -> LayerStorage:
    """Return the storage of :func:`_op_arguments`."""
    fields: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
    fields |= {"unquantized_rows": rows, "rolled_back": numbers[1], "slack_tiles": numbers[2]}
    return LayerStorage(format, numbers[0] or None, **fields)


@torch.library.custom_op("dma_kernels::cached_attention", mutates_args=("tensors",))
def _cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: list[Tensor],
    rows: Tensor | None,
    format: str,
    numbers: list[int],
    scale: float,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    mask: Tensor | None,
    mask_position: Tensor | None,
    backend: str,
) -> Tensor:
    options = CacheOptions(scale, is_causal, window, softcap, sinks, mask, mask_position)
    return _attend(query, key, value, _storage_of(tensors, rows, format, numbers), options, backend)


@_cached_attention.register_fake
def _(query, key, value, *args, **kwargs):  # type: ignore[no-untyped-def]
    batch, heads, length, _ = query.shape
    return query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)


@torch.library.custom_op("dma_kernels::cache_append", mutates_args=("tensors",))
def _append(
    key: Tensor, value: Tensor, tensors: list[Tensor], rows: Tensor | None, format: str, numbers: list[int]
) -> None:
    _store(_storage_of(tensors, rows, format, numbers), key, value)


@torch.library.custom_op("dma_kernels::cache_restore", mutates_args=())
def _restore(
    position: Tensor, length: int, tensors: list[Tensor], rows: Tensor | None, format: str, numbers: list[int]
) -> tuple[Tensor, Tensor]:
    return _restore_eagerly(_storage_of(tensors, rows, format, numbers), position, length)


@_restore.register_fake
def _(position, length, tensors, *args):  # type: ignore[no-untyped-def]
    named = dict(zip(TENSORS, tensors, strict=True))
    stored, batch = (named["key_residual"], named["value_residual"]), len(named["lengths"])
    return tuple(x.new_empty((batch, x.shape[1], length, x.shape[3])) for x in stored)


class _NoGradient(torch.autograd.Function):
    """Identity that cannot be differentiated."""

    @staticmethod
    def forward(context: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "attention over a cache has no gradient; compute it under torch.no_grad(), or use another attention "
            "(Transformers: attn_implementation='sdpa') and cache where a gradient is needed"
        )
