"""The entry point of the attention operation: check the options, plan the call, run the plan.

A backend that is requested by name runs or raises; nothing falls back silently. Under a compiler, autograd or a tensor
mode, the operation is a registered custom op: a single node, whichever backend runs.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .numerics.arguments import check_call, check_options, is_int, of_four_dimensions
from .numerics.call import AttentionCall
from .numerics.formats import MAX_POSITION
from .numerics.recipe import RECIPE_FIELDS, Recipe
from .prefill.plan import SDPAPlan, plan
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
            of a causal call must not be below ``kv_offset``. 64-bit tensors are clipped to 2^30 on either side of 0.
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
        ``[B, Hq, Tq, Dv]`` in the dtype of ``query``; its ``.transpose(1, 2)`` is contiguous. Rows that attend to no
        key are 0.

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
    assert lse is not None
    return out, lse


class PreparedAttention:
    """:func:`attention` for calls that differ in the contents of their tensors alone, such as those of many layers.

    The first call of its kind must have been checked: run :func:`attention` with the same arguments before.

    Attributes:
        kernel: Name of the kernel that computes the calls, as in :mod:`dma_kernels.runtime.reports`.
    """

    def __init__(self, call: AttentionCall) -> None:
        self._layouts = call.layouts()
        self._plan = plan(self._layouts)
        self.kernel = self._plan.kernel
        self._call = call._replace(query=None, key=None, value=None, sinks=None)  # keeps no tensors

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, **options: Any) -> PreparedAttention | None:
        """Prepare calls with these arguments of :func:`attention`.

        Returns:
            ``None`` if a compiler, autograd or a tensor mode must see each call as one operation.
        """
        known: dict[str, Any] = dict.fromkeys(AttentionCall._fields)
        known |= {"is_causal": True, "kv_offset": 0, "backend": "auto"} | options
        known |= {"query": query, "key": key, "value": value, "recipe": recipe, "needs_lse": False}
        call = AttentionCall(**known)
        return None if _needs_op(_tensors_of(call)) else cls(call)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Return the output for other tensors of the same shapes and dtypes, ``[B, Hq, Tq, Dv]``."""
        if isinstance(self._plan, SDPAPlan):
            return self._plan.attend(query, key, value, self._call.scale)
        sinks = None if sinks is None else sinks.contiguous()
        call = self._call._replace(query=query, key=key, value=value, sinks=sinks)
        layouts = call.layouts()
        prepared = self._plan if layouts == self._layouts else plan(layouts)
        return prepared.run(call)[0]


def _tensors_of(call: AttentionCall) -> list[Any]:
    """Return the tensors of a call."""
    given: list[Any] = [call.query, call.key, call.value]
    for other in (call.q_offset, call.kv_offset, call.kv_range, call.sinks, call.mask, call.tile_counts):
        if other is not None and not is_int(other):
            given.append(other)
    return given


