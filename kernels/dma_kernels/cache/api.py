"""The public door of attention over a cache: validate, attend, store the new keys; one backend, explicitly.

The operation writes into the tensors of a :class:`~dma_kernels.cache.storage.LayerStorage`. Seen by a compiler it is a
custom op that says so, and one step of a model with a cache of fixed size is one graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..numerics.arguments import check_kind, check_mask, check_options, check_sinks, is_integer, of_four_dimensions
from ..numerics.geometry import MAX_POSITION
from ..runtime.chip import resolve_backend
from ..runtime.reports import report
from .reference import cached_attention_reference
from .storage import TENSORS, LayerStorage


class CachedOptions(NamedTuple):
    """What a call of :func:`cached_attention` says beside its tensors of tokens and its storage, checked.

    A tuple, because PyTorch 2.11 does not trace what lists the fields of a dataclass. Each field is an argument of the
    custom op, in this order, and explained at the function.
    """

    is_causal: bool
    window: int | None
    scale: float
    softcap: float | None
    sinks: Tensor | None
    mask: Tensor | None
    mask_position: Tensor | None

    @property
    def of_kernels(self) -> dict[str, Any]:
        """Those of the decode kernel, by name."""
        return {name: getattr(self, name) for name in ("scale", "window", "softcap", "sinks")}


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
    """Attend to the keys of a cache and to new ones, and store the new ones. Inference only.

    Exact attention to what the cache holds: raw keys and values in the sinks and in the band of each query, dequantised
    ones elsewhere (:mod:`dma_kernels.cache.storage`). The last query stands at the position of the last key. A causal
    call with many new tokens equals as many calls with one. The body must have room for the tiles that the new keys
    complete (:meth:`LayerStorage.reserve`).

    Args:
        query: ``[B, Hq, T, D]`` in the dtype of the storage.
        key: New keys, raw, ``[B, Hkv, T, D]``; ``None`` if they are stored already (of at most
            :attr:`LayerStorage.spare_tokens`).
        value: New values, raw, ``[B, Hkv, T, Dv]``; ``None`` with ``key``.
        storage: The cache of the layer; written in place.
        is_causal: Whether a query sees no key after its own position.
        window: Sliding window; not larger than that of the storage, if that has one.
        scale: Factor of the scores; ``D ** -0.5`` by default.
        softcap: Caps scores: ``softcap * tanh(score / softcap)``, after ``scale``.
        sinks: One logit per query head, ``[Hq]``, that takes part in the softmax without a value.
        mask: Boolean, broadcastable to ``[B, Hq, T, K]``: of ``K`` consecutive positions, those that may be seen.
        mask_position: The position of column 0 of ``mask``, integer ``[B]``; needed unless ``K`` is 1.
        backend: ``reference``, ``triton`` or ``auto``, as for :func:`dma_kernels.attention`.

    Returns:
        ``[B, Hq, T, Dv]`` in the dtype of ``query``; 0 in rows that see no key.

    Raises:
        ValueError: Shapes, devices or options are not as described, or there is no room; nothing was stored.
        TypeError: Likewise, of kinds and dtypes.
        RuntimeError: The backend that was asked for cannot run here; a gradient is asked for, in ``backward``.
    """
    if (key is None) != (value is None):
        raise ValueError("key and value must be given together, or both be None")
    if key is None or value is None:
        key, value = storage.no_keys()
    check_fits(storage, key, value)
    _check_query(query, key, storage)
    check_options(is_causal=is_causal, window=window, scale=scale, softcap=softcap)
    if storage.window is not None and (window is None or window > storage.window):
        raise ValueError(f"window must be at most {storage.window}, what the cache keeps; got {window!r}")
    if window is not None and window >= MAX_POSITION:
        window = None  # it reaches every position, and kernels compute with int32
    mask = _check_mask(mask, mask_position, query)
    if sinks is not None:
        check_sinks(sinks, query)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    softcap = None if softcap is None else float(softcap)
    options = CachedOptions(is_causal, window, scale, softcap, sinks, mask, mask_position)
    if torch.compiler.is_compiling():
        out: Tensor = _cached_attention(query, key, value, *_pieces(storage), *options, backend)
        storage.replace_taken_back(key.shape[2])
        return out
    with torch.no_grad():
        out = _compute(query, key, value, storage, options, backend)
    inputs = [query, key, value] if sinks is None else [query, key, value, sinks]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return _NoGradient.apply(out, *inputs)  # type: ignore[no-any-return,no-untyped-call]
    return out


def append(storage: LayerStorage, key: Tensor, value: Tensor) -> None:
    """Store new keys and values that no query of this package attends to; arguments as :func:`cached_attention`'s.

    Raises:
        ValueError: They do not fit the storage; nothing was stored.
        TypeError: Likewise.
    """
    check_fits(storage, key, value)
    if torch.compiler.is_compiling():
        _append(key, value, *_pieces(storage))
        storage.replace_taken_back(key.shape[2])
    else:
        with torch.no_grad():
            _store(storage, key, value)


def restore(storage: LayerStorage, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return keys and values as the model made them, to the precision of the cache.

    Args:
        storage: The cache of a layer.
        position: The first position that is wanted of each row, integer ``[B]``; below 0 is padding.
        length: How many.

    Returns:
        Keys ``[B, Hkv, length, D]`` and values ``[B, Hkv, length, Dv]``; zeros where nothing is stored.

    Raises:
        ValueError: ``position`` is not integer ``[B]``, or on another device than the cache.
        TypeError: It is no tensor.
    """
    _check_positions("position", position, storage.lengths, "the cache")
    if torch.compiler.is_compiling():
        keys, values = _restore(position, length, *_pieces(storage))
        return keys, values
    with torch.no_grad():
        return _restore_eagerly(storage, position, length)


