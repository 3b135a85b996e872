"""Twins of a model with larger outlier channels, and the outlier channels of the model itself.

Scale twins compute the same function: if keys are multiplied, queries are divided, and if values are multiplied, the
input of the output projection is divided. Key biases before the rotary embedding change the function, so each backend
is compared with exact attention on the same twin. Hooks on modules do this. The weights do not change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import dma_hf
from dma_eval.config import PerplexityPart, StressPart
from dma_eval.equalization import measure_ranges
from dma_eval.equalization.weight_tracing import Layer, find_layers, watched
from dma_eval.errors import UserError
from dma_eval.load.backends import Backend, activate
from dma_eval.load.data import Text
from dma_eval.load.reading import read
from dma_eval.results import ChannelRange, StressSection, ThresholdStudy, TwinResult
from dma_eval.session import Session
from dma_hf.config import EQUALIZED
from dma_hf.stats import counted_tiles

from .perplexity import Reading, compare, cut

RANGE_TOKENS = 1024  # tokens over which ranges are measured
SCALED_PAIRS = 2  # pairs of channels of each key head that a twin scales, and channels of each value head
THRESHOLDS = (4.0, 5.0, 6.0, 7.0, 8.0)  # tested thresholds of tile skipping, in nats
BIASED = (10 / 32, 26 / 32, 29 / 32)
"""Positions of the biased pairs in each key head, from the fastest of the rotary embedding, 0, to the slowest, 1. Slow
pairs hardly rotate, so their bias is nearly the same for every token, as in Qwen2."""

Ranges = tuple[list[ChannelRange], list[ChannelRange]]
"""The largest outlier channel of each layer's keys, and of its queries."""


class NoTwinError(ValueError):
    """Hooks cannot change the model in this way."""


@dataclass(frozen=True)
class Twin:
    """A change of every attention layer."""

    name: str  # its name in tables
    keys: float = 1.0  # factor of the keys' scaled channels; queries have its inverse
    values: float = 1.0  # factor of the values' scaled channels; the output projection's inputs have its inverse
    bias: float = 0.0  # absolute value of the keys' biases; with them it computes another function


TWINS = (
    Twin("unchanged"),
    Twin("keys x 8", keys=8.0),
    Twin("keys x 32", keys=32.0),
    Twin("queries x 8", keys=1 / 8),
    Twin("queries x 32", keys=1 / 32),
    Twin("values x 8", values=8.0),
    Twin("values x 32", values=32.0),
    Twin("key biases", bias=10.0),
)


def measure_stress(session: Session, text: Text, part: StressPart) -> StressSection:
    """Measure every backend on the model and each twin, over the same windows. The first is the reference of each."""
    loaded = session.loaded
    how = PerplexityPart(max_windows=part.max_windows, batch_size=part.batch_size)
    reading = cut(loaded, text, how, part.context)
    sample = reading.tokens.ids[: min(RANGE_TOKENS, loaded.max_context or RANGE_TOKENS)]

    def ranges(twin: Twin) -> Ranges:
        """Measure the ranges of a twin, which the model is now."""
        settings: dict[str, Any] = {"text": text.sha256, "tokens": len(sample), "seed": session.seed}
        place = "stress", twin.name, "ranges"
        made: Ranges
        made, _ = session.piece(Ranges, lambda: channel_ranges(loaded.model, sample), *place, backends=(), **settings)
        return made

    try:
        key_ranges, query_ranges = ranges(TWINS[0])
        layers = find_layers(loaded.model, sample)
    except ValueError as error:
        raise UserError(f"{type(loaded.model).__name__} has no twins: {error}") from error
    twins = []
    for twin in TWINS:
        found: dict[str, Any] = {"name": twin.name}
        try:
            with stressed(loaded.model, layers, twin, seed=session.seed):
                found["key_ratio"], found["query_ratio"] = (max(each.ratio for each in of) for of in ranges(twin))
                place = "stress", twin.name
                found["tokens"] = compare(session, reading, session.backends, place=place, seed=session.seed)
        except NoTwinError as error:
            found["refused"] = str(error)
        twins.append(TwinResult(**found))
    thresholds = [
        study_thresholds(session, reading, backend)
        for backend in session.backends[1:]
        if backend.config is not None and not backend.reads_cache
        if backend.config.skip_threshold is not None and backend.config.skip_threshold < math.inf
    ]
    return StressSection(
        range_tokens=len(sample),
        key_ranges=key_ranges,
        query_ranges=query_ranges,
        twins=twins,
        thresholds=thresholds,
    )


