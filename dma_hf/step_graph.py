"""A decoding step of ``generate`` that was captured as a CUDA graph.

In eager mode the host needs longer to launch the kernels of a step than the GPU needs to run them. A graph launches all
of them at once. It holds addresses, not tensors, so it is valid for one storage of the cache, one state of the model
and one shape of the inputs. :mod:`dma_hf.decoding` captures steps and replays them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .config import settings_of
from .integrations.internals import CACHE_ARGUMENT, CACHE_ARGUMENTS, is_output_hook
from .masks.geometry import CompactMask, MaskGeometry
from .stats import Use, count_replay, recorded_uses
from .support import OF_GENERATION

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

MASK = "attention_mask"
_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Arguments that make a model return states that ``generate`` keeps. A replay would overwrite them."""
_PLAIN = (bool, int, float, str, NoneType)
"""Types of values that are compared by value."""
_NOT_COMPARED = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call", "rope_deltas"}
"""Attributes that say nothing about a step: those of every module, and what ``get_compiled_call`` keeps. Qwen's
vision-language models replace ``rope_deltas`` with each prompt. The positions of a step, an argument, contain them."""
_FUNCTIONS = (FunctionType, BuiltinFunctionType, partial)
"""Types of functions, such as a ``forward`` of a single module. A graph must not keep them, and the model, alive."""
_GEOMETRY_FIELDS = tuple(field.name for field in fields(MaskGeometry))

Inputs = dict[tuple[Any, ...], Any]
"""Arguments of a step by name, and fields of its masks by name, kind of layer and field. The cache is left out, and so
are arguments of ``generate``."""


@dataclass(eq=False)
class StepGraph:
    """A captured decoding step.

    Attributes:
        signature: See :func:`signature_of`.
        model: State of the model, see :func:`state_of_model`.
        cache: Objects of the cache, of which others would have other addresses.
        inputs: Tensors that the graph reads.
        outputs: The output of the model without the cache. A replay overwrites its tensors.
        uses: Calls of attention layers in a step.
        launch: Launches the graph.
    """

    signature: tuple[Any, ...]
    model: tuple[Any, ...]
    cache: list[Any]
    inputs: Inputs
    outputs: ModelOutput
    uses: list[tuple[nn.Module, Use]]
    launch: Callable[[], None]

    @classmethod
    def of(cls, step: Callable[[], ModelOutput], **attributes: Any) -> Self:
        """Capture a step without running it.

        Raises:
            RuntimeError: The model needs a value on the host.
        """
        with recorded_uses() as uses:
            launch, output = record(step)
        outputs = type(output)(**{name: value for name, value in output.items() if name not in CACHE_ARGUMENTS})
        return cls(outputs=outputs, uses=uses, launch=launch, **attributes)

    def fits(self, signature: tuple[Any, ...] | None, cache: list[Any]) -> bool:
        """Return whether the graph computes a step with these inputs over a cache with these objects."""
        return signature == self.signature and are_same(cache, self.cache)

    def replay(self, model: PreTrainedModel, inputs: Inputs, cache: Any) -> ModelOutput:
        """Run a step with other inputs, and return the output of the model with the cache."""
        torch._foreach_copy_(list(self.inputs.values()), [inputs[key] for key in self.inputs])
        self.launch()
        count_replay(model, self.uses)
        return type(self.outputs)(**self.outputs, **{CACHE_ARGUMENT: cache})


def record(step: Callable[[], ModelOutput]) -> tuple[Callable[[], None], ModelOutput]:
    """Capture a function as a CUDA graph. Returns what launches it, and the outputs that each launch overwrites."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = step()
    return graph.replay, output


def failure(error: RuntimeError) -> str:
    """Return why the steps of a call run eagerly if their capture raised an error."""
    return f"the step cannot be captured: {str(error).strip().splitlines()[0]}"


def are_same(one: list[Any], other: list[Any]) -> bool:
    """Return whether two lists hold the same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


# ---- the inputs of a step


def inputs_of(arguments: Mapping[str, Any]) -> Inputs:
    """Return the inputs in the arguments of a step. A mask of this package is described by its geometry."""
    inputs: Inputs = {}
    for name, value in arguments.items():
        if name == MASK:
            for kind, mask in _by_kind(value).items():
                if type(mask) is CompactMask:
                    inputs |= {(name, kind, field): getattr(mask.dma_geometry, field) for field in _GEOMETRY_FIELDS}
                else:
                    inputs[name, kind] = mask
        elif name != CACHE_ARGUMENT and name not in OF_GENERATION:
            inputs[(name,)] = value
    return inputs


