"""Decoding steps of ``generate`` over a cache of fixed size, as CUDA graphs of the compiled model.

Transformers compiles these steps, and lets the compiler replay CUDA graphs of its own. In each step the host then
checks the guards of all modules and the addresses of all weights, and the GPU waits. :class:`StaticSteps` compiles the
same step without such graphs, and captures it. A replay only checks the cache's addresses.

Such a cache counts its tokens on the device, so a replay counts them. All other inputs of a step are copied to fixed
addresses: tokens, positions, and the tensors that describe the mask.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, CompileConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from . import decoding
from .cache import DMACache
from .cache_layers import DMAStaticLayer
from .decoding import EAGER_STEPS, MASK, PLAIN, state_of_model, why_model_is_eager
from .integrations.internals import CACHE_ARGUMENT, CACHE_ARGUMENTS
from .masks.geometry import CompactMask, MaskGeometry
from .stats import count_eager_decoding, count_replay

Leaves = dict[tuple[Any, ...], Any]
"""Arguments of a step by name, and fields of its masks by name, kind of layer and field."""

WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""The modes of ``torch.compile`` that replay CUDA graphs, and the same modes without them."""

GEOMETRY_FIELDS = tuple(field.name for field in fields(MaskGeometry))


@dataclass(eq=False)
class StaticGraph:
    """A step of the compiled model over the layers of one cache, captured before its first replay.

    Attributes:
        kind: The mode of the compiler, and the state of the model (:func:`dma_hf.decoding.state_of_model`).
        signature: See :func:`_signature_of`.
        layers: State of the cache, see :func:`_state_of`.
        inputs: Tensors that the graph reads.
        arguments: Arguments of the model with these tensors. A captured graph does not keep them.
        outputs: The output of the model without the cache. A replay overwrites its tensors.
        replay: Runs the step, or ``None`` before the capture.
    """

    kind: tuple[Any, ...]
    signature: tuple[Any, ...]
    layers: list[Any]
    inputs: Leaves
    arguments: dict[str, Any]
    outputs: Any = None
    replay: Callable[[], None] | None = None

    def fits(self, signature: tuple[Any, ...] | None, cache: Cache) -> bool:
        """Return whether the graph computes a step with these inputs over a cache."""
        return signature == self.signature and _is_same(self.layers, _state_of(cache))

    def capture(self, model: Callable[..., Any]) -> None:
        """Capture the step without running it.

        Raises:
            RuntimeError: The model needs a value on the host.
        """
        arguments, self.arguments = self.arguments, {}
        self.replay, output = decoding.record(lambda: model(**arguments))
        self.outputs = type(output)(**{name: value for name, value in output.items() if name not in CACHE_ARGUMENTS})


_graphs: weakref.WeakKeyDictionary[CacheLayerMixin, StaticGraph] = weakref.WeakKeyDictionary()
"""Captured graphs by the first layer of their cache. Later calls of ``generate`` over these layers replay them."""


class StaticSteps:
    """The model as a call of ``generate`` runs its decoding steps over a cache that Transformers compiles.

    Args:
        model: The model.
        compiled: Returns the compiled model for a ``CompileConfig``, or for ``None``, Transformers' default.
        config: The user's configuration, if any.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        compiled: Callable[[CompileConfig | None], Callable[..., Any]],
        config: CompileConfig | None = None,
    ) -> None:
        self.model, self.compiled, self.config = model, compiled, config
        self.forward: Callable[..., Any] | None = None  # the compiled model
        self.kind: tuple[Any, ...] | None = None  # of graphs, or None if steps are not captured
        self.graph: StaticGraph | None = None
        self.steps = 0

    def __call__(self, **inputs: Any) -> Any:
        """Call the model with the arguments of its ``forward``."""
        cache: Any = inputs.get(CACHE_ARGUMENT)
        leaves = _leaves_of(inputs)
        signature = _signature_of(leaves)
        if self.forward is None:
            self.forward = self._begin(cache, inputs, signature)
        graph = self.graph
        if graph is None:
            self.steps += 1
            if self.kind is None or signature is None or self.steps < EAGER_STEPS:
                return self.forward(**inputs)
            return self._warm_up(self.forward, self.kind, signature, inputs, leaves)
        if not graph.fits(signature, cache):
            return self._without_graph(inputs)
        torch._foreach_copy_(list(graph.inputs.values()), [leaves[key] for key in graph.inputs])
        if graph.replay is None:
            try:
                graph.capture(self.forward)
            except RuntimeError as error:
                count_eager_decoding(self.model, f"the step cannot be captured: {str(error).strip().splitlines()[0]}")
                return self._without_graph(inputs)
            _graphs[cache.layers[0]] = graph
        assert graph.replay is not None
        graph.replay()
        count_replay(self.model, [])
        return type(graph.outputs)(**graph.outputs, **{CACHE_ARGUMENT: cache})

    def _begin(self, cache: Any, inputs: dict[str, Any], signature: tuple[Any, ...] | None) -> Callable[..., Any]:
        """Return the compiled model, and look for a graph of an earlier call."""
        config = _without_graphs(self.config or CompileConfig())
        is_capturable = signature is not None and _has_fixed_addresses(cache)
        if config is None or not is_capturable or why_model_is_eager(self.model, inputs) is not None:
            return self.compiled(self.config)
        self.kind = (config.mode, state_of_model(self.model))
        graph = _graphs.get(cache.layers[0])
        if graph is not None and graph.kind == self.kind and graph.fits(signature, cache):
            self.graph = graph
        return self.compiled(config)

    def _warm_up(
        self,
        forward: Callable[..., Any],
        kind: tuple[Any, ...],
        signature: tuple[Any, ...],
        inputs: dict[str, Any],
        leaves: Leaves,
    ) -> Any:
        """Run a step with the tensors that the graph will read, so that the capture compiles nothing."""
        cache: Any = inputs[CACHE_ARGUMENT]
        static = {key: value.clone() for key, value in leaves.items() if isinstance(value, Tensor)}
        arguments, before = _with_tensors(inputs, static), _state_of(cache)
        output = forward(**arguments)
        layers = _state_of(cache)
        gc.collect()  # the compiler leaves cycles of objects, which would keep the cache
        if _is_same(before, layers):
            self.graph = StaticGraph(kind, signature, layers, static, arguments)
        else:
            self.kind = None
        return output

    def _without_graph(self, inputs: dict[str, Any]) -> Any:
        """Run this step and all later ones without a graph."""
        self.graph = self.kind = None
        assert self.forward is not None
        return self.forward(**inputs)


def _without_graphs(config: CompileConfig) -> CompileConfig | None:
    """Return the same configuration without the compiler's CUDA graphs, or ``None`` if it does not ask for them."""
    if config.backend != "inductor" or config.options or config.mode not in WITHOUT_GRAPHS:
        return None
    return replace(config, mode=WITHOUT_GRAPHS[config.mode])


