"""Decoding steps of ``generate`` as CUDA graphs.

In eager mode the host needs longer to launch the kernels of a step than the GPU needs to run them. ``generate`` calls
:class:`DecodingSteps` in place of the model. The first steps run eagerly. The next one is captured, and all later steps
replay it. Token selection, stopping criteria and streamers stay in ``generate``, outside the graph.

A graph holds addresses, not tensors. It is valid for one storage of the cache, one state of the model and one shape of
the inputs. Each step compares storage and shapes, and each call of ``generate`` compares the state of the model.

While a step is captured, the cache gives its length as a tensor on the device (:class:`~dma_hf.cache_layers.Capture`).
A model that needs it on the host cannot be captured, and runs eagerly.

:mod:`dma_hf.static_decoding` has the steps over caches of a fixed size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .cache import DMACache
from .cache_layers import Capture, DMALayer
from .config import settings_of
from .integrations.internals import CACHE_ARGUMENT, CACHE_ARGUMENTS, is_output_hook
from .stats import Use, count_eager_decoding, count_replay, recorded_uses

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

EAGER_STEPS = 3
"""Eager steps before the capture. Short answers need no graph, and kernels are compiled and tuned in eager steps."""

MASK = "attention_mask"
OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Arguments that make a model return states that ``generate`` keeps. A replay would overwrite them."""
PLAIN = (bool, int, float, str, NoneType)
"""Types of values that are compared by value."""
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module that say nothing about its output."""


@dataclass(eq=False)
class DecodingGraph:
    """A captured decoding step.

    Attributes:
        signature: Names, shapes and dtypes of the tensors of a call, and the values of its other arguments.
        model: State of the model, see :func:`state_of_model`.
        tables: Page table of each layer. They are replaced with the storage.
        room: Tokens that the storage has room for.
        inputs: Tensors that the graph reads, by argument.
        position: Number of cached tokens, int64 ``[]``. The graph increments it.
        tokens: The value of ``position``.
        outputs: The output of the model without the cache. A replay overwrites its tensors.
        uses: Calls of attention layers in a step.
        replay: Runs the step.
    """

    signature: tuple[Any, ...]
    model: tuple[Any, ...]
    tables: list[Tensor]
    room: int
    inputs: dict[str, Tensor]
    position: Tensor
    tokens: int
    outputs: ModelOutput
    uses: list[tuple[nn.Module, Use]]
    replay: Callable[[], None]

    def fits(self, signature: tuple[Any, ...] | None, layers: list[DMALayer]) -> bool:
        """Return whether the graph computes a step with these inputs over the layers of a cache."""
        return (
            signature == self.signature
            and layers[0].tokens < self.room
            and len(layers) == len(self.tables)
            and all(layer.storage.page_table is table for layer, table in zip(layers, self.tables, strict=True))
        )


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
        self.checked: DecodingGraph | None = None  # the graph that was compared with the state of the model

    def __call__(self, **inputs: Any) -> Any:
        """Call the model with the arguments of its ``forward``."""
        cache: Any = inputs.get(CACHE_ARGUMENT)
        tokens = inputs.get("input_ids")
        if not decodes_by_graphs(cache):
            return self.otherwise(**inputs)
        if tokens is None or tokens.shape[1] != 1 or self.is_eager:
            return self.model(**inputs)
        owner, signature = cache.owner, _signature_of(inputs)
        graph: DecodingGraph | None = owner.graph
        layers = packed_layers(cache)
        if graph is not None and graph is self.checked and graph.fits(signature, layers):
            return _replay(self.model, graph, cache, layers, inputs)
        self.steps += 1
        for layer in layers:
            layer.flush()
        if self.steps == 1:
            reason = _why_eager(self.model, cache, layers, inputs)
            if reason is not None:
                return self._eagerly(reason, inputs)
            if graph is not None and graph.model == state_of_model(self.model):
                self.checked = graph
        for layer in layers:
            layer.make_room(1)
        known = graph if graph is self.checked else None
        if known is not None and known.fits(signature, layers):
            return _replay(self.model, known, cache, layers, inputs)
        is_warm = known is not None and known.signature == signature  # the cache has grown
        if self.steps <= EAGER_STEPS and not is_warm:
            return self.model(**inputs)
        owner.graph = self.checked = None  # frees its memory first
        if signature is None:
            return self._eagerly("the arguments of a step are not tensors, numbers or names", inputs)
        try:
            graph = owner.graph = self.checked = _captured(self.model, signature, cache, layers, inputs)
        except RuntimeError as error:
            return self._eagerly(f"the step cannot be captured: {str(error).strip().splitlines()[0]}", inputs)
        return _replay(self.model, graph, cache, layers, inputs)

    def _eagerly(self, reason: str, inputs: dict[str, Any]) -> Any:
        """Run this step and all later ones without a graph, and count the reason."""
        self.is_eager = True
        count_eager_decoding(self.model, reason)
        return self.model(**inputs)


def decodes_by_graphs(cache: Any) -> bool:
    """Return whether steps over a cache may be CUDA graphs: it is a :class:`~dma_hf.DMACache` that grows."""
    return isinstance(cache, DMACache) and not cache.is_compileable


def packed_layers(cache: DMACache) -> list[DMALayer]:
    """Return the layers of a cache that hold packed keys and values."""
    return [layer for layer in cache.layers if isinstance(layer, DMALayer) and layer.is_initialized]


def _signature_of(inputs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return what the arguments of two calls have in common if one graph computes both, or ``None`` if none can."""
    parts: list[Any] = [torch.is_inference_mode_enabled()]
    for name, value in inputs.items():
        if name == CACHE_ARGUMENT or (name == MASK and isinstance(value, (Tensor, NoneType))):
            continue
        if isinstance(value, Tensor):
            parts.append((name, value.shape, value.dtype, value.device))
        elif isinstance(value, PLAIN):
            parts.append((name, value))
        else:
            return None
    return tuple(parts)


