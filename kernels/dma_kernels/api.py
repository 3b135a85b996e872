"""The public door of the attention operation: validate, then dispatch to one backend, explicitly.

A backend that is asked for by name runs or raises; nothing falls back silently. The operation is a registered custom
op, so that ``torch.compile(fullgraph=True)`` and ``torch.export`` see one node, whichever backend runs inside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from types import FunctionType
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .numerics.arguments import check_kind, check_mask, check_options, check_sinks, is_int, is_integer
from .numerics.geometry import MAX_POSITION, OPTION_FIELDS, AttentionGeometry, AttentionOptions
from .numerics.recipe import RECIPE_FIELDS, Recipe
from .numerics.saturation import warn_if_saturated
from .reference.attention import attention_gradient, attention_reference
from .runtime.chip import check_backend, resolve_backend
from .runtime.reports import report

if TYPE_CHECKING:
    from .runtime.replay import Call

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MIN_HEAD_DIM, MAX_HEAD_DIM = 1, 256
_HASHED = (int, float, bool, str, type(None))

P = ParamSpec("P")


def _output_of(function: Callable[P, tuple[Tensor, Tensor]]) -> Callable[P, Tensor]:
    # The same function under the name that Python is to give where it is called wrongly.
    both = FunctionType(function.__code__, function.__globals__)
    both.__name__ = both.__qualname__ = "attention"
    both.__kwdefaults__ = function.__kwdefaults__
    both.__annotations__ = function.__annotations__ | {"return": "Tensor"}

    @functools.wraps(both)
    def attention(*arguments: P.args, **options: P.kwargs) -> Tensor:
        out: Tensor = both(*arguments, **options)[0]
        return out

    return attention


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
    """Compute diagonal-tiled mixed-precision attention (arXiv 2604.03950).

    Its gradient goes straight through the rounding: it is that of the attention which the recipe approximates, computed
    in torch on every backend (:func:`~dma_kernels.reference.attention.attention_gradient`). Skipped tiles take part in
    it. The logarithms have none.

    Positions are counted from the first key that a batch row may see: query ``i`` stands at ``q_offset + i``, key
    ``j`` at ``kv_offset + j``. They decide what is causal, what the window reaches and which tiles are high.

    Args:
        query: ``[B, Hq, Tq, D]`` in bf16, fp16, fp32 or fp64, ``D <= 256``, any strides.
        key: ``[B, Hkv, Tk, D]``, the same dtype and device; ``Hkv`` divides ``Hq`` (GQA, MQA).
        value: ``[B, Hkv, Tk, Dv]``, the same dtype and device; ``Dv <= 256``.
        recipe: The precision of every tile.
        is_causal: Whether a query sees no key after its own position.
        scale: Factor of the scores; ``D ** -0.5`` by default.
        q_offset: Position of query 0: an int, or one per batch row, integer ``[B]``. By default the queries are the
            last positions of a causal sequence (``kv_offset + Tk - Tq``), and stand at 0 in a bidirectional one. An int
            of a causal call is not below that of ``kv_offset``, except for that default.
        kv_offset: Position of key 0: an int, or integer ``[B]``. Minus the padding for a left-padded row.
        kv_range: Indices of the first visible key and of the one past the last, integer ``[B, 2]``; all by default.
            What lies outside ``0..Tk`` is cut off; a row whose range is empty sees no key.
        window: Sliding window. Causal: a query sees its own position and the ``window - 1`` before it. Bidirectional:
            positions at a distance of at most ``window``.
        softcap: Caps scores: ``softcap * tanh(score / softcap)``, after ``scale``.
        sinks: One logit per query head, ``[Hq]``, that takes part in the softmax without a value.
        mask: Boolean, broadcastable to ``[B, Hq, Tq, Tk]``, as ``[Tq, Tk]`` is; a key is seen where it is true and the
            rest allows it.
        tile_counts: int64 ``[Hq, 2]``, contiguous; needs a recipe with ``skip_threshold``. The call adds, for each
            query head, the number of pairs of query block and low tile that it skipped, and the number that it
            examined. Only blocks of 64 positions that the call holds entirely are counted, with the tiles of which they
            see a key.
        backend: ``reference`` (torch, any device), ``triton`` (kernels; bf16 and fp16 on CUDA), or ``auto``:
            Triton where it can run on CUDA, the reference elsewhere.

    Returns:
        Of ``attention`` the output, ``[B, Hq, Tq, Dv]`` in the dtype of ``query``; ``.transpose(1, 2)`` makes it
        contiguous; a row that sees no key is 0. Of ``attention_with_lse`` also the natural logarithm of the softmax
        denominator, sinks included, ``[B, Hq, Tq]``, fp32 (fp64 for fp64); in such a row the sink logit, or ``-inf``
        without sinks.

    Raises:
        ValueError: Shapes, head dimensions, options or the backend's name are not as described.
        TypeError: A tensor, a dtype, an option or the recipe is of another kind.
        RuntimeError: The backend that was asked for cannot run on this device.
        NotImplementedError: Derivatives are computed in forward mode.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a dma_kernels.Recipe, got {type(recipe).__name__}")
    call = None
    needs_op = _needs_op(query, key, value, sinks, mask, tile_counts)
    if not needs_op and kv_range is None and _may_repeat(query, backend):
        from .runtime.replay import call_of, tensor_kind

        asked = (is_causal, scale, q_offset, kv_offset, window, softcap, backend)
        if all(type(option) in _HASHED for option in asked):
            inputs = (query, key, value, sinks, mask, None, tile_counts)
            call = call_of(recipe, *map(tensor_kind, inputs), *asked)
            results = call.repeat(inputs)  # only what was valid has been recorded
            if results is not None:
                if recipe.pv == "fp8":
                    warn_if_saturated()
                return results[0], results[1]
    mask = _check_tensors(query, key, value, sinks, mask, kv_range)
    _check_tile_counts(tile_counts, query, recipe)
    check_backend(backend)
    check_options(is_causal=is_causal, window=window, scale=scale, softcap=softcap)
    kv_base, kv_rows = _split_offset("kv_offset", kv_offset, query)
    q_base, q_rows = (None, None) if q_offset is None else _split_offset("q_offset", q_offset, query)
    is_plain = is_causal and q_rows is None and kv_rows is None
    if is_plain and q_base is not None and q_base < kv_base and q_base < kv_base + key.shape[2] - query.shape[2]:
        raise ValueError(
            f"q_offset must be at least kv_offset, {kv_base}, where attention is causal and a query before key 0 sees "
            f"nothing; got {q_base}"
        )
    options = (
        *(q_base, kv_base, q_rows, kv_rows, kv_range, mask, sinks, is_causal),
        None if window is None else min(window, 4 * MAX_POSITION),  # the operator takes int64
        query.shape[3] ** -0.5 if scale is None else float(scale),
        None if softcap is None else float(softcap),
    )
    if needs_op:
        numerics = (getattr(recipe, name) for name in RECIPE_FIELDS)
        out, lse, counts = _attention(query, key, value, *options, backend, tile_counts is not None, *numerics)
        if tile_counts is not None:
            tile_counts += counts
        return out, lse
    return _compute(query, key, value, recipe, AttentionOptions(*options), backend, tile_counts, call)