def signature_of(inputs: Inputs) -> tuple[Any, ...] | None:
    """Return what the steps of one graph have in common, or ``None`` if no graph can compute a step.

    A step of a graph has one token a row, tensors on the device of the tokens, and plain values.
    """
    tokens = inputs.get(("input_ids",))
    if not isinstance(tokens, Tensor) or tokens.shape[1] != 1:
        return None
    parts: list[Any] = [torch.is_inference_mode_enabled()]
    for key, value in inputs.items():
        if isinstance(value, Tensor) and value.device == tokens.device:
            parts.append((key, value.shape, value.dtype))
        elif isinstance(value, _PLAIN):
            parts.append((key, value))
        else:
            return None
    return tuple(parts)


def with_copies(arguments: Mapping[str, Any], inputs: Inputs) -> tuple[dict[str, Any], Inputs]:
    """Return the arguments of a step with copies of its tensors, and the copies, which a graph may read."""
    copies = {key: value.clone() for key, value in inputs.items() if isinstance(value, Tensor)}
    copied = {name: copies.get((name,), value) for name, value in arguments.items()}
    if MASK in arguments:
        masks = {}
        for kind, mask in _by_kind(arguments[MASK]).items():
            masks[kind] = copies.get((MASK, kind), mask)
            if type(mask) is CompactMask:
                changes: dict[str, Any] = {key[2]: tensor for key, tensor in copies.items() if key[:2] == (MASK, kind)}
                masks[kind] = CompactMask.of(replace(mask.dma_geometry, **changes), mask.device)
        copied[MASK] = masks if isinstance(arguments[MASK], dict) else masks[None]
    return copied, copies


def _by_kind(mask: Any) -> dict[Any, Any]:
    """Return the masks of a step by the kind of layer, which is ``None`` if all layers share one."""
    return mask if isinstance(mask, dict) else {None: mask}


# ---- the model of a step


def why_model_is_eager(model: PreTrainedModel, arguments: Mapping[str, Any]) -> str | None:
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
    of_all = nn.modules.module
    if of_all._global_forward_hooks or of_all._global_forward_pre_hooks:
        return "all modules have a forward hook"
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if "_hf_hook" in vars(module) or not all(map(is_output_hook, hooks)):
            return f"{name or 'the model'} has a forward hook"
    decoder = model.config.get_text_config(decoder=True)
    if any(arguments.get(name, getattr(decoder, name, False)) for name in _OUTPUTS):
        return "the call returns attentions, hidden states or router logits"
    return None


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module without those of its children."""
    return [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return where and how a tensor is stored, or the tensors that one without storage consists of (torchao)."""
    if hasattr(tensor, "__tensor_flatten__"):
        names: list[str] = tensor.__tensor_flatten__()[0]
        return tuple(_layout(getattr(tensor, name)) for name in names)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def state_of_model(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return what a graph of a model depends on: layouts of tensors, and attributes of modules and configs.

    It changes with adapters, adapter switches, merged or replaced weights, replaced functions, and settings.
    """
    parts: list[Any] = []
    for module in model.modules():
        parts.append(type(module))
        parts.extend(map(_layout, _tensors_of(module)))
        parts.extend(_plain(vars(module)))
    config: PreTrainedConfig = model.config.get_text_config(decoder=True)
    parts.extend(_plain(vars(config)))
    parts.append(settings_of(config))
    return tuple(parts)


def _plain(attributes: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the attributes that are numbers, names, collections of them, tensors, or functions."""
    plain: list[tuple[str, Any]] = []
    for name, value in attributes.items():
        if name in _NOT_COMPARED:
            continue
        kind = type(value)
        if kind in _PLAIN:
            plain.append((name, value))
        elif kind is Tensor:
            plain.append((name, _layout(value)))
        elif kind is MethodType:
            plain.append((name, WeakMethod(value)))
        elif kind in _FUNCTIONS:
            plain.append((name, ref(value)))
        elif kind in (list, tuple, dict):
            items = tuple(value.items() if kind is dict else enumerate(value))
            if all(type(item) in _PLAIN for _, item in items):
                plain.append((name, items))
    return plain
