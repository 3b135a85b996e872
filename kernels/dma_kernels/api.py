"""The public door of the attention operation: validate, then dispatch to one backend, explicitly.

A backend that is asked for by name runs or raises; nothing falls back silently. The operation is a registered custom
op, so that ``torch.compile(fullgraph=True)`` and ``torch.export`` see one node, whichever backend runs inside it.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .numerics.geometry import AttentionGeometry
from .numerics.recipe import RECIPE_FIELDS, Recipe
from .prefill.backend import attention_triton
from .reference.attention import attention_gradient, attention_reference
from .runtime.chip import resolve_backend
from .runtime.replay import Call, call_of, tensor_kind

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MIN_HEAD_DIM, MAX_HEAD_DIM = 1, 256
_GEOMETRY = (
    *("q_offset", "kv_offset", "q_offset_rows", "kv_offset_rows", "kv_range", "mask", "sinks"),
    *("is_causal", "window", "scale", "softcap"),
)
"""Arguments of the custom ops behind query, key and value."""
_HASHED = (int, float, bool, str, type(None))


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    q_offset: int | Tensor | None = ...,
    kv_offset: int | Tensor = ...,
    kv_range: Tensor | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    mask: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    q_offset: int | Tensor | None = ...,
    kv_offset: int | Tensor = ...,
    kv_range: Tensor | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    mask: Tensor | None = ...,
    return_lse: Literal[True],
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


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
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute diagonal-tiled mixed-precision attention (arXiv 2604.03950).

    Its gradient goes straight through the rounding: it is that of the attention which the recipe approximates, computed
    in torch on every backend (:func:`~dma_kernels.reference.attention.attention_gradient`). The logarithms have none.

    Positions are counted from the first key that a batch row may see: query ``i`` stands at ``q_offset + i``, key
    ``j`` at ``kv_offset + j``. They decide what is causal, what the window reaches and which tiles are high.

    Args:
        query: ``[B, Hq, Tq, D]`` in bf16, fp16, fp32 or fp64, ``D <= 256``, any strides.
        key: ``[B, Hkv, Tk, D]``, the same dtype and device; ``Hkv`` divides ``Hq`` (GQA, MQA).
        value: ``[B, Hkv, Tk, Dv]``, the same dtype and device; ``Dv <= 256``.
        recipe: The precision of every tile.
        is_causal: Whether a query sees no key behind its own position.
        scale: Factor of the scores; ``D ** -0.5`` by default.
        q_offset: Position of query 0: an int, or one per batch row, integer ``[B]``. By default the queries are the
            last positions of a causal sequence (``kv_offset + Tk - Tq``), and stand at 0 in a bidirectional one.
        kv_offset: Position of key 0: an int, or integer ``[B]``. Minus the padding for a left-padded row.
        kv_range: Indices of the first visible key and of the one past the last, integer ``[B, 2]``; all by default.
            What lies outside ``0..Tk`` is cut off; a row whose range is empty sees no key.
        window: Sliding window. Causal: a query sees its own position and the ``window - 1`` before it. Bidirectional:
            positions at a distance of at most ``window``.
        softcap: Caps scores: ``softcap * tanh(score / softcap)``, after ``scale``.
        sinks: One logit per query head, ``[Hq]``, that takes part in the softmax without a value.
        mask: Boolean, broadcastable to ``[B, Hq, Tq, Tk]``; a key is seen where it is true and the rest allows it.
        return_lse: Also return the natural logarithm of the softmax denominator (sinks included), ``[B, Hq, Tq]``,
            fp32 (fp64 for fp64).
        backend: ``reference`` (torch, any device), ``triton`` (kernels; bf16 and fp16 on CUDA), or ``auto``:
            Triton where it can run on CUDA, the reference elsewhere.

    Returns:
        ``[B, Hq, Tq, Dv]`` in the dtype of ``query``, laid out so that ``.transpose(1, 2)`` is contiguous. A row that
        sees no key is 0. With ``return_lse`` the pair of it and the logarithms (in such a row the sink logit, or
        ``-inf`` without sinks).

    Raises:
        ValueError: Shapes, head dimensions, options or the backend's name are not as described.
        TypeError: A dtype, an offset or the recipe is not as described.
        RuntimeError: The backend that was asked for cannot run on this device.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a dma_kernels.Recipe, got {type(recipe).__name__}")
    call = None
    needs_op = _needs_op(query, key, value, sinks)
    if not needs_op and kv_range is None:
        options = (is_causal, scale, q_offset, kv_offset, window, softcap, return_lse, backend)
        if all(type(option) in _HASHED for option in options):
            inputs = (query, key, value, sinks, mask, None)
            call = call_of(recipe, *map(tensor_kind, inputs), *options)
            results = call.repeat(inputs)  # only what was valid has been recorded
            if results is not None:
                return (results[0], results[1]) if return_lse else results[0]
    _check_tensors(query, key, value, sinks, mask, kv_range)
    q_len, head_dim = query.shape[2:]
    kv_len = key.shape[2]
    if scale is None:
        scale = head_dim**-0.5
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and not 0.0 < number < math.inf:
            raise ValueError(f"{name} must be a positive finite number, got {number!r}")
    if window is not None and not (isinstance(window, int) and window >= 1):
        raise ValueError(f"window must be an integer of at least 1, got {window!r}")
    kv_base, kv_rows = _split_offset("kv_offset", kv_offset, query)
    if q_offset is None:
        q_base, q_rows = (kv_base + kv_len - q_len, kv_rows) if is_causal else (0, None)
    else:
        q_base, q_rows = _split_offset("q_offset", q_offset, query)
    arguments = (
        query,
        key,
        value,
        q_base,
        kv_base,
        q_rows,
        kv_rows,
        kv_range,
        mask,
        sinks,
        is_causal,
        window,
        float(scale),
        None if softcap is None else float(softcap),
        backend,
    )
    if needs_op:
        results = _attention(*arguments, **{name: getattr(recipe, name) for name in RECIPE_FIELDS})
    else:
        results = _compute(*arguments, recipe, return_lse, call)
    return (results[0], results[1]) if return_lse else results[0]


def _needs_op(*tensors: Tensor | None) -> bool:
    """Whether something looks on that has to see one operation: a compiler, autograd, a tensor mode or subclass.

    Otherwise the backend is called directly, which spares some 70 microseconds of dispatching a call.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    given = [tensor for tensor in tensors if tensor is not None]
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta for tensor in given):
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)


