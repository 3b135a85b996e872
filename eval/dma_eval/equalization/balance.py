"""Balance the ranges of keys and queries in a model's weights, without changing what the model computes.

A score is a sum of products of query and key channels, so a factor can move from a key channel to its query channel.
The two channels that a rotary embedding rotates together must share a factor. Powers of two round nothing, so the model
computes the same numbers to the bit. Balanced keys and queries are easier to quantize.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from dma_kernels.numerics.call import is_integer
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedConfig, PreTrainedModel

from dma_hf.config import EQUALIZED

from .weight_tracing import Layer, Operands, Source, find_layers, watched

MIN_TOKENS = 1024  # to measure ranges over
WINDOW = 1024
"""Longer rows are read in windows of this many tokens, because eager attention stores all scores of a window."""
LEAST_OFFSET_GAIN = 0.5
"""Minimum gain of a norm that stores ``w`` and applies ``1 + w``. Below it ``w`` is near -1, where ``1 + w`` is inexact
in 16 bits."""


def equalize(model: PreTrainedModel, tokens: Tensor) -> dict[str, Tensor]:
    """Balance the ranges of keys and queries by powers of two in the weights of a model.

    The outputs of the model do not change by a single bit, in FP32 and in BF16. The exception is norms that apply
    ``1 + w`` (Gemma 3). In FP32 their channels get the nearest power of two that is exact. In BF16 their gains are
    rounded once more, by at most 2**-9. A saved model loads without this package. If all channels were balanced, its
    configuration has ``dma_equalized=True``, and an ``int4`` cache rotates its keys, which lowers the loss.

    Args:
        model: A model with rotary embeddings, in FP32 or BF16.
        tokens: Token ids of ordinary text, ``[T]`` or ``[B, T]``, at least 1,024 in all. If the tokenizer puts BOS
            before a text, give rows of at most 1,024 tokens that begin with it. Longer rows are read in windows.

    Returns:
        For each attention layer, by name, exponents of powers of two, ``[Hkv, D]``. Keys were multiplied by these
        powers, and the queries of their groups divided by them.

    Raises:
        TypeError: ``tokens`` is not a tensor of integers, or ``model`` is not a Transformers model.
        ValueError: There are too few tokens, or the model cannot be equalized. For example, it has no rotary embedding,
            or it is quantized or in FP16. The model does not change.
    """
    _check(model, tokens)
    ranges = measure_ranges(model, tokens)
    layers = find_layers(model, tokens.flatten())
    found = {layer.name: _exponents(layer, *ranges[layer.module]) for layer in layers}
    exponents = {name: each for name, (each, _) in found.items()}
    previous: list[tuple[Tensor, Tensor]] = []
    with watched(model):
        before = [layer.run() for layer in layers]
        are_exact = [_fold(layer, exponents[layer.name], previous) for layer in layers]
        try:
            for layer, operands, is_exact in zip(layers, before, are_exact, strict=True):
                _compare(layer, exponents[layer.name], operands, is_exact)
        except ValueError:
            for parameter, content in reversed(previous):
                parameter.copy_(content)
            raise
    setattr(model.config.get_text_config(decoder=True), EQUALIZED, all(balanced for _, balanced in found.values()))
    return exponents


def measure_ranges(model: PreTrainedModel, tokens: Tensor) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """Measure the maximum absolute value of each channel, after the rotary embedding, over ``tokens``.

    Returns:
        For each attention layer that runs, the maxima of queries ``[Hq, D]`` and of keys ``[Hkv, D]``.

    Raises:
        ValueError: No layer uses Transformers' attention interface, or a value is not finite.
    """
    found: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def watch(module: nn.Module, query: Tensor, key: Tensor, _value: Tensor) -> None:
        new = tuple(each.float().abs().amax((0, 2)).cpu() for each in (query, key))
        old = found.get(module, new)
        found[module] = (torch.maximum(old[0], new[0]), torch.maximum(old[1], new[1]))

    text = model.config.get_text_config()
    with watched(model, watch):
        for row in tokens.reshape(-1, tokens.shape[-1]):
            for window in row.split(min(WINDOW, getattr(text, "max_position_embeddings", None) or WINDOW)):
                model(input_ids=window[None].to(model.device))
    if not found:
        raise ValueError(f"{type(model).__name__} computes no attention through Transformers' attention interface")
    names = {module: name for name, module in model.named_modules()}
    for module, both in found.items():
        if not all(each.isfinite().all() for each in both):
            raise ValueError(f"{names[module]}: queries or keys of these tokens have NaN or infinite values")
    return found


def _fold(layer: Layer, exponents: Tensor, previous: list[tuple[Tensor, Tensor]]) -> bool:
    """Multiply a layer's keys by ``2**exponents`` ``[Hkv, D]`` and its queries by the inverse, in the weights.

    Returns whether every new weight is exact. Appends each changed weight with a copy to ``previous``.
    """
    powers, is_exact = _powers(layer, exponents), True
    for source in layer.sources:
        own = powers[source.start : source.start + source.weights]
        if own.any():
            for scaled in _scaled(source, own):
                previous.append((scaled.parameter, scaled.parameter.clone()))
                scaled.parameter.copy_(scaled.new)
                is_exact &= bool(scaled.is_exact.all())
    return is_exact


def _powers(layer: Layer, exponents: Tensor) -> Tensor:
    """Return the exponent for each weight of a layer's sources, in the order of their channels."""
    powers = torch.zeros(layer.channels, dtype=torch.int32)
    powers[layer.weight_of(layer.key)] = exponents
    powers[layer.weight_of(layer.query)] = -exponents.repeat_interleave(layer.group, 0)
    return powers