def check_fits(storage: LayerStorage, key: Tensor, value: Tensor) -> None:
    """Check that new keys and values are of the kind that a storage holds.

    Raises:
        ValueError: Batch, heads, head dimensions or the device differ, or ``key`` and ``value`` have not one length.
        TypeError: They are no tensors, or of another dtype.
    """
    for name, tensor, tail in (("key", key, storage.key_tail), ("value", value, storage.value_tail)):
        check_kind(name, tensor, tail, "the cache")
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be [batch, heads, tokens, head_dim], got shape {list(tensor.shape)}")
        batch, (_, heads, _, channels) = len(storage.lengths), tail.shape
        if (tensor.shape[0], tensor.shape[1], tensor.shape[3]) != (batch, heads, channels):
            raise ValueError(
                f"{name} must be [{batch}, {heads}, tokens, {channels}] as in the cache, got {list(tensor.shape)}; "
                "reset the cache, or use another one, for another batch"
            )
        if tensor.dtype != tail.dtype:
            raise TypeError(f"{name} must have the dtype of the cache, {tail.dtype}, got {tensor.dtype}")
    if key.shape[2] != value.shape[2]:
        raise ValueError(f"value must have as many tokens as key, {key.shape[2]}, got {value.shape[2]}")


def _check_query(query: Tensor, key: Tensor, storage: LayerStorage) -> None:
    check_kind("query", query, storage.key_tail, "the cache")
    batch, (_, heads, _, head_dim) = len(storage.lengths), storage.key_tail.shape
    if query.ndim != 4 or query.shape[0] != batch or query.shape[3] != head_dim or query.shape[1] % heads:
        raise ValueError(
            f"query must be [{batch}, a multiple of {heads}, tokens, {head_dim}] as in the cache, "
            f"got {list(query.shape)}"
        )
    if query.dtype != storage.key_tail.dtype:
        raise TypeError(f"query must have the dtype of the cache, {storage.key_tail.dtype}, got {query.dtype}")
    if key.shape[2] not in (0, query.shape[2]):
        raise ValueError(f"key must have as many tokens as query, {query.shape[2]}, got {key.shape[2]}")


def _check_mask(mask: Tensor | None, position: Tensor | None, query: Tensor) -> Tensor | None:
    """Check a mask and the position of its first column; return it with four dimensions."""
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
    """Check a position for each row of the batch, which is the first dimension of another tensor."""
    check_kind(name, position, other, whose)
    if not is_integer(position) or position.shape != (len(other),):
        raise ValueError(f"{name} must be integer [{len(other)}], got {position.dtype} {list(position.shape)}")


