"""Find the weights that make the queries, keys and values of each attention layer, by running the layer.

No architecture is special here. The outputs of linear layers and norms are replaced by numbers that identify their
channels. The queries and keys that reach the attention function then show where each channel comes from, because the
rotary embedding does not rotate the token at position 0. At later positions a single channel is nonzero. The nonzero
channels after the rotary embedding are the ones that it mixes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from dma_hf.config import NAME
from dma_hf.integrations.internals import distinct_configs, set_attention_name

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

BASE = 32
"""Base of the digits that number channels. BF16 represents them exactly, even with a long-context factor."""
WATCHED = f"{NAME}_watched"  # the attention implementation of a model while its layers are watched
_watching: ContextVar[Callable[..., Any]] = ContextVar("_watching")  # the attention function of this thread
LARGE = 2.0**20  # multiples of this number reveal functions that are linear for small numbers only, such as clipping


class Operands(NamedTuple):
    """Inputs and output of a layer's attention function, and output of the layer."""

    query: Tensor  # [Hq, T, D]
    key: Tensor  # [Hkv, T, D]
    value: Tensor  # [Hkv, T, Dv]
    attended: Tensor  # result of the attention function, [B, T, Hq, Dv]
    output: Tensor  # of the layer


@dataclass(frozen=True)
class Source:
    """A linear layer or norm whose output channels become channels of queries, keys or values, unchanged."""

    module: nn.Module
    start: int  # index of its first channel among the channels of all sources of the layer
    channels: int  # output channels per token
    shape: tuple[int, ...]  # of its output, with 1 for batch and tokens

    @property
    def weights(self) -> int:
        """Number of independent factors: one per row, or per element of a norm that all heads share."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight.shape[0] if isinstance(self.module, nn.Linear) else weight.numel()


@dataclass(frozen=True)
class Layer:
    """An attention layer that can be called by itself."""

    name: str  # in the model
    module: nn.Module
    arguments: Arguments  # positional and keyword arguments of a call
    sources: tuple[Source, ...]  # modules that make its operands
    query: Tensor  # index of the source channel of each query channel, [Hq, D]
    key: Tensor  # the same of each key channel, [Hkv, D]
    value: Tensor  # the same of each value channel, [Hkv, Dv], or -1 without a source
    mixed: Tensor  # pairs of key channels that the rotary embedding mixes, as head * D + channel, [2, N]

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.query.shape[0] // self.key.shape[0]

    def run(self) -> Operands:
        return _call(self.module, self.arguments)

    def find_output_projection(self) -> nn.Linear | None:
        """Return the linear layer whose input is the attention's output, or ``None`` if something is in between."""
        inputs: dict[nn.Linear, Tensor] = {}
        with ExitStack() as stack:
            for linear in self.module.modules():
                if isinstance(linear, nn.Linear):
                    stack.enter_context(linear.register_forward_pre_hook(lambda m, args: inputs.update({m: args[0]})))
            attended = self.run().attended.flatten()
        return next((m for m, taken in inputs.items() if torch.equal(taken.float().cpu().flatten(), attended)), None)

    @property
    def channels(self) -> int:
        """Output channels per token of all sources."""
        return sum(source.channels for source in self.sources)

    def groups(self, shares: Callable[[Tensor], Tensor]) -> Tensor:
        """Label key channels, ``[Hkv, D]``. Channels that must share a factor have the same label.

        They must if the rotary embedding mixes them, or if ``shares`` maps their source channels, or those of their
        queries, to the same number. ``shares`` is, for example, :meth:`weight_of`.
        """
        (heads, dim), group = self.key.shape, self.group
        slots = torch.arange(heads * dim)
        of_queries = slots.view(heads, 1, dim).expand(-1, group, -1).flatten()
        made = [(slots, self.key), (of_queries, self.query)]
        pairs = [torch.stack((ends, len(slots) + shares(channels).flatten())) for ends, channels in made]
        first, second = torch.cat([self.mixed, *pairs], 1).numpy()
        graph = coo_array((np.ones(len(first)), (first, second)), shape=(len(slots) + self.channels,) * 2)
        _, labels = connected_components(graph, directed=False)
        return torch.from_numpy(labels).long()[: len(slots)].view(heads, dim)

    def weight_of(self, channels: Tensor) -> Tensor:
        """Return the index of the weight that makes each of these source channels."""
        weights = channels.clone()
        for source in self.sources:
            own = (channels >= source.start) & (channels < source.start + source.channels)
            weights[own] = source.start + (channels[own] - source.start) % source.weights
        return weights