def _has_fixed_addresses(cache: Any) -> bool:
    """Return whether a cache keeps all its state at fixed addresses of one device.

    Transformers' static layers with sliding windows count their tokens on the host.
    """
    kinds = {StaticCache: StaticLayer, DMACache: DMAStaticLayer}
    kind = kinds.get(type(cache))
    return (
        kind is not None
        and not cache.offloading
        and all(type(layer) is kind and layer.is_initialized for layer in cache.layers)
    )


def _state_of(cache: Cache) -> list[Any]:
    """Return the attributes of all layers."""
    return [value for layer in cache.layers for value in vars(layer).values()]


def _is_same(one: list[Any], other: list[Any]) -> bool:
    """Return whether two lists hold the same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _leaves_of(inputs: Mapping[str, Any]) -> Leaves:
    """Return the arguments of a step without the cache. A mask of this package is described by its geometry."""
    leaves: Leaves = {}
    for name, value in inputs.items():
        if name == MASK:
            for kind, mask in _by_kind(value).items():
                if type(mask) is CompactMask:
                    leaves |= {(name, kind, field): getattr(mask.dma_geometry, field) for field in GEOMETRY_FIELDS}
                else:
                    leaves[name, kind] = mask
        elif name != CACHE_ARGUMENT:
            leaves[(name,)] = value
    return leaves


def _signature_of(leaves: Leaves) -> tuple[Any, ...] | None:
    """Return what the steps of one graph have in common, or ``None`` if no graph can compute a step.

    A step of a graph has one token a row, tensors on the device of the tokens, and plain values.
    """
    tokens = leaves.get(("input_ids",))
    if not isinstance(tokens, Tensor) or tokens.shape[1] != 1:
        return None
    parts: list[Any] = [torch.is_inference_mode_enabled()]
    for key, value in leaves.items():
        if isinstance(value, Tensor) and value.device == tokens.device:
            parts.append((key, value.shape, value.dtype))
        elif isinstance(value, PLAIN):
            parts.append((key, value))
        else:
            return None
    return tuple(parts)


def _with_tensors(inputs: Mapping[str, Any], tensors: Leaves) -> dict[str, Any]:
    """Return the arguments of a step with other tensors."""
    arguments = {name: tensors.get((name,), value) for name, value in inputs.items()}
    if MASK in inputs:
        masks = {}
        for kind, mask in _by_kind(inputs[MASK]).items():
            masks[kind] = tensors.get((MASK, kind), mask)
            if type(mask) is CompactMask:
                changes = {key[2]: tensor for key, tensor in tensors.items() if key[:2] == (MASK, kind)}
                masks[kind] = CompactMask.of(replace(mask.dma_geometry, **changes), mask.device)
        arguments[MASK] = masks if isinstance(inputs[MASK], dict) else masks[None]
    return arguments


def _by_kind(mask: Any) -> dict[Any, Any]:
    """Return the masks of a step by the kind of layer, which is ``None`` if all layers share one."""
    return mask if isinstance(mask, dict) else {None: mask}