def _compute(
    query: Tensor, key: Tensor, value: Tensor, storage: LayerStorage, options: CachedOptions, backend: str
) -> Tensor:
    """Run a backend, resolved in here because a compiler cannot trace questions to the device."""
    if resolve_backend(backend, query.device, query.dtype) == "triton":
        storage.check_room(key.shape[2])
        from .chunk import chunk_attention
        from .decode import MAX_QUERIES, decode_attention, decode_step

        most = min(MAX_QUERIES, storage.spare_tokens)  # that are stored before they are answered
        if query.shape[2] > most or options.mask is not None or not options.is_causal:
            return chunk_attention(query, key, value, storage, **options._asdict())
        if key.shape[2]:
            return decode_step(query, key, value, storage, **options.of_kernels)
        return decode_attention(query, storage, return_lse=False, **options.of_kernels)[0]
    report("reference")
    out, _ = cached_attention_reference(query, key, value, storage, **options._asdict())
    if key.shape[2]:
        _store(storage, key, value)
    return out


def _store(storage: LayerStorage, key: Tensor, value: Tensor) -> None:
    """Append in one launch where Triton runs by itself, and in torch elsewhere: to the bit the same."""
    if resolve_backend("auto", key.device, key.dtype) == "triton":
        storage.check_room(key.shape[2])
        from .append import append_tokens

        append_tokens(storage, key, value)
    else:
        storage.append(key, value)


def _restore_eagerly(storage: LayerStorage, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Restore in one launch where Triton runs by itself, and in torch elsewhere: to the bit the same."""
    tail = storage.key_tail
    if resolve_backend("auto", tail.device, tail.dtype) == "triton":
        from .restore import restore_dense

        return restore_dense(storage, position, length)
    return storage.restore(position, length)


def _pieces(storage: LayerStorage) -> tuple[list[Tensor], str, int | None, int, Tensor | None, int]:
    """Return a storage as an op takes it, for plain arguments are all that one takes."""
    tensors = list(storage.tensors().values())
    return tensors, storage.format, storage.window, storage.taken_back, storage.raw_rows, storage.slack_tiles


def _storage_of(
    tensors: list[Tensor], format: str, window: int | None, taken_back: int, raw_rows: Tensor | None, slack_tiles: int
) -> LayerStorage:
    named: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
    return LayerStorage(format, window, **named, taken_back=taken_back, raw_rows=raw_rows, slack_tiles=slack_tiles)


@torch.library.custom_op("dma_kernels::cached_attention", mutates_args=("tensors",))
def _cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: list[Tensor],
    format: str,
    storage_window: int | None,
    taken_back: int,
    raw_rows: Tensor | None,
    slack_tiles: int,
    is_causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    mask: Tensor | None,
    mask_position: Tensor | None,
    backend: str,
) -> Tensor:
    storage = _storage_of(tensors, format, storage_window, taken_back, raw_rows, slack_tiles)
    options = CachedOptions(is_causal, window, scale, softcap, sinks, mask, mask_position)
    return _compute(query, key, value, storage, options, backend)


@_cached_attention.register_fake
def _(query, key, value, *args, **kwargs):  # type: ignore[no-untyped-def]
    batch, heads, length, _ = query.shape
    return query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)


@torch.library.custom_op("dma_kernels::cache_append", mutates_args=("tensors",))
def _append(
    key: Tensor,
    value: Tensor,
    tensors: list[Tensor],
    format: str,
    storage_window: int | None,
    taken_back: int,
    raw_rows: Tensor | None,
    slack_tiles: int,
) -> None:
    _store(_storage_of(tensors, format, storage_window, taken_back, raw_rows, slack_tiles), key, value)


@torch.library.custom_op("dma_kernels::cache_restore", mutates_args=())
def _restore(
    position: Tensor,
    length: int,
    tensors: list[Tensor],
    format: str,
    storage_window: int | None,
    taken_back: int,
    raw_rows: Tensor | None,
    slack_tiles: int,
) -> tuple[Tensor, Tensor]:
    storage = _storage_of(tensors, format, storage_window, taken_back, raw_rows, slack_tiles)
    return _restore_eagerly(storage, position, length)


@_restore.register_fake
def _(position, length, tensors, *args):  # type: ignore[no-untyped-def]
    named = dict(zip(TENSORS, tensors, strict=True))
    tails, batch = (named["key_tail"], named["value_tail"]), len(named["lengths"])
    return tuple(tail.new_empty((batch, tail.shape[1], length, tail.shape[3])) for tail in tails)


class _NoGradient(torch.autograd.Function):
    """Passes a result on, and refuses to differentiate it."""

    @staticmethod
    def forward(context: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "attention over a cache has no gradient; compute it under torch.no_grad(), or use another attention "
            "(Transformers: attn_implementation='sdpa') and cache where a gradient is needed"
        )