def study_thresholds(session: Session, reading: Reading, backend: Backend) -> ThresholdStudy:
    """Measure a backend that skips tiles on the unchanged model, with other thresholds and without skipping."""
    config = backend.config
    assert config is not None and config.skip_threshold is not None  # noqa: PT018
    own = config.skip_threshold
    thresholds = [None, *sorted({*THRESHOLDS, own}, reverse=True)]
    backends = [
        replace(backend, label=f"{backend.label}, t = {t}", config=replace(config, skip_threshold=t))
        for t in thresholds
    ]
    place = "stress", "thresholds", backend.label
    tokens = compare(session, reading, [session.backends[0], *backends], place=place)
    first, model = reading.windows[0], session.loaded.model

    working = [each for each, result in zip(backends, tokens.backends[1:], strict=True) if not result.failure]

    def shares() -> dict[str, float]:
        ids, found = first.of(reading.tokens.ids)[None].to(model.device), {}
        for each in working:
            activate(model, each)
            dma_hf.reset_stats(model)
            with counted_tiles():
                read(model, each, ids, last=1)
            found[each.label] = dma_hf.stats(model).skipped_share or 0.0
        return found

    facts: dict[str, Any] = {"text": reading.text.sha256, "window": [first.begin, first.end, first.prefix]}
    found, _ = session.piece(dict[str, float], shares, *place, "skipped", backends=working, **facts)
    skipped = [found.get(each.label) for each in backends]
    return ThresholdStudy(label=backend.label, own=own, thresholds=thresholds, skipped=skipped, tokens=tokens)


def channel_ranges(model: PreTrainedModel, tokens: Tensor) -> Ranges:
    """Measure the largest outlier channel of each layer's keys and queries over ``tokens``."""
    names = {module: name for name, module in model.named_modules()}
    found: Ranges = ([], [])
    for module, (queries, keys) in measure_ranges(model, tokens).items():
        for ranges, channels in zip(found, (keys, queries), strict=True):
            ratios = channels / channels.median(-1, keepdim=True).values.clamp_min(torch.finfo(channels.dtype).tiny)
            head, channel = divmod(int(ratios.argmax()), channels.shape[-1])
            ratio = float(ratios[head, channel])
            ranges.append(ChannelRange(layer=names[module], ratio=ratio, head=head, channel=channel))
    return found


@contextmanager
def stressed(model: PreTrainedModel, layers: Sequence[Layer], twin: Twin, seed: int = 0) -> Iterator[None]:
    """Turn ``model`` into a twin within a ``with`` block. With other keys it does not count as equalized."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config.get_text_config(decoder=True)
    with ExitStack() as stack:
        if (twin.keys != 1 or twin.bias) and hasattr(config, EQUALIZED):
            stack.callback(setattr, config, EQUALIZED, getattr(config, EQUALIZED))
            setattr(config, EQUALIZED, False)
        for layer in layers:
            factors, addends = torch.ones(layer.channels), torch.zeros(layer.channels)
            scaled, biased = _chosen_keys(layer, generator)
            factors[layer.key[scaled]] = twin.keys
            factors[layer.query[scaled.repeat_interleave(layer.group, 0)]] = 1 / twin.keys
            addends[layer.key] = twin.bias * biased
            if twin.values != 1:
                stack.enter_context(_scale_values(model, layer, factors, twin.values, generator))
            for source in layer.sources:
                own = slice(source.start, source.start + source.channels)
                if (factors[own] != 1).any() or addends[own].any():
                    hook = _change(source.module, factors[own].view(source.shape), addends[own].view(source.shape))
                    stack.enter_context(hook)
        yield


def _chosen_keys(layer: Layer, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return which key channels are scaled, and the signs of the biased ones, ``[Hkv, D]``. They are whole pairs."""
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
    """Set the factors of some value channels of a layer, and divide the input of the output projection by them."""
    heads, dim = layer.value.shape
    chosen = torch.stack([torch.randperm(dim, generator=generator) < SCALED_PAIRS for _ in range(heads)])
    with watched(model):
        projection = layer.find_output_projection()
    if projection is None or (layer.value < 0).any():
        raise NoTwinError(f"{layer.name}: its values are not computed by one linear layer and used by another")
    factors[layer.value[chosen]] = factor
    inverse = torch.where(chosen, 1 / factor, 1.0).repeat_interleave(layer.group, 0).flatten()
    return projection.register_forward_pre_hook(lambda _, args: (args[0] * inverse.to(args[0]), *args[1:]))


def _change(module: nn.Module, factors: Tensor, addends: Tensor) -> Any:
    return module.register_forward_hook(lambda _m, _i, output: output * factors.to(output) + addends.to(output))
