"""Decoding steps of ``generate``: by CUDA graphs where possible.

``generate`` calls :class:`DecodingSteps` in place of the model. The first steps run eagerly. The next one is captured,
and all later steps replay it. Token selection, stopping criteria and streamers stay in ``generate``, outside the graph.
Each step compares storage and shapes with those of the graph, and each call of ``generate`` compares the state of the
model.

While a step over a cache that grows is captured, the cache gives its length as a tensor on the device
(:class:`~dma_hf.cache_layers.Capture`). A model that needs it on the host cannot be captured, and runs eagerly. A cache
of fixed size counts its tokens on the device, so a replay counts them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, CompileConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from .cache import DMACache
from .cache_layers import Capture, DMALayer, DMAStaticLayer, holds_states
from .integrations.internals import CACHE_ARGUMENT
from .stats import count_eager_decoding
from .step_graph import (
    MASK,
    Inputs,
    StepGraph,
    are_same,
    failure,
    inputs_of,
    signature_of,
    state_of_model,
    why_model_is_eager,
    with_copies,
)

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

EAGER_STEPS = 3
"""Eager steps before the first replay. Short answers need no graph, and these steps compile and tune kernels."""

_graphs: weakref.WeakKeyDictionary[CacheLayerMixin, Any] = weakref.WeakKeyDictionary()
"""Captured graphs by the first layer of their cache. Later calls of ``generate`` over these layers replay them."""


# ---- caches that grow


@dataclass(eq=False, kw_only=True)
class DecodingGraph(StepGraph):
    """A step over a cache that grows. Its mask is ``None``: a query sees all tokens of its row.

    Attributes:
        capture: The number of cached tokens, which the graph increments, and the room of the storage.
        tokens: That number on the host.
    """

    capture: Capture
    tokens: int

    def computes(self, signature: tuple[Any, ...] | None, layers: list[DMALayer]) -> bool:
        """Return whether the graph computes a step with such inputs over the layers of a cache."""
        return self.fits(signature, _tables_of(layers)) and layers[0].tokens < self.capture.room

    def run(self, model: PreTrainedModel, inputs: Inputs, cache: DMACache, layers: list[DMALayer]) -> ModelOutput:
        """Run a step with other inputs, and count its token in the layers. The graph counts on the device alone."""
        tokens = layers[0].tokens
        if self.tokens != tokens:  # tokens were cropped, or added in another way
            self.capture.position.fill_(tokens)
        output = self.replay(model, inputs, cache)
        self.tokens = tokens + 1
        for layer in layers:
            layer.tokens += 1
            layer.storage.count_appended(1)
        return output


class DecodingSteps:
    """The model as a call of ``generate`` runs its decoding steps: by CUDA graphs where possible.

    Args:
        model: The model.
        otherwise: Runs steps over caches that are not a growing :class:`~dma_hf.DMACache`.
    """

    def __init__(self, model: PreTrainedModel, otherwise: Callable[..., Any]) -> None:
        self.model, self.otherwise = model, otherwise
        self.steps = 0
        self.is_eager = False
        self.graph: DecodingGraph | None = None  # for the state that the model has in this call of generate

    def __call__(self, **arguments: Any) -> Any:
        """Call the model with the arguments of its ``forward``."""
        cache: Any = arguments.get(CACHE_ARGUMENT)
        tokens = arguments.get("input_ids")
        if not decodes_by_graphs(cache):
            return self.otherwise(**arguments)
        if tokens is None and not self.is_eager:
            self._stay_eager("a step has embeddings in place of tokens")
        if tokens is None or tokens.shape[1] != 1 or self.is_eager:
            return self.model(**arguments)
        layers, mask = packed_layers(cache), arguments.get(MASK)
        unmasked = arguments | {MASK: None} if MASK in arguments else arguments
        inputs = inputs_of(unmasked)
        signature = signature_of(inputs)
        is_captured = self.graph is not None and self.graph.computes(signature, layers)
        if not is_captured and not self._prepare(cache, layers, signature, arguments, unmasked, inputs):
            return self.model(**arguments)
        assert self.graph is not None
        output = self.graph.run(self.model, inputs, cache, layers)
        if mask is not None:
            torch._assert_async(_has_all_keys(mask, layers[0], 0), "the attention mask of generate hides cached keys")
        return output

    def _prepare(
        self,
        cache: DMACache,
        layers: list[DMALayer],
        signature: tuple[Any, ...] | None,
        arguments: dict[str, Any],
        unmasked: dict[str, Any],
        inputs: Inputs,
    ) -> bool:
        """Find or capture the graph of a step. Returns ``False`` if the step runs eagerly."""
        self.steps += 1
        for layer in layers:
            layer.flush()
        if self.steps == 1:
            reason = _why_eager(self.model, cache, layers, arguments)
            if reason is not None:
                return self._stay_eager(reason)
            self.graph = _graphs.get(cache.layers[0])
            if self.graph is not None and self.graph.model != state_of_model(self.model):
                self.graph = None
        for layer in layers:
            layer.make_room(1)
        if self.graph is not None and self.graph.computes(signature, layers):
            return True
        has_grown = self.graph is not None and self.graph.signature == signature
        if self.steps <= EAGER_STEPS and not has_grown:
            return False
        if signature is None:
            return self._stay_eager("the arguments of a step are not tensors, numbers or names")
        self.graph = None
        _graphs.pop(cache.layers[0], None)  # frees its memory first
        try:
            self.graph = _graphs[cache.layers[0]] = _captured(self.model, signature, cache, layers, unmasked, inputs)
        except RuntimeError as error:
            return self._stay_eager(failure(error))
        return True

    def _stay_eager(self, reason: str) -> bool:
        """Run this step and all later ones without a graph, and count the reason. Returns ``False``."""
        self.is_eager = True
        count_eager_decoding(self.model, reason)
        return False


def decodes_by_graphs(cache: Any) -> bool:
    """Return whether steps over a cache may be CUDA graphs: it is a :class:`~dma_hf.DMACache` that grows."""
    return isinstance(cache, DMACache) and not cache.is_compileable


def packed_layers(cache: DMACache) -> list[DMALayer]:
    """Return the layers of a cache that hold packed keys and values."""
    return [layer for layer in cache.layers if isinstance(layer, DMALayer) and layer.is_initialized]


def _why_eager(
    model: PreTrainedModel, cache: DMACache, layers: list[DMALayer], arguments: dict[str, Any]
) -> str | None:
    """Return why the steps of a call cannot be captured, or ``None``. Waits for the device if there is padding."""
    if cache.offloading:
        return "the cache is offloaded"
    others = {type(layer).__name__ for layer in cache.layers if not isinstance(layer, DMALayer) and holds_states(layer)}
    if others:
        return f"the cache has layers that hold other states ({', '.join(sorted(others))})"
    if any(isinstance(layer, DMAStaticLayer) for layer in layers):
        return "the cache has layers that grow and layers of a fixed size"
    if not layers or not all(layer.is_settled for layer in layers):
        return "a row of the batch is all padding"
    reason = why_model_is_eager(model, arguments)
    mask = arguments.get(MASK)
    if reason is not None or mask is None:
        return reason
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return "the model makes the attention mask of a step itself"
    if arguments.get("position_ids") is None:
        return "the batch is padded, and the model takes no position_ids"
    visible = mask.bool()
    is_left_padded = (visible[:, 1:] >= visible[:, :-1]).all() & visible[:, -1].all()
    if not bool(is_left_padded & _has_all_keys(visible, layers[0], 1)):
        return "the attention mask hides keys other than padding on the left"
    return None


def _has_all_keys(mask: Tensor, layer: DMALayer, new: int) -> Tensor:
    """Return whether a mask ``[B, T]`` shows all keys of a layer and ``new`` more, as a boolean tensor."""
    return (mask.sum(-1) == layer.storage.lengths + new).all()


def _captured(
    model: PreTrainedModel,
    signature: tuple[Any, ...],
    cache: DMACache,
    layers: list[DMALayer],
    arguments: dict[str, Any],
    inputs: Inputs,
) -> DecodingGraph:
    """Capture a step, as :meth:`StepGraph.of` does. The cache does not change, even if that fails."""
    arguments, copies = with_copies(arguments, inputs)
    tokens, room = layers[0].tokens, min(layer.storage.room for layer in layers)
    capture = Capture(torch.tensor(tokens, device=layers[0].device), room)
    counters = [(layer.storage.appended, layer.storage.rolled_back) for layer in layers]
    state, tables = state_of_model(model), _tables_of(layers)

    def step() -> ModelOutput:
        output: ModelOutput = model(**arguments)
        capture.position.add_(1)
        return output

    cache.owner.capture = capture
    try:
        return DecodingGraph.of(
            step, signature=signature, model=state, cache=tables, inputs=copies, capture=capture, tokens=tokens
        )
    finally:
        cache.owner.capture = None
        for layer, (appended, rolled_back) in zip(layers, counters, strict=True):
            layer.pending = None
            layer.storage.appended, layer.storage.rolled_back = appended, rolled_back


def _tables_of(layers: list[DMALayer]) -> list[Tensor]:
    """Return the page tables of layers, which are replaced with the storage."""
    return [layer.storage.page_table for layer in layers]


# ---- caches of a fixed size

WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""The modes of ``torch.compile`` that replay CUDA graphs, and the same modes without them."""