def _compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offset: int,
    kv_offset: int,
    q_offset_rows: Tensor | None,
    kv_offset_rows: Tensor | None,
    kv_range: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    backend: str,
    recipe: Recipe,
    return_lse: bool,
    call: Call | None,
) -> tuple[Tensor, ...]:
    """Run a backend, resolved in here because a compiler cannot trace questions to the device."""
    if resolve_backend(backend, query.device, query.dtype) == "triton":
        return attention_triton(
            query,
            key,
            value,
            recipe,
            q_offset=q_offset,
            kv_offset=kv_offset,
            q_offset_rows=q_offset_rows,
            kv_offset_rows=kv_offset_rows,
            kv_range=kv_range,
            mask=mask,
            sinks=sinks,
            is_causal=is_causal,
            window=window,
            scale=scale,
            softcap=softcap,
            return_lse=return_lse,
            call=call,
        )
    geometry = _geometry(key, q_offset, kv_offset, q_offset_rows, kv_offset_rows, kv_range, mask, is_causal, window)
    return attention_reference(query, key, value, geometry, recipe, scale=scale, softcap=softcap, sinks=sinks)


@torch.library.custom_op("dma_kernels::attention", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offset: int,
    kv_offset: int,
    q_offset_rows: Tensor | None,
    kv_offset_rows: Tensor | None,
    kv_range: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    backend: str,
    low: str,
    low_q: str | None,
    low_k: str | None,
    low_v: str | None,
    high: str,
    diagonal_tiles: int,
    sink_tiles: int,
    scale_rounding: str,
    shared_scale: str,
    smooth_k: bool,
    rotate: bool,
    pv: str,
) -> tuple[Tensor, Tensor]:
    """Run a backend. A custom op takes plain arguments only, hence the recipe field by field."""
    recipe = Recipe(
        low=low,
        low_q=low_q,
        low_k=low_k,
        low_v=low_v,
        high=high,
        diagonal_tiles=diagonal_tiles,
        sink_tiles=sink_tiles,
        scale_rounding=scale_rounding,
        shared_scale=shared_scale,
        smooth_k=smooth_k,
        rotate=rotate,
        pv=pv,
    )
    out, lse = _compute(
        query,
        key,
        value,
        q_offset,
        kv_offset,
        q_offset_rows,
        kv_offset_rows,
        kv_range,
        mask,
        sinks,
        is_causal,
        window,
        scale,
        softcap,
        backend,
        recipe,
        True,
        None,
    )
    return out, lse


@_attention.register_fake
def _(query, key, value, *args, **kwargs):  # type: ignore[no-untyped-def]
    return _empty_outputs(query, value)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    named = dict(zip(_GEOMETRY, inputs[3:14], strict=True))
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    ctx.save_for_backward(*inputs[:3], *tensors.values())
    ctx.tensor_names = tuple(tensors)
    ctx.options = {name: value for name, value in named.items() if name not in tensors}
    ctx.count = len(inputs)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_out: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, *others = ctx.saved_tensors
    named = ctx.options | dict(zip(ctx.tensor_names, others, strict=True))
    gradients = _attention_backward(grad_out, query, key, value, *(named[name] for name in _GEOMETRY))
    all_gradients: list[Tensor | None] = [None] * ctx.count
    all_gradients[:3] = gradients[:3]
    if named["sinks"] is not None:
        all_gradients[3 + _GEOMETRY.index("sinks")] = gradients[3]
    return tuple(all_gradients)