def _why_eager(model: PreTrainedModel, cache: DMACache, layers: list[DMALayer], inputs: dict[str, Any]) -> str | None:
    """Return why the steps of a call cannot be captured, or ``None``. Waits for the device if there is padding."""
    if cache.offloading:
        return "the cache is offloaded"
    others = {type(layer).__name__ for layer in cache.layers if not isinstance(layer, DMALayer)}
    if others:
        return f"the cache has layers that hold other states ({', '.join(sorted(others))})"
    if not layers or not all(layer.is_settled for layer in layers):
        return "a row of the batch is all padding"
    reason = why_model_is_eager(model, inputs)
    mask = inputs.get(MASK)
    if reason is not None or mask is None:
        return reason
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return "the model makes the attention mask of a step itself"
    if inputs.get("position_ids") is None:
        return "the batch is padded, and the model takes no position_ids"
    visible = mask.bool()
    is_left_padded = (visible[:, 1:] >= visible[:, :-1]).all() & visible[:, -1].all()
    if not bool(is_left_padded & _has_all_keys(visible, layers[0], 1)):
        return "the attention mask hides keys other than padding on the left"
    return None


def why_model_is_eager(model: PreTrainedModel, inputs: Mapping[str, Any]) -> str | None:
    """Return why the steps of a model cannot be captured, whatever its cache, or ``None``."""
    if not model._can_compile_fullgraph:
        return f"Transformers cannot compile {type(model).__name__} as one graph"
    if model.training or torch.is_grad_enabled():
        return "the model is in training mode, or gradients are enabled"
    if torch.is_autocast_enabled("cuda"):
        return "autocast is on"
    devices = {tensor.device for module in model.modules() for tensor in _tensors_of(module)}
    if len(devices) != 1:
        return f"the model is on several devices ({', '.join(sorted(map(str, devices)))})"
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if "_hf_hook" in vars(module) or not all(map(is_output_hook, hooks)):
            return f"{name or 'the model'} has a forward hook"
    decoder = model.config.get_text_config(decoder=True)
    if any(inputs.get(name, getattr(decoder, name, False)) for name in OUTPUTS):
        return "the call returns attentions, hidden states or router logits"
    return None