class _Scaled(NamedTuple):
    """A weight, its product with powers of two, and for each factor whether the product is exact, or almost."""

    parameter: Tensor
    new: Tensor
    is_exact: Tensor
    is_near: Tensor


def _scaled(source: Source, powers: Tensor) -> list[_Scaled]:
    """Return the weight and the bias, if any, of a source whose outputs are multiplied by ``2**powers``."""
    scaled = []
    for weight in (source.module.weight, getattr(source.module, "bias", None)):
        if not isinstance(weight, Tensor):
            continue
        shape = (-1, *[1] * (weight.dim() - 1)) if isinstance(source.module, nn.Linear) else weight.shape
        factors = torch.exp2(powers.double()).to(weight.device).reshape(shape)
        offset = 1.0 if weight is source.module.weight and _applies_one_plus(source.module) else 0.0
        gain = (weight.float() + offset).double()  # as the norm computes it: 1 + w in FP32
        wanted = gain * factors
        new = torch.where(factors == 1, weight, (wanted - offset).to(weight.dtype))
        held = (new.float() + offset).double()
        is_exact = held == wanted
        is_near = is_exact
        if offset:
            slack = 0.0 if weight.dtype == torch.float32 else torch.finfo(weight.dtype).eps / 2
            is_near = ((held - wanted).abs() <= slack * wanted.abs()) & (wanted.abs() >= LEAST_OFFSET_GAIN)
            is_near |= factors == 1
        scaled.append(_Scaled(weight, new, is_exact, is_near))
    return scaled


def _exponents(layer: Layer, query_range: Tensor, key_range: Tensor) -> tuple[Tensor, bool]:
    """Return the exponent for each key channel, ``[Hkv, D]``, and whether these balance every channel within 2x.

    Channels that are mixed or share a weight get the same exponent.
    """
    heads, dim = layer.key.shape
    labels = layer.groups(layer.weight_of).flatten()
    keys, queries = layer.weight_of(layer.key), layer.weight_of(layer.query)
    values = layer.weight_of(layer.value[layer.value >= 0])
    others = torch.isin(queries, torch.cat((values, keys.flatten()))).view(heads, layer.group, dim).any(1)
    held = torch.isin(keys, values) | others  # weights that also make values, or both queries and keys, do not change
    held = torch.isin(labels, labels[held.flatten()])

    def over(ranges: Tensor) -> Tensor:
        """Return for each channel the maximum over all channels with its label."""
        return torch.zeros(heads * dim).scatter_reduce_(0, labels, ranges.flatten(), "amax")[labels]

    query_range, key_range = over(query_range.view(heads, layer.group, dim).amax(1)), over(key_range)
    wanted = (torch.log2(query_range / key_range) / 2).round()
    is_used = (query_range > 0) & (key_range > 0)
    exponents = torch.where(is_used & ~held, wanted, 0).int()
    while (refused := _refused(layer, exponents.view(heads, dim)).flatten()).any():
        refused = torch.isin(labels, labels[refused])
        exponents = torch.where(refused, exponents - exponents.sign(), exponents)
    is_balanced = bool(((exponents - wanted).abs() <= 1)[is_used].all())
    return exponents.view(heads, dim), is_balanced