class StaticSteps:
    """The model as a call of ``generate`` runs its decoding steps over a cache that Transformers compiles.

    Transformers lets the compiler replay its own CUDA graphs. In each step the host then checks the guards of all
    modules and the addresses of all weights, and the GPU waits. Here the step is compiled without such graphs, and
    captured. A replay only checks the addresses of the cache.

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
        self.state: tuple[Any, ...] | None = None  # of the model and the compiler, or None if steps are not captured
        self.graph: StepGraph | None = None
        self.steps = 0

    def __call__(self, **arguments: Any) -> Any:
        """Call the model with the arguments of its ``forward``."""
        cache: Any = arguments.get(CACHE_ARGUMENT)
        inputs = inputs_of(arguments)
        signature = signature_of(inputs)
        if self.forward is None:
            self.forward = self._begin(cache, arguments, signature)
        if self.graph is not None:
            if self.graph.fits(signature, _state_of(cache)):
                return self.graph.replay(self.model, inputs, cache)
            self.graph = self.state = None  # for this call of generate
        self.steps += 1
        forward, state = self.forward, self.state
        if state is None or signature is None or self.steps < EAGER_STEPS:
            return forward(**arguments)
        # With the tensors that a graph will read, so that its capture, which follows, compiles nothing.
        arguments, copies = with_copies(arguments, inputs)
        before = _state_of(cache)
        output = forward(**arguments)
        after = _state_of(cache)
        gc.collect()  # the compiler leaves cycles of objects, which would keep the cache
        self.state = None  # no second attempt
        if are_same(before, after):
            try:
                self.graph = _graphs[cache.layers[0]] = StepGraph.of(
                    lambda: forward(**arguments), signature=signature, model=state, cache=after, inputs=copies
                )
            except RuntimeError as error:
                count_eager_decoding(self.model, failure(error))
        return output

    def _begin(self, cache: Any, arguments: dict[str, Any], signature: tuple[Any, ...] | None) -> Callable[..., Any]:
        """Return the compiled model, and look for a graph of an earlier call."""
        config = _without_graphs(self.config or CompileConfig())
        is_capturable = signature is not None and _has_fixed_addresses(cache)
        if config is None or not is_capturable or why_model_is_eager(self.model, arguments) is not None:
            return self.compiled(self.config)
        self.state = config.mode, *state_of_model(self.model)
        graph = _graphs.get(cache.layers[0])
        if graph is not None and graph.model == self.state and graph.fits(signature, _state_of(cache)):
            self.graph = graph
        return self.compiled(config)


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
