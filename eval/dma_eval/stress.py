"""Twins of a model whose keys, queries or values are harder to quantise, and what the model itself is like.

A twin has channels that stand out, as those of Llama 3 and Qwen2.5 do. Scales make the same function: what keys are
multiplied by, queries are divided by, and what values are, the output projection's input. Biases of keys, before the
rotary embedding, make another, which is compared with its own exact attention. Everything is done by hooks on the
modules that make queries, keys and values; the weights are not touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dma_hf.equalization import measure_ranges
from dma_hf.projections import Layer, find_layers, watched

SCALED_PAIRS = 2
"""Pairs of channels of each key head that a twin scales, and channels of each value head."""
BIASED = (10 / 32, 26 / 32, 29 / 32)
"""Which pairs of each key head get a bias, from the fastest in the rotary embedding, 0, to the slowest, 1. Slow pairs
hardly turn, so that their bias stays in place for every token, as Qwen2's do."""


@dataclass(frozen=True)
class Twin:
    """A change of every attention layer.

    Attributes:
        name: What tables call it.
        keys: Factor of the keys' scaled channels; queries have its inverse.
        values: Factor of the values' scaled channels; the output projection's inputs have its inverse.
        bias: Absolute value of the keys' biases.
    """

    name: str
    keys: float = 1.0
    values: float = 1.0
    bias: float = 0.0

    @property
    def is_same_function(self) -> bool:
        """Whether it computes what the model computes."""
        return self.bias == 0


TWINS = (
    Twin("as it is"),
    Twin("keys x 8", keys=8.0),
    Twin("keys x 32", keys=32.0),
    Twin("queries x 8", keys=1 / 8),
    Twin("queries x 32", keys=1 / 32),
    Twin("values x 8", values=8.0),
    Twin("values x 32", values=32.0),
    Twin("key biases", bias=10.0),
)


@dataclass(frozen=True)
class LayerRange:
    """How far the largest key channel of a layer stands out.

    Attributes:
        layer: The layer's name.
        ratio: Its range by that of the median channel of its head, for the head where that is largest.
        head: That key head.
        channel: The channel.
    """

    layer: str
    ratio: float
    head: int
    channel: int


def key_ranges(model: PreTrainedModel, tokens: Tensor) -> list[LayerRange]:
    """Measure for each attention layer how far its largest key channel stands out over ``tokens``."""
    names = {module: name for name, module in model.named_modules()}
    found = []
    for module, (_, keys) in measure_ranges(model, tokens).items():
        ratios = keys / keys.median(-1, keepdim=True).values
        head, channel = divmod(int(ratios.argmax()), keys.shape[-1])
        found.append(LayerRange(names[module], float(ratios[head, channel]), head, channel))
    return found


def attention_layers(model: PreTrainedModel, tokens: Tensor) -> list[Layer]:
    """Find the layers that :func:`stressed` can change, from a pass over ``tokens`` ``[T]``.

    Raises:
        ValueError: A layer makes queries or keys in another way than by linear layers and norms.
    """
    widest = max(keys.shape[-1] for _, keys in measure_ranges(model, tokens).values())
    return find_layers(model, tokens, widest)


@contextmanager
def stressed(model: PreTrainedModel, layers: Sequence[Layer], twin: Twin, seed: int = 1) -> Iterator[None]:
    """Within a ``with`` block, ``model`` is a twin of itself.

    Args:
        model: The model.
        layers: Its layers, from :func:`attention_layers`.
        twin: What to change.
        seed: Seed of the choice of scaled channels.

    Raises:
        ValueError: Values are to be scaled, and a layer makes or uses them in another way than by linear layers.
    """
    generator = torch.Generator().manual_seed(seed)
    with ExitStack() as stack:
        for layer in layers:
            factors, addends = torch.ones(layer.channels), torch.zeros(layer.channels)
            scaled, biased = _chosen_keys(layer, generator)
            factors[layer.key[scaled]] = twin.keys
            factors[layer.query[scaled.repeat_interleave(layer.group, 0)]] = 1 / twin.keys
            addends[layer.key] = twin.bias * biased
            if twin.values != 1:
                hook = _scale_values(model, layer, factors, twin.values, generator)
                stack.callback(hook.remove)
            for source in layer.sources:
                own = slice(source.start, source.start + source.channels)
                if (factors[own] != 1).any() or addends[own].any():
                    hook = _change(source.module, factors[own].view(source.shape), addends[own].view(source.shape))
                    stack.callback(hook.remove)
        yield


def _chosen_keys(layer: Layer, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Which key channels are scaled, and the signs of those that are biased, ``[Hkv, D]``: whole pairs of each head."""
    labels = layer.groups(lambda channels: channels)
    scaled, biased = torch.zeros_like(labels, dtype=torch.bool), torch.zeros_like(labels)
    for head, own in enumerate(labels):
        pairs = own.unique()
        drawn = pairs[torch.randperm(len(pairs), generator=generator)[:SCALED_PAIRS]]
        scaled |= torch.isin(labels, drawn)
        for place in BIASED:
            channels = (own == pairs[int(place * len(pairs))]).nonzero().flatten()
            biased[head, channels] = torch.tensor([1, -1]).repeat(len(channels))[: len(channels)]
    return scaled, biased


def _scale_values(
    model: PreTrainedModel, layer: Layer, factors: Tensor, factor: float, generator: torch.Generator
) -> Any:
    """Set the factors of some of a layer's value channels, and divide what its output projection takes by them."""
    heads, dim = layer.value.shape
    chosen = torch.stack([torch.randperm(dim, generator=generator) < SCALED_PAIRS for _ in range(heads)])
    with watched(model):
        projection = layer.find_output_projection()
    if projection is None or (layer.value < 0).any():
        raise ValueError(f"{layer.name}: its values do not go from a linear layer through the attention into another")
    factors[layer.value[chosen]] = factor
    inverse = torch.where(chosen, 1 / factor, 1.0).repeat_interleave(layer.group, 0).flatten()
    return projection.register_forward_pre_hook(lambda _, args: (args[0] * inverse.to(args[0]), *args[1:]))


def _change(module: nn.Module, factors: Tensor, addends: Tensor) -> Any:
    """Multiply and shift what a module puts out."""
    return module.register_forward_hook(lambda _m, _i, output: output * factors.to(output) + addends.to(output))