def find_layers(model: PreTrainedModel, tokens: Tensor) -> list[Layer]:
    """Find the sources of every attention layer that a pass over ``tokens`` ``[T]`` runs.

    Raises:
        ValueError: A layer cannot be called by itself, is called more than once in a pass, or does not make queries and
            keys with linear layers and norms. The message names the layer.
    """
    calls: dict[nn.Module, Arguments] = {}
    ran: list[nn.Module] = []
    widths: list[int] = []
    with watched(model, lambda _module, _query, key, _value: widths.append(key.shape[-1])):
        model(input_ids=tokens[None, :1].to(model.device))
    count = max(widths) + 1  # more tokens than a head has channels, and a number that no other axis has
    while any(count % divisor == 0 for divisor in range(2, math.isqrt(count) + 1)):
        count += 1
    tokens = tokens.repeat(-(-count // len(tokens)))[:count]  # which tokens they are does not matter
    with ExitStack() as stack:
        for module in model.modules():
            hook = module.register_forward_pre_hook(lambda *call: calls.update({call[0]: call[1:]}), with_kwargs=True)
            stack.enter_context(hook)
        with watched(model, lambda module, *_: ran.append(module)):
            model(input_ids=tokens[None].to(model.device))
    names = {module: name for name, module in model.named_modules()}
    for module in ran:
        if module not in calls or ran.count(module) > 1:
            name = names.get(module, type(module).__name__)
            raise ValueError(f"{name} computes attention more than once in a pass, because layers share its weights")
    with watched(model):
        return [_trace(names[module], module, calls[module], count) for module in ran]


@contextmanager
def watched(
    model: PreTrainedModel, watch: Callable[[nn.Module, Tensor, Tensor, Tensor], None] | None = None
) -> Iterator[None]:
    """Run a model's eager attention within a ``with`` block, and call ``watch`` with each layer and its operands.

    Gradients, dropout and caches are off. Other models and threads are not affected.
    """

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if watch is not None:
            watch(module, query, key, value)
        for cls in type(module).__mro__:
            own = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
            if own is not None:
                return own(module, query, key, value, *args, **kwargs)
        raise ValueError(f"{type(module).__name__} has no eager attention")

    configs = [(config, dict(vars(config))) for config in distinct_configs(model)]
    modes = [(module, module.training) for module in model.modules()]
    AttentionInterface.register(WATCHED, lambda *arguments, **options: _watching.get()(*arguments, **options))
    AttentionMaskInterface.register(WATCHED, eager_mask)
    watching = _watching.set(attention)
    try:
        model.eval()
        for config, _ in configs:  # outermost first: the setter writes to nested ones too
            set_attention_name(config, WATCHED)
            config.use_cache = False
        with torch.no_grad():
            yield
    finally:
        _watching.reset(watching)
        for config, previous in configs:
            vars(config).clear()
            vars(config).update(previous)
        for module, mode in modes:
            module.training = mode


def _trace(name: str, module: nn.Module, call: Arguments, count: int) -> Layer:
    sources = _sources(module, call, count)
    total = sum(source.channels for source in sources)

    def observe(numbers: Tensor) -> Operands:
        with _replaced(sources, numbers):
            return _call(module, call)

    unit = observe(torch.ones(count, total))
    check = LARGE * torch.randint(-BASE, BASE + 1, (total,), generator=torch.Generator().manual_seed(0)).float()
    checked = observe(check.expand(count, -1))
    digits = 1
    while BASE**digits < total:
        digits += 1
    places = [BASE**place for place in range(digits)]
    coded = [observe((torch.arange(total) // place % BASE + 1.0).expand(count, -1)) for place in places]

    def source_of(which: int) -> Tensor:
        """Return the source of each channel of an operand, from its first token, or -1 if it has none."""
        factor = unit[which][:, 0]
        codes = torch.stack([each[which][:, 0] for each in coded]) / factor - 1
        channels = (codes.nan_to_num().round().long() * torch.tensor(places)[:, None, None]).sum(0)
        is_known = (channels >= 0) & (channels < total)
        expected = check[torch.where(is_known, channels, 0)]
        is_copy = (checked[which][:, 0] / factor - expected).abs() <= expected.abs() / 64  # not where a factor is 0
        return torch.where(is_known & is_copy, channels, -1)

    query, key, value = (source_of(which) for which in range(3))
    for what, channels in (("queries", query), ("keys", key)):
        if (channels < 0).any():
            raise ValueError(
                f"{name}: its {what} are not what linear layers or norms of its own put out, turned by a rotary "
                "embedding; nothing can be folded into its weights"
            )
    mixed = _mixed(observe, total, query, key, count)
    return Layer(name, module, call, sources, query, key, value, mixed)


def _sources(module: nn.Module, call: Arguments, count: int) -> tuple[Source, ...]:
    """Return each linear layer and norm with weights that runs once in a call, with an output for each token."""
    outputs: dict[nn.Module, list[Any]] = {}
    with ExitStack() as stack:
        for leaf in module.modules():
            is_known = isinstance(leaf, nn.Linear) or "Norm" in type(leaf).__name__
            if is_known and isinstance(getattr(leaf, "weight", None), Tensor):
                record = outputs.setdefault(leaf, [])
                hook = leaf.register_forward_hook(lambda _m, _i, output, record=record: record.append(output))
                stack.enter_context(hook)
        _call(module, call)
    sources, start = [], 0
    for leaf, seen in outputs.items():
        if len(seen) == 1 and isinstance(seen[0], Tensor) and list(seen[0].shape).count(count) == 1:
            channels = seen[0].numel() // count
            shape = tuple(1 if size == count else size for size in seen[0].shape)
            sources.append(Source(leaf, start, channels, shape))
            start += channels
    return tuple(sources)


@contextmanager
def _replaced(sources: tuple[Source, ...], numbers: Tensor) -> Iterator[None]:
    """Replace the outputs of the sources by ``numbers`` ``[T, channels of all sources]`` within a ``with`` block."""

    def replace(own: Tensor, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        axis = list(output.shape).index(len(own))
        return own.reshape(output.movedim(axis, 0).shape).movedim(0, axis).to(output)

    with ExitStack() as stack:
        for source in sources:
            own = numbers[:, source.start : source.start + source.channels]
            stack.enter_context(source.module.register_forward_hook(partial(replace, own)))
        yield


def _mixed(observe: Callable[[Tensor], Operands], total: int, query: Tensor, key: Tensor, count: int) -> Tensor:
    """Return pairs of key channels that a rotary embedding mixes in keys, or in queries of their group, ``[2, N]``."""
    dim, group = key.shape[1], query.shape[0] // key.shape[0]
    numbers = torch.zeros(count, total)
    for channels in (query, key):
        numbers[torch.arange(1, dim + 1).expand_as(channels), channels] = 1  # token c + 1 has channel c alone
    found = observe(numbers)
    pairs = []
    for operand, per_key in ((found.query, group), (found.key, 1)):
        head, channel, other = operand[:, 1 : dim + 1].nonzero().T
        row = head // per_key * dim
        pairs.append(torch.stack((row + channel, row + other)))
    return torch.cat(pairs, 1)


def _call(module: nn.Module, call: Arguments) -> Operands:
    """Call an attention layer of a watched model, and return its operands and outputs."""
    seen: list[list[Tensor]] = []
    watching = _watching.get()

    def attention(caller: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = watching(caller, query, key, value, *args, **kwargs)
        seen.append([each.float().cpu() for each in (query[0], key[0], value[0], result[0])])
        return result

    token = _watching.set(attention)
    try:
        output = module(*call[0], **call[1])
    finally:
        _watching.reset(token)
    return Operands._make([*seen[0], (output if isinstance(output, Tensor) else output[0]).float().cpu()])
