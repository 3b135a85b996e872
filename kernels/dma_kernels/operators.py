"""Registration of attention with PyTorch: an operator whose gradient is an operator.

A compiler, autograd and a tensor mode see such a call as a single node, whichever backend runs. The gradient is that of
exact attention (:func:`~dma_kernels.reference.attention.attention_gradient`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .numerics.call import AttentionCall
from .numerics.formats import MAX_POSITION
from .numerics.recipe import RECIPE_FIELDS, Recipe

_SCHEMA_TYPES = {"int": "SymInt", "str | None": "str?", "float | None": "float?"}
_SCHEMA_TYPES |= {name: name for name in ("bool", "float", "str")}
_OPTIONS = "bool is_causal, SymInt? window, float scale, float? softcap"
"""Last arguments of the gradient; in forward operators, the settings follow."""
_SETTINGS = "str backend, bool counts_tiles, " + ", ".join(
    f"{_SCHEMA_TYPES[str(field.type)]} {field.name}" for field in fields(Recipe)
)
_SETTINGS_COUNT = len(_SETTINGS.split(", "))
TRANSFORMED: dict[str, Any] = {}
"""For each operator, by name: what :mod:`dma_kernels.torch_func` calls instead."""


def _options_and_settings(call: AttentionCall) -> tuple[Any, ...]:
    """Return the last arguments of a forward operator, of a checked call."""
    window = None if call.window is None else min(call.window, 4 * MAX_POSITION)  # the operator takes int64
    softcap = None if call.softcap is None else float(call.softcap)
    settings = call.backend, call.tile_counts is not None, *(getattr(call.recipe, name) for name in RECIPE_FIELDS)
    return call.is_causal, window, call.score_scale, softcap, *settings


def needs_operator(given: list[Any]) -> bool:
    """Whether a compiler, autograd, a tensor mode or a kind of tensor needs a call with these tensors as one operation.

    Otherwise the backend is called directly, which saves about 70 us of operator dispatch.

    Raises:
        NotImplementedError: An input is a dual tensor, for which PyTorch would return zero derivatives.
    """
    if forward_ad._current_level >= 0 and any(map(_may_be_dual, given)):
        _refuse_forward_mode()
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    has_grad = torch.is_grad_enabled()
    for tensor in given:
        if (type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter) or tensor.is_meta or tensor.is_neg():
            return True  # PyTorch's dispatcher negates a tensor with the negative bit, which an address does not show
        if has_grad and tensor.requires_grad:
            return True
    return False


def _refuse_forward_mode(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "attention has no derivative in forward mode, and one of its inputs is a dual tensor; use reverse mode "
        "(backward, torch.autograd.grad)"
    )


def _may_be_dual(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor):
        return False
    if torch._C._functorch.is_batchedtensor(tensor):  # its inner tensor cannot be queried
        return True
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def register(
    name: str,
    arguments: str,
    forward: Callable[..., tuple[Tensor, ...]],
    fake: Callable[..., tuple[Tensor, ...]],
    gradient: Callable[..., Any],
    *,
    results: int,
    has_vmap: bool,
) -> Callable[..., list[Tensor]]:
    """Register an operator and its gradient, and return a function that calls the operator.

    The function takes a checked call, and the arguments of the operator before the options. It returns the results.

    Args:
        name: The operator's name; that of its gradient ends in ``_backward``.
        arguments: Schema of the arguments of both before the options. The first are ``query``, ``key`` and ``value``;
            one is ``sinks``.
        forward: Takes these arguments, the options, the recipe, the backend and ``tile_counts``. Returns the results.
        fake: The same for fake tensors, without the last three.
        gradient: Takes the gradient of the first result, these arguments and the options. It returns the gradients of
            query, key, value and sinks, ``None`` without sinks.
        results: Number of results. Only the first is differentiable.
        has_vmap: Whether ``torch.func.vmap`` applies.
    """
    arguments += f", {_OPTIONS}"
    names = [argument.split()[1] for argument in arguments.split(", ")]
    at_sinks = names.index("sinks")

    def run(query: Tensor, *others: Any) -> tuple[Tensor, ...]:
        backend, counts_tiles, *numerics = others[-_SETTINGS_COUNT:]
        recipe = Recipe(**dict(zip(RECIPE_FIELDS, numerics, strict=True)))
        counts = query.new_zeros((query.shape[1] if counts_tiles else 0, 2), dtype=torch.int64)
        made = forward(query, *others[:-_SETTINGS_COUNT], recipe, backend, counts if counts_tiles else None)
        return *made, counts

    def run_fake(query: Tensor, *others: Any) -> tuple[Tensor, ...]:
        _, counts_tiles, *_ = others[-_SETTINGS_COUNT:]
        counts = query.new_empty((query.shape[1] if counts_tiles else 0, 2), dtype=torch.int64)
        return *fake(query, *others[:-_SETTINGS_COUNT]), counts

    def run_gradient(grad_out: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grad_q, grad_k, grad_v, grad_sinks = gradient(grad_out, *inputs)
        return grad_q, grad_k, grad_v, grad_out.new_empty(0) if grad_sinks is None else grad_sinks

    def fake_gradient(grad_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        sinks = inputs[at_sinks]
        empty = grad_out.new_empty(0) if sinks is None else torch.empty_like(sinks)
        return (*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3]), empty)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        named = dict(zip(names, inputs, strict=False))
        ctx.tensor_names = [name for name, value in named.items() if isinstance(value, Tensor)]
        saved = [named.pop(name) for name in ctx.tensor_names]
        ctx.save_for_backward(*(x.clone() if x.is_inference() else x for x in saved))  # a mask may be made beforehand
        ctx.options, ctx.count = named, len(inputs)
        ctx.mark_non_differentiable(*output[1:])

    def backward(ctx: Any, grad_out: Tensor, *_others: Tensor | None) -> tuple[Tensor | None, ...]:
        named = ctx.options | dict(zip(ctx.tensor_names, ctx.saved_tensors, strict=True))
        *gradients, grad_sinks = run_backward(grad_out, *(named[name] for name in names))
        gradients += [None] * (ctx.count - 3)
        if named["sinks"] is not None:
            gradients[at_sinks] = grad_sinks
        return tuple(gradients)

    def refuse(ctx: Any, *gradients: Tensor | None) -> Any:
        raise RuntimeError(
            "attention has no second derivative; differentiate once, without create_graph, or use PyTorch's "
            "scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
        )

    schema = f"({arguments}, {_SETTINGS}) -> ({', '.join(['Tensor'] * (results + 1))})"
    op = torch.library.custom_op(name, run, mutates_args=(), schema=schema)
    op.register_fake(run_fake)
    op.register_autograd(backward, setup_context=save)
    schema = f"(Tensor grad_out, {arguments}) -> (Tensor, Tensor, Tensor, Tensor)"
    backward_op = torch.library.custom_op(f"{name}_backward", run_gradient, mutates_args=(), schema=schema)
    backward_op.register_fake(fake_gradient)
    backward_op.register_autograd(refuse)
    run_backward = _unless_transformed(f"{name}_backward", backward_op, lambda *_: None, refuse, has_vmap)
    run_forward = _unless_transformed(name, op, save, backward, has_vmap)

    def call_operator(call: AttentionCall, *inputs: Any) -> list[Tensor]:
        made: list[Tensor]
        *made, counts = run_forward(*inputs, *_options_and_settings(call))
        if call.tile_counts is not None:
            call.tile_counts.add_(counts)
        return made

    return call_operator


def _unless_transformed(name: str, op: Any, save: Any, backward: Any, has_vmap: bool) -> Callable[..., Any]:
    """Return a function that calls an operator, under ``torch.func`` as one that its transforms can differentiate.

    They do not support the gradient of a registered operator.
    """
    members = {"forward": op, "setup_context": save, "backward": backward, "jvp": _refuse_forward_mode}
    if not has_vmap:
        members["vmap"] = _refuse_vmap
    methods = {member: staticmethod(function) for member, function in members.items()}
    TRANSFORMED[name] = type("_Transformed", (torch.autograd.Function,), {**methods, "generate_vmap_rule": has_vmap})

    def call(*inputs: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return op(*inputs)
        from .torch_func import call_transformed  # imports PyTorch's compiler, also where Dynamo traces this line

        return call_transformed(name, *inputs)

    return call


def _refuse_vmap(*_: Any) -> Any:
    raise NotImplementedError(
        "torch.func.vmap does not apply to attention of packed documents; pack the documents of all entries instead"
    )