_attention.register_autograd(_backward, setup_context=_save_for_backward)


@torch.library.custom_op("dma_kernels::attention_backward", mutates_args=())
def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offset: int,
    kv_offset: int,
    q_offset_rows: Tensor | None,
    kv_offset_rows: Tensor | None,
    kv_range: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and sinks; without sinks the last is empty."""
    geometry = _geometry(key, q_offset, kv_offset, q_offset_rows, kv_offset_rows, kv_range, mask, is_causal, window)
    grad_q, grad_k, grad_v, grad_sinks = attention_gradient(
        grad_out, query, key, value, geometry, scale=scale, softcap=softcap, sinks=sinks
    )
    return grad_q, grad_k, grad_v, query.new_empty(0) if grad_sinks is None else grad_sinks


@_attention_backward.register_fake
def _(grad_out, query, key, value, *args, **kwargs):  # type: ignore[no-untyped-def]
    sinks = args[_GEOMETRY.index("sinks")]
    empty = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return (*(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)), empty)


def _geometry(
    key: Tensor,
    q_offset: int,
    kv_offset: int,
    q_offset_rows: Tensor | None,
    kv_offset_rows: Tensor | None,
    kv_range: Tensor | None,
    mask: Tensor | None,
    is_causal: bool,
    window: int | None,
) -> AttentionGeometry:
    batch, kv_len = key.shape[0], key.shape[2]
    if kv_range is None:
        kv_range = torch.tensor([[0, kv_len]], device=key.device).expand(batch, 2)
    return AttentionGeometry(
        q_position=_row_positions(q_offset, q_offset_rows, batch, key.device),
        kv_position=_row_positions(kv_offset, kv_offset_rows, batch, key.device),
        kv_range=kv_range.long(),
        is_causal=is_causal,
        window=window,
        mask=mask,
    )


def _empty_outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, q_heads, q_len, _ = query.shape
    out = query.new_empty((batch, q_len, q_heads, value.shape[-1])).transpose(1, 2)
    lse = query.new_empty((batch, q_heads, q_len), dtype=torch.promote_types(query.dtype, torch.float32))
    return out, lse


def _row_positions(offset: int, rows: Tensor | None, batch: int, device: torch.device) -> Tensor:
    positions = torch.full((batch,), offset, dtype=torch.int64, device=device)
    return positions if rows is None else positions + rows


def _split_offset(name: str, offset: int | Tensor, query: Tensor) -> tuple[int, Tensor | None]:
    """Split an offset into a common int and, for a tensor, one addend per batch row."""
    batch = query.shape[0]
    if isinstance(offset, int):
        return offset, None
    if not isinstance(offset, Tensor):
        raise TypeError(f"{name} must be an int or an integer tensor of shape [{batch}], got {offset!r}")
    is_shaped = offset.ndim == 0 or (offset.ndim == 1 and (offset.shape[0] == 1 or offset.shape[0] == batch))
    if not (_is_integer(offset) and is_shaped):
        raise ValueError(
            f"{name} must be an int or an integer tensor of shape [{batch}], got {offset.dtype} {list(offset.shape)}"
        )
    if offset.device != query.device:
        raise ValueError(f"{name} must be on the device of query, {query.device}, got {offset.device}")
    return 0, offset.expand(batch)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _check_tensors(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Tensor | None, kv_range: Tensor | None
) -> None:
    shapes = {"query": query, "key": key, "value": value}
    for name, tensor in shapes.items():
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be [batch, heads, tokens, head_dim], got shape {list(tensor.shape)}")
    if query.dtype not in DTYPES:
        raise TypeError(f"query must be bf16, fp16, fp32 or fp64, got {query.dtype}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have the dtype of query, {query.dtype}, got {tensor.dtype}")
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(f"{name} must have the batch size of query, {query.shape[0]}, got {tensor.shape[0]}")
    optional = {"sinks": sinks, "mask": mask, "kv_range": kv_range}
    for name, tensor in (shapes | {n: t for n, t in optional.items() if t is not None}).items():
        if tensor.device != query.device:
            raise ValueError(f"{name} must be on the device of query, {query.device}, got {tensor.device}")
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
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if sinks is not None and sinks.shape != (query.shape[1],):
        raise ValueError(f"sinks must be [{query.shape[1]}], one logit per query head, got {list(sinks.shape)}")
    if sinks is not None and not sinks.is_floating_point():
        raise TypeError(f"sinks must be floating point, got {sinks.dtype}")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be boolean, got {mask.dtype}")
        if mask.ndim != 4 or any(size not in (1, whole) for size, whole in zip(mask.shape, full, strict=True)):
            raise ValueError(f"mask must be broadcastable to {list(full)}, got {list(mask.shape)}")
    if kv_range is not None and (not _is_integer(kv_range) or kv_range.shape != (query.shape[0], 2)):
        raise ValueError(f"kv_range must be integer [{query.shape[0]}, 2], got {kv_range.dtype} {list(kv_range.shape)}")