def _refused(layer: Layer, exponents: Tensor) -> Tensor:
    """Return for which key channels a weight of the key or its queries cannot represent the factor, ``[Hkv, D]``."""
    powers = _powers(layer, exponents)
    bad = torch.zeros_like(powers, dtype=torch.bool)
    for source in layer.sources:
        own = slice(source.start, source.start + source.weights)
        if powers[own].any() and _applies_one_plus(source.module):
            bad[own] = ~_scaled(source, powers[own])[0].is_near.flatten().cpu()
    of_queries = bad[layer.weight_of(layer.query)].view(-1, layer.group, exponents.shape[1]).any(1)
    return bad[layer.weight_of(layer.key)] | of_queries


def _applies_one_plus(module: nn.Module) -> bool:
    """Return whether a module is a norm that multiplies by ``1 + w``, as in Gemma."""
    if isinstance(module, nn.Linear):
        return False
    weight: Tensor = module.weight  # type: ignore[assignment]
    parameters = {name: torch.zeros_like(each) for name, each in module.named_parameters()}
    inputs = torch.linspace(-1, 1, weight.numel(), device=weight.device, dtype=weight.dtype).view(weight.shape)
    return bool(functional_call(module, parameters, (inputs,)).any())


def _compare(layer: Layer, exponents: Tensor, before: Operands, is_exact: bool) -> None:
    """Raise unless a changed layer has its old output, and its old keys and queries times their factors."""
    after, factors = layer.run(), torch.exp2(exponents.float())[:, None]
    expected = before._replace(key=before.key * factors, query=before.query / factors.repeat_interleave(layer.group, 0))
    for what, actual, wanted in zip(Operands._fields, after, expected, strict=True):
        slack = 0.0 if is_exact else 2.0**-5 * float(wanted.abs().max())
        if not (actual - wanted).abs().max() <= slack:  # NaN neither
            raise ValueError(
                f"{layer.name}: {what} changed in an unexpected way; the weights of the model were restored"
            )


def _check(model: PreTrainedModel, tokens: Tensor) -> None:
    """Raise an error if the model or the tokens are unsuitable."""
    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise TypeError(f"model must be a Transformers model, got {type(model).__name__}")
    if not isinstance(tokens, Tensor) or not is_integer(tokens) or tokens.dim() not in (1, 2):
        got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"tokens must be a tensor of token ids, [T] or [B, T]; got {got}")
    if tokens.numel() < MIN_TOKENS:
        raise ValueError(
            f"tokens must have at least {MIN_TOKENS:,} elements to measure ranges over, got {tokens.numel():,}"
        )
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; equalize supports only models with one stack")
    quantization = getattr(model.config, "quantization_config", None)
    method = getattr(quantization, "quant_method", None)
    if quantization is not None and method != "gguf" and not getattr(quantization, "dequantize", False):
        raise ValueError(f"{name} is quantized; equalize the unquantized model first, then quantize it")
    has_rope = getattr(model.config.get_text_config(), "rope_parameters", None)
    if not has_rope and not any("inv_freq" in buffer for buffer, _ in model.named_buffers()):
        raise ValueError(f"{name} has no rotary embedding, which equalize needs")
    for weight_name, weight in model.named_parameters():
        if weight.is_meta:
            raise ValueError(f"{weight_name} is on the meta device; load the model without offloading")
        is_plain = type(weight) is nn.Parameter  # not one of torchao's quantized tensors, whose dtype is a float
        if not is_plain or weight.dtype not in (torch.float32, torch.bfloat16):
            kind = weight.dtype if is_plain else type(weight).__name__
            raise ValueError(f"{weight_name} is {kind}; load the model unquantized, in float32 or bfloat16")