attention = _output_of(attention_with_lse)


def _needs_op(*tensors: Tensor | None) -> bool:
    """Whether something looks on that has to see one operation: a compiler, autograd, a tensor mode or subclass.

    Otherwise the backend is called directly, which spares some 70 microseconds of dispatching a call.

    Raises:
        NotImplementedError: Forward-mode differentiation looks on, which PyTorch would give zeros for an op.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if forward_ad._current_level >= 0 and any(map(_may_be_dual, given)):
        raise NotImplementedError(
            "attention has no derivative in forward mode, and one of its inputs is a dual tensor; use reverse mode "
            "(backward, torch.autograd.grad)"
        )
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta for tensor in given):
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)


def _may_repeat(query: Any, backend: str) -> bool:
    """Whether a call may launch kernels, which a later call can repeat; the reference does not import Triton."""
    return isinstance(query, Tensor) and query.is_cuda and backend != "reference"


def _may_be_dual(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor):
        return False
    if torch._C._functorch.is_batchedtensor(tensor):  # what is inside cannot be asked
        return True
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    options: AttentionOptions,
    backend: str,
    tile_counts: Tensor | None,
    call: Call | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a backend, resolved in here because a compiler cannot trace questions to the device."""
    if resolve_backend(backend, query.device, query.dtype) == "triton":
        from .prefill.backend import attention_triton

        if recipe.pv == "fp8":
            warn_if_saturated()  # by calls before this one, which the host did not wait for
        return attention_triton(query, key, value, recipe, options, tile_counts, call)
    report("reference")
    results = attention_reference(
        *(query, key, value, AttentionGeometry.of(options, query, key), recipe),
        scale=options.scale,
        softcap=options.softcap,
        sinks=options.sinks,
        tile_counts=tile_counts,
    )
    if recipe.pv == "fp8":
        warn_if_saturated()
    return results


