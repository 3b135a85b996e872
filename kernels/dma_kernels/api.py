"""The entry point of the attention operation: check the options, plan the call, run the plan.

A backend that is asked for by name runs or raises; nothing falls back silently. Where a compiler, autograd or a tensor
mode looks on, the operation is a registered custom op, so that they see one node, whichever backend runs inside it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .numerics.arguments import check_options, check_prefill, is_int, of_four_dimensions
from .numerics.geometry import OPTION_FIELDS, AttentionGeometry, AttentionOptions
from .numerics.recipe import RECIPE_FIELDS, Recipe
from .prefill.plan import plan
from .prefill.problem import PrefillProblem
from .reference.attention import attention_gradient
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

    Its gradient goes straight through the rounding: it is that of the attention which the recipe approximates, computed
    in torch on every backend (:func:`~dma_kernels.reference.attention.attention_gradient`). Skipped tiles take part in
    it.

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
        ``[B, Hq, Tq, Dv]`` in the dtype of ``query``; ``.transpose(1, 2)`` makes it contiguous. Rows that attend to no
        key are 0.

    Raises:
        ValueError: Shapes, head dimensions, options or the backend's name are not as described.
        TypeError: A tensor, a dtype, an option or the recipe is of another kind.
        RuntimeError: The backend that was asked for cannot run on this device.
        NotImplementedError: Derivatives are computed in forward mode.
    """
    out, _ = _attention_and_lse(
        False, query, key, value, recipe, is_causal, scale, q_offset, kv_offset, kv_range, window, softcap, sinks, mask,
        tile_counts, backend,
    )  # fmt: skip
    return out


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
    """Compute :func:`attention`, whose arguments it takes, and the logarithms of the softmax denominators.

    Returns:
        The output, and the natural logarithm of the softmax denominator, sinks included, ``[B, Hq, Tq]``, fp32 (fp64
        for fp64). It has no gradient. In rows that attend to no key it is the sink logit, or ``-inf`` without sinks.
    """
    out, lse = _attention_and_lse(
        True, query, key, value, recipe, is_causal, scale, q_offset, kv_offset, kv_range, window, softcap, sinks, mask,
        tile_counts, backend,
    )  # fmt: skip
    assert lse is not None
    return out, lse


def _attention_and_lse(
    needs_lse: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    is_causal: bool,
    scale: float | None,
    q_offset: int | Tensor | None,
    kv_offset: int | Tensor,
    kv_range: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    mask: Tensor | None,
    tile_counts: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Check the options, and run a plan or the operator."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a dma_kernels.Recipe, got {type(recipe).__name__}")
    check_backend(backend)
    check_options(is_causal=is_causal, window=window, scale=scale, softcap=softcap)
    given: list[Any] = [query, key, value]
    for other in (q_offset, kv_offset, kv_range, sinks, mask, tile_counts):
        if other is not None and not is_int(other):
            given.append(other)
    if _needs_op(given):
        return _call_op(
            query, key, value, recipe, is_causal, scale, q_offset, kv_offset, kv_range, window, softcap, sinks, mask,
            tile_counts, backend,
        )  # fmt: skip
    sinks = None if sinks is None else sinks.contiguous()
    problem = PrefillProblem.of(
        query, key, value, recipe, is_causal, scale, q_offset, kv_offset, kv_range, window, softcap, sinks, mask,
        tile_counts, backend, needs_lse,
    )  # fmt: skip
    return plan(problem).run(query, key, value, q_offset, kv_offset, kv_range, sinks, mask, tile_counts)


def _needs_op(given: list[Any]) -> bool:
    """Whether something looks on that has to see one operation: a compiler, autograd, a tensor mode or subclass.

    Otherwise the backend is called directly, which spares some 70 microseconds of dispatching a call.

    Raises:
        NotImplementedError: Forward-mode differentiation looks on, which PyTorch would give zeros for an op.
    """
    if forward_ad._current_level >= 0 and any(map(_may_be_dual, given)):
        raise NotImplementedError(
            "attention has no derivative in forward mode, and one of its inputs is a dual tensor; use reverse mode "
            "(backward, torch.autograd.grad)"
        )
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    has_grad = torch.is_grad_enabled()
    for tensor in given:
        if (type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter) or tensor.is_meta:
            return True
        if has_grad and tensor.requires_grad:
            return True
    return False


def _may_be_dual(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor):
        return False
    if torch._C._functorch.is_batchedtensor(tensor):  # what is inside cannot be asked
        return True
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _call_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    is_causal: bool,
    scale: float | None,
    q_offset: int | Tensor | None,
    kv_offset: int | Tensor,
    kv_range: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    mask: Tensor | None,
    tile_counts: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Call the registered operator."""
    positions: dict[str, Any] = {"q_offset": q_offset, "kv_offset": kv_offset, "kv_range": kv_range}
    check_prefill(
        *(query, key, value, recipe),
        is_causal=is_causal,
        **positions,
        mask=mask,
        sinks=sinks,
        tile_counts=tile_counts,
    )
    options = AttentionOptions.of(
        query,
        is_causal=is_causal,
        scale=scale,
        **positions,
        window=window,
        softcap=softcap,
        sinks=sinks,
        mask=of_four_dimensions(mask),
    )
    arguments = (getattr(options, name) for name in OPTION_FIELDS)
    numerics = (getattr(recipe, name) for name in RECIPE_FIELDS)
    out, lse, counts = _attention(query, key, value, *arguments, backend, tile_counts is not None, *numerics)
    if tile_counts is not None:
        tile_counts += counts
    return out, lse


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
    named = dict(zip(OPTION_FIELDS, arguments, strict=False))
    for name in ("q_offset", "kv_offset"):
        rows = named.pop(f"{name}_rows")
        named[name] = named[name] if rows is None else rows
    tensors = {name: named[name] for name in ("q_offset", "kv_offset", "kv_range", "sinks", "mask")}
    tensors["tile_counts"] = counts if counts_tiles else None
    if tensors["sinks"] is not None:
        tensors["sinks"] = tensors["sinks"].contiguous()
    problem = PrefillProblem.of(query, key, value, recipe, backend=backend, **named | tensors)
    out, lse = plan(problem).run(query, key, value, **tensors)
    assert lse is not None
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