def _compute(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Check the options, then run the plan, directly or through the custom op."""
    if not isinstance(call.recipe, Recipe):
        raise TypeError(f"recipe must be a dma_kernels.Recipe, got {type(call.recipe).__name__}")
    check_backend(call.backend)
    check_options(is_causal=call.is_causal, window=call.window, scale=call.scale, softcap=call.softcap)
    if _needs_op(_tensors_of(call)):
        return _call_op(call)
    if call.sinks is not None:
        call = call._replace(sinks=call.sinks.contiguous())
    return plan(call.layouts()).run(call)


def _needs_op(given: list[Any]) -> bool:
    """Whether a compiler, autograd, a tensor mode or a subclass must see the call as one operation.

    Otherwise the backend is called directly, which saves about 70 us of operator dispatch.

    Raises:
        NotImplementedError: An input is a dual tensor, for which PyTorch would return zero derivatives.
    """
    if forward_ad._current_level >= 0 and any(map(_may_be_dual, given)):
        raise NotImplementedError(
            "attention has no derivative in forward mode, and one of its inputs is a dual tensor; use reverse mode "
            "(backward, torch.autograd.grad)"
        )
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch._C._get_tracing_state() is not None or _is_transformed():
        return True
    has_grad = torch.is_grad_enabled()
    for tensor in given:
        if (type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter) or tensor.is_meta:
            return True
        if has_grad and tensor.requires_grad:
            return True
    return False


def _is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is active; a compiler has its own ones."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def _may_be_dual(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor):
        return False
    if torch._C._functorch.is_batchedtensor(tensor):  # its inner tensor cannot be queried
        return True
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _call_op(call: AttentionCall) -> tuple[Tensor, Tensor]:
    check_call(call)
    (q_offset, q_rows), (kv_offset, kv_rows) = map(_split_offset, (call.q_offset, call.kv_offset))
    window = None if call.window is None else min(call.window, 4 * MAX_POSITION)  # the operator takes int64
    run = _TransformedAttention.apply if _is_transformed() else _attention
    out, lse, counts = run(  # type: ignore[no-untyped-call]
        call.query, call.key, call.value, q_offset, kv_offset or 0, q_rows, kv_rows, call.kv_range,
        of_four_dimensions(call.mask), call.sinks, call.is_causal, window, call.score_scale,
        None if call.softcap is None else float(call.softcap), call.backend, call.tile_counts is not None,
        *(getattr(call.recipe, name) for name in RECIPE_FIELDS),
    )  # fmt: skip
    if call.tile_counts is not None:
        call.tile_counts.add_(counts)
    return out, lse


def _split_offset(offset: Any) -> tuple[Any, Tensor | None]:
    """Return an offset as an int and a tensor, one of them ``None``: an op's argument has a single type."""
    return (offset, None) if offset is None or is_int(offset) else (None, offset)


# Tensors and options of a call, in the order of the ops' arguments.
_TENSORS_AND_OPTIONS = (
    "Tensor query, Tensor key, Tensor value, SymInt? q_offset, SymInt kv_offset, Tensor? q_offset_rows, "
    "Tensor? kv_offset_rows, Tensor? kv_range, Tensor? mask, Tensor? sinks, bool is_causal, SymInt? window, "
    "float scale, float? softcap"
)
_ARGUMENTS = [argument.split()[1] for argument in _TENSORS_AND_OPTIONS.split(", ")]
_SCHEMA_TYPES = {"int": "SymInt", "str | None": "str?", "float | None": "float?"}
_SCHEMA_TYPES |= {name: name for name in ("bool", "float", "str")}
_RECIPE = ", ".join(f"{_SCHEMA_TYPES[str(field.type)]} {field.name}" for field in fields(Recipe))


def _call_of(arguments: tuple[Any, ...], recipe: Recipe, backend: str, tile_counts: Tensor | None) -> AttentionCall:
    """Rebuild the call from an op's arguments."""
    named = dict(zip(_ARGUMENTS, arguments, strict=True))
    for name in ("q_offset", "kv_offset"):
        rows = named.pop(f"{name}_rows")
        named[name] = named[name] if rows is None else rows
    if named["sinks"] is not None:
        named["sinks"] = named["sinks"].contiguous()
    return AttentionCall(**named, recipe=recipe, backend=backend, tile_counts=tile_counts)


def _run_op(query: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the log-sum-exp, and the tile counts, which are empty unless requested."""
    count = len(_ARGUMENTS) - 1
    backend, counts_tiles, *numerics = others[count:]
    recipe = Recipe(**dict(zip(RECIPE_FIELDS, numerics, strict=True)))
    counts = query.new_zeros((query.shape[1] if counts_tiles else 0, 2), dtype=torch.int64)
    call = _call_of((query, *others[:count]), recipe, backend, counts if counts_tiles else None)
    out, lse = plan(call.layouts()).run(call)
    assert lse is not None
    return out, lse, counts


_attention = torch.library.custom_op(
    "dma_kernels::attention",
    _run_op,
    mutates_args=(),
    schema=f"({_TENSORS_AND_OPTIONS}, str backend, bool counts_tiles, {_RECIPE}) -> (Tensor, Tensor, Tensor)",
)


@_attention.register_fake
def _(query, key, value, *arguments):  # type: ignore[no-untyped-def]
    batch, q_heads, q_len, _ = query.shape
    out = query.new_empty((batch, q_len, q_heads, value.shape[-1])).transpose(1, 2)
    lse = query.new_empty((batch, q_heads, q_len), dtype=torch.promote_types(query.dtype, torch.float32))
    counts_tiles = arguments[len(_ARGUMENTS) - 2]
    return out, lse, query.new_empty((q_heads if counts_tiles else 0, 2), dtype=torch.int64)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    named = dict(zip(_ARGUMENTS, inputs, strict=False))
    ctx.tensor_names = [name for name, value in named.items() if isinstance(value, Tensor)]
    ctx.save_for_backward(*(named.pop(name) for name in ctx.tensor_names))
    ctx.options, ctx.count = named, len(inputs)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad_out: Tensor, *_others: Tensor | None) -> tuple[Tensor | None, ...]:
    named = ctx.options | dict(zip(ctx.tensor_names, ctx.saved_tensors, strict=True))
    run = _TransformedBackward.apply if _is_transformed() else _attention_backward
    *gradients, grad_sinks = run(grad_out, *(named[name] for name in _ARGUMENTS))  # type: ignore[no-untyped-call]
    gradients += [None] * (ctx.count - 3)
    if named["sinks"] is not None:
        gradients[_ARGUMENTS.index("sinks")] = grad_sinks
    return tuple(gradients)


_attention.register_autograd(_backward, setup_context=_save_for_backward)


class _TransformedAttention(torch.autograd.Function):
    """The op under ``torch.func``, whose transforms do not support the gradient of a registered op."""

    generate_vmap_rule = True
    forward = staticmethod(_attention)
    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_backward)


def _run_backward_op(grad_out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and sinks; without sinks the last is empty."""
    grad_q, grad_k, grad_v, grad_sinks = attention_gradient(grad_out, _call_of(arguments, EXACT, "reference", None))
    return grad_q, grad_k, grad_v, grad_out.new_empty(0) if grad_sinks is None else grad_sinks


_attention_backward = torch.library.custom_op(
    "dma_kernels::attention_backward",
    _run_backward_op,
    mutates_args=(),
    schema=f"(Tensor grad_out, {_TENSORS_AND_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_attention_backward.register_fake
def _(grad_out, *arguments):  # type: ignore[no-untyped-def]
    sinks = arguments[_ARGUMENTS.index("sinks")]
    empty = grad_out.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return (*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in arguments[:3]), empty)


class _TransformedBackward(torch.autograd.Function):
    """The backward op under ``torch.func``, as for :class:`_TransformedAttention`."""

    generate_vmap_rule = True
    forward = staticmethod(_attention_backward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise RuntimeError("attention has no second derivative; differentiate once")