_SCHEMA_TYPES = {"int": "SymInt", "int | None": "SymInt?", "Tensor | None": "Tensor?", "str | None": "str?"}
_SCHEMA_TYPES |= {"float | None": "float?"} | {name: name for name in ("bool", "float", "str")}


def _parameters(kind: type) -> list[str]:
    """Return the fields of a dataclass as parameters of an op, which takes plain arguments only."""
    return [f"{_SCHEMA_TYPES[str(field.type)]} {field.name}" for field in fields(kind)]


_TENSORS = ["Tensor query", "Tensor key", "Tensor value", *_parameters(AttentionOptions)]


def _run_op(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the logarithms, and counts of tiles, empty where they are not asked for."""
    count = len(OPTION_FIELDS)
    backend, counts_tiles = arguments[count : count + 2]
    recipe = Recipe(**dict(zip(RECIPE_FIELDS, arguments[count + 2 :], strict=True)))
    counts = query.new_zeros((query.shape[1] if counts_tiles else 0, 2), dtype=torch.int64)
    options = AttentionOptions(*arguments[:count])
    out, lse = _compute(query, key, value, recipe, options, backend, counts if counts_tiles else None)
    return out, lse, counts


_attention = torch.library.custom_op(
    "dma_kernels::attention",
    _run_op,
    mutates_args=(),
    schema=f"({', '.join([*_TENSORS, 'str backend', 'bool counts_tiles', *_parameters(Recipe)])})"
    " -> (Tensor, Tensor, Tensor)",
)


@_attention.register_fake
def _(query, key, value, *arguments):  # type: ignore[no-untyped-def]
    batch, q_heads, q_len, _ = query.shape
    out = query.new_empty((batch, q_len, q_heads, value.shape[-1])).transpose(1, 2)
    lse = query.new_empty((batch, q_heads, q_len), dtype=torch.promote_types(query.dtype, torch.float32))
    counts_tiles = arguments[len(OPTION_FIELDS) + 1]
    return out, lse, query.new_empty((q_heads if counts_tiles else 0, 2), dtype=torch.int64)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    named = dict(zip(OPTION_FIELDS, inputs[3:], strict=False))
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    ctx.save_for_backward(*inputs[:3], *tensors.values())
    ctx.tensor_names = tuple(tensors)
    ctx.options = {name: value for name, value in named.items() if name not in tensors}
    ctx.count = len(inputs)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad_out: Tensor, *_others: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, *others = ctx.saved_tensors
    named = ctx.options | dict(zip(ctx.tensor_names, others, strict=True))
    gradients = _attention_backward(grad_out, query, key, value, *(named[name] for name in OPTION_FIELDS))
    all_gradients: list[Tensor | None] = [None] * ctx.count
    all_gradients[:3] = gradients[:3]
    if named["sinks"] is not None:
        all_gradients[3 + OPTION_FIELDS.index("sinks")] = gradients[3]
    return tuple(all_gradients)


_attention.register_autograd(_backward, setup_context=_save_for_backward)


def _run_backward_op(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and sinks; without sinks the last is empty."""
    options = AttentionOptions(*arguments)
    grad_q, grad_k, grad_v, grad_sinks = attention_gradient(
        *(grad_out, query, key, value, AttentionGeometry.of(options, query, key)),
        scale=options.scale,
        softcap=options.softcap,
        sinks=options.sinks,
    )
    return grad_q, grad_k, grad_v, query.new_empty(0) if grad_sinks is None else grad_sinks


_attention_backward = torch.library.custom_op(
    "dma_kernels::attention_backward",
    _run_backward_op,
    mutates_args=(),
    schema=f"(Tensor grad_out, {', '.join(_TENSORS)}) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_attention_backward.register_fake
def _(grad_out, query, key, value, *arguments):  # type: ignore[no-untyped-def]
    sinks = arguments[OPTION_FIELDS.index("sinks")]
    empty = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return (*(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)), empty)


def _split_offset(name: str, offset: int | Tensor, query: Tensor) -> tuple[int, Tensor | None]:
    """Split an offset into a common int and, for a tensor, one addend per batch row."""
    batch = query.shape[0]
    if is_int(offset):
        if not -MAX_POSITION <= offset <= MAX_POSITION:
            raise ValueError(f"{name} must be within 2**30 of 0, got {offset}")
        return offset, None
    if not isinstance(offset, Tensor):
        raise TypeError(f"{name} must be an int or an integer tensor of shape [{batch}], got {offset!r}")
    is_shaped = offset.ndim == 0 or (offset.ndim == 1 and (offset.shape[0] == 1 or offset.shape[0] == batch))
    if not (is_integer(offset) and is_shaped):
        raise ValueError(
            f"{name} must be an int or an integer tensor of shape [{batch}], got {offset.dtype} {list(offset.shape)}"
        )
    check_kind(name, offset, query)
    return 0, offset.expand(batch)


def _check_tile_counts(tile_counts: Tensor | None, query: Tensor, recipe: Recipe) -> None:
    if tile_counts is None:
        return
    check_kind("tile_counts", tile_counts, query)
    is_shaped = tile_counts.dtype == torch.int64 and tile_counts.shape == (query.shape[1], 2)
    if not (is_shaped and tile_counts.is_contiguous()):
        raise ValueError(
            f"tile_counts must be int64 [{query.shape[1]}, 2], contiguous; got {tile_counts.dtype} "
            f"{list(tile_counts.shape)} with strides {list(tile_counts.stride())}"
        )
    if recipe.skip_threshold is None:
        raise ValueError("tile_counts needs a recipe that skips tiles; its skip_threshold is None")


def _check_tensors(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Tensor | None, kv_range: Tensor | None
) -> Tensor | None:
    """Check every tensor; return the mask with four dimensions."""
    shapes = {"query": query, "key": key, "value": value}
    for name, tensor in shapes.items():
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
    if sinks is not None:
        check_sinks(sinks, query)
    if kv_range is not None:
        check_kind("kv_range", kv_range, query)
        if not is_integer(kv_range) or kv_range.shape != (query.shape[0], 2):
            raise ValueError(
                f"kv_range must be integer [{query.shape[0]}, 2], got {kv_range.dtype} {list(kv_range.shape)}"
            )
    return None if mask is None else check_mask(mask, query, key.shape[2])