def _has_all_keys(mask: Tensor, layer: DMALayer, new: int) -> Tensor:
    """Return whether a mask ``[B, T]`` shows all keys of a layer and ``new`` more, as a boolean tensor."""
    return (mask.sum(-1) == layer.storage.lengths + new).all()


def _captured(
    model: PreTrainedModel,
    signature: tuple[Any, ...],
    cache: DMACache,
    layers: list[DMALayer],
    inputs: dict[str, Any],
) -> DecodingGraph:
    """Capture a step without running it. The cache does not change, even if it fails.

    Raises:
        RuntimeError: The model needs a value on the host.
    """
    tokens, state = layers[0].tokens, state_of_model(model)
    with torch.inference_mode(False):
        given = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and name != MASK}
        static = {name: torch.empty_like(value) for name, value in given.items()}
        position = torch.tensor(tokens, device=layers[0].device)
    for name, value in given.items():
        static[name].copy_(value)
    arguments = inputs | static | ({MASK: None} if MASK in inputs else {})
    room = min(layer.storage.room for layer in layers)
    counters = [(layer.storage.appended, layer.storage.rolled_back) for layer in layers]
    cache.owner.capture = Capture(position, room)

    def step() -> ModelOutput:
        output: ModelOutput = model(**arguments)
        position.add_(1)
        return output

    try:
        with recorded_uses() as uses:
            replay, output = record(step)
    finally:
        cache.owner.capture = None
        for layer, (appended, rolled_back) in zip(layers, counters, strict=True):
            layer.pending = None
            layer.storage.appended, layer.storage.rolled_back = appended, rolled_back
    kept = {name: value for name, value in output.items() if name not in CACHE_ARGUMENTS}
    tables = [layer.storage.page_table for layer in layers]
    return DecodingGraph(signature, state, tables, room, static, position, tokens, type(output)(**kept), uses, replay)


def record(step: Callable[[], ModelOutput]) -> tuple[Callable[[], None], ModelOutput]:
    """Capture a function as a CUDA graph. Returns its replay, and the outputs that each replay overwrites."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = step()
    return graph.replay, output


def _replay(
    model: PreTrainedModel, graph: DecodingGraph, cache: DMACache, layers: list[DMALayer], inputs: dict[str, Any]
) -> ModelOutput:
    """Run a step, and count its token in the cache."""
    torch._foreach_copy_(list(graph.inputs.values()), [inputs[name] for name in graph.inputs])
    tokens = layers[0].tokens
    if graph.tokens != tokens:  # tokens were cropped, or added in another way
        graph.position.fill_(tokens)
    graph.replay()
    graph.tokens = tokens + 1
    for layer in layers:
        layer.tokens += 1
        layer.storage.count_appended(1)
    mask = inputs.get(MASK)
    if mask is not None:
        torch._assert_async(_has_all_keys(mask, layers[0], 0), "the attention mask of generate hides cached keys")
    count_replay(model, graph.uses)
    return type(graph.outputs)(**graph.outputs, **{CACHE_ARGUMENT: cache})


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module without those of its children."""
    return [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]


def state_of_model(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return what a graph of a model depends on: addresses of tensors, and plain attributes of modules and configs.

    It changes with adapters, adapter switches, merged or replaced weights, and settings.
    """
    parts: list[Any] = []
    for module in model.modules():
        parts.append(type(module))
        parts.extend(tensor.data_ptr() for tensor in _tensors_of(module))
        parts.extend(_plain(vars(module)))
    config: PreTrainedConfig = model.config.get_text_config(decoder=True)
    parts.extend(_plain(vars(config)))
    parts.append(settings_of(config))
    return tuple(parts)


def _plain(attributes: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the attributes that are numbers, names, or collections of them."""
    plain: list[tuple[str, Any]] = []
    for name, value in attributes.items():
        if name in _OF_TORCH:
            continue
        kind = type(value)
        if kind in PLAIN:
            plain.append((name, value))
        elif kind in (list, tuple, dict):
            items = tuple(value.items() if kind is dict else enumerate(value))
            if all(type(item) in PLAIN for _, item in items):
                plain.append((name, items))
    return plain
