"""Time attention at a model's shapes against SDPA: over a prompt, and in a step over a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from dma_kernels import attention
from dma_kernels.cache.api import append, cached_attention
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.numerics.formats import TILE
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from dma_eval import console
from dma_eval.errors import one_line
from dma_eval.load.backends import Backend
from dma_eval.load.models import heads_of, layers_of
from dma_hf import DMAConfig

from .results import AttentionResult, Call, Shape
from .timing import FAILURES, Run, capture, time_interleaved

ROOM = 256
"""Spare tokens for the runs, each of which appends one. They count as memory of a packed cache."""
FILLED_AT_ONCE = 8192
SECONDS = 0.5  # about how long a call is timed at a shape, without compilation


def shapes_of(model: PreTrainedModel, contexts: Sequence[int], batch: int) -> list[Shape]:
    """Return the shape of a layer at each context; none if keys and values are not plain heads of one size."""
    text = model.config.get_text_config()
    heads, kv_heads, head_dim = heads_of(text)
    value_dims = {getattr(layer, "v_head_dim", head_dim) for layer in layers_of(text)}
    if not heads or not kv_heads or not head_dim or value_dims != {head_dim}:
        console.print_note("Only generate is timed: the heads of this model have no single size")
        return []
    common = {"head_dim": head_dim, "query_heads": heads, "kv_heads": kv_heads, "batch": batch}
    return [Shape(length=length, **common) for length in contexts]


def measure_attention(
    shapes: Sequence[Shape], backends: Sequence[Backend], device: torch.device, dtype: torch.dtype
) -> Iterator[AttentionResult]:
    """Time SDPA and each configuration of ``dma_mxfp``: its recipe over a prompt, and its packed cache in a step.

    Labels of backends end in a cache.
    """
    ours = {each.label: each.config for each in backends if each.config is not None}
    recipes: dict[str, DMAConfig] = {}
    for label, config in ours.items():
        plain = replace(config, cache=None)
        if plain not in recipes.values():
            recipes[label.rpartition("+")[0]] = plain
    caches = {label: config for label, config in ours.items() if config.cache is not None}
    for shape in shapes:
        console.print_note(str(shape))
        yield from _compare("prompt", shape, recipes, device, dtype)
        yield from _compare("step", shape, caches, device, dtype)


def _compare(
    call: Call, shape: Shape, ours: dict[str, DMAConfig], device: torch.device, dtype: torch.dtype
) -> list[AttentionResult]:
    results: dict[str, AttentionResult] = {}
    runs: dict[str, Run] = {}
    for label, config in {"sdpa": None, **ours}.items():
        made = None if config is None else config.to_dict()
        results[label] = AttentionResult(label=label, config=made, call=call, shape=shape)
        try:
            run = prepare(call, config, shape, device, dtype)
            run()  # compiles
            is_graph = call == "step" and device.type == "cuda"
            runs[label] = capture(run, device) if is_graph else run
        except FAILURES as error:
            results[label] = replace(results[label], failure=one_line(error))
    timings = time_interleaved(runs, device, seconds=SECONDS, max_repeats=ROOM // 2)
    for label, timing in timings.items():
        speedup = timings["sdpa"].median / timing.median if "sdpa" in timings else None
        results[label] = replace(results[label], milliseconds=timing.median, speedup=speedup)
    return list(results.values())


def prepare(call: Call, config: DMAConfig | None, shape: Shape, device: torch.device, dtype: torch.dtype) -> Run:
    """Return a call on random inputs; without a configuration it is SDPA's, over preallocated keys and values."""

    def random(heads: int, tokens: int) -> Tensor:
        return torch.randn(shape.batch, heads, tokens, shape.head_dim, device=device, dtype=dtype)

    query = random(shape.query_heads, shape.length if call == "prompt" else 1)
    if call == "step" and config is not None:
        new, new_value = (random(shape.kv_heads, 1) for _ in range(2))
        storage = filled_storage(config, shape, device, dtype)
        return partial(cached_attention, query, new, new_value, storage, backend=config.backend)
    key, value = (random(shape.kv_heads, shape.length) for _ in range(2))
    if config is None:
        sdpa = F.scaled_dot_product_attention
        return partial(sdpa, query, key, value, is_causal=call == "prompt", enable_gqa=True)
    return partial(attention, query, key, value, config.recipe, is_causal=True, backend=config.backend)


def filled_storage(config: DMAConfig, shape: Shape, device: torch.device, dtype: torch.dtype) -> LayerStorage:
    """Return the cache of a layer that holds ``shape.length`` random keys and values, and has room for more."""
    assert config.cache is not None
    storage = LayerStorage.allocate(
        config.cache,
        diagonal_tiles=config.diagonal_tiles,
        sink_tiles=config.sink_tiles,
        batch=shape.batch,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.head_dim,
        dtype=dtype,
        device=device,
        tiles=-(-(shape.length + ROOM) // TILE),
    )
    for start in range(0, shape.length, FILLED_AT_ONCE):
        tokens = min(FILLED_AT_ONCE, shape.length - start)
        sizes = (2, shape.batch, shape.kv_heads, tokens, shape.head_dim)
        append(storage, *torch.randn(sizes, device=device, dtype=dtype))
    return storage
