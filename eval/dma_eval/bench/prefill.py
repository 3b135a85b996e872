"""Prefill attention timed side by side: SDPA's backends, FlexAttention, and ``dma_mxfp`` with its presets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from dma_kernels import Recipe, attention
from dma_kernels.prefill.backend import quantize_operands
from dma_kernels.prefill.operands import Operands
from dma_kernels.runtime.chip import resolve_backend
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import dma_hf
from dma_eval.backends import parse_compared
from dma_eval.errors import one_line
from dma_eval.names import DMA
from dma_hf import DMAConfig

from .results import PrefillResult, PrefillShape
from .timing import FAILURES, DeviceFacts, Run, capture, captured, extra_memory, time_in_turns

SDPA_BACKENDS: dict[str, SDPBackend | None] = {
    "sdpa": None,
    "sdpa:flash": SDPBackend.FLASH_ATTENTION,
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""``sdpa`` is what PyTorch chooses by itself."""
FLEX = "flex"
FLEX_BLOCK = 128
SAMPLED_ROWS = 64
GRAPH_LIMIT = 2.0
"""Milliseconds. Longer calls hide their launches, and are not timed as CUDA graphs."""


@dataclass(frozen=True)
class Implementation:
    """An implementation of attention by the name that it has in results."""

    label: str
    config: DMAConfig | None = None

    def prepare(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Run:
        """Return the call that is timed."""
        if self.config is not None:
            recipe, backend = self.config.recipe, self.config.backend
            return lambda: attention(query, key, value, recipe, is_causal=is_causal, backend=backend)
        if self.label == FLEX:
            return _flex(query, key, value, is_causal=is_causal)
        chosen = SDPA_BACKENDS[self.label]

        def run() -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)

        def forced() -> Tensor:
            assert chosen is not None
            with sdpa_kernel(chosen):
                return run()

        return run if chosen is None else forced


def default_names() -> list[str]:
    """Everything that can be compared; the first is what others are compared with."""
    return [*SDPA_BACKENDS, FLEX, *(f"{DMA}:{preset}" for preset in dma_hf.PRESETS)]


def parse_implementations(names: Sequence[str]) -> list[Implementation]:
    """Resolve names as given on the command line; see :func:`dma_eval.backends.parse_compared`."""
    backends = parse_compared(names, "--attn", (*SDPA_BACKENDS, FLEX))
    return [Implementation(backend.label, backend.config) for backend in backends]


def measure_shape(
    shape: PrefillShape,
    implementations: Sequence[Implementation],
    facts: DeviceFacts,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seconds: float,
) -> list[PrefillResult]:
    """Time all implementations on one shape.

    Args:
        shape: What to measure.
        implementations: The first is what the others' ``speedup`` refers to.
        facts: Of the device.
        device: Where to measure.
        dtype: Of queries, keys and values.
        seconds: About how long the rounds take, without compiling.
    """
    query, key, value = (
        torch.randn(shape.batch, heads, shape.length, shape.head_dim, device=device, dtype=dtype)
        for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
    )
    rows = torch.randperm(shape.length)[:SAMPLED_ROWS].sort().values.to(device)
    exact = exact_rows(query, key, value, rows, is_causal=shape.is_causal)
    runs: dict[str, Run] = {}
    results = {}
    for implementation in implementations:
        label = implementation.label
        result = PrefillResult(
            shape=shape, label=label, config=implementation.config.to_dict() if implementation.config else None
        )
        try:
            run = implementation.prepare(query, key, value, is_causal=shape.is_causal)
            run()  # compiles
            out, extra = extra_memory(run, device)
        except FAILURES as error:
            results[label] = replace(result, failure=one_line(error))
            continue
        assert isinstance(out, Tensor)
        difference = out[:, :, rows].double() - exact
        results[label] = replace(
            result,
            error=float(difference.norm() / exact.norm()),
            extra_bytes=None if extra is None else extra - out.nbytes,
            input_bytes=query.nbytes + key.nbytes + value.nbytes,
        )
        runs[label] = run
        del out, difference
    timings = time_in_turns(runs, device, seconds=seconds)
    first = timings.get(implementations[0].label)
    for label, timing in timings.items():
        results[label] = replace(
            results[label],
            milliseconds=timing.median,
            milliseconds_fast=timing.fast,
            milliseconds_slow=timing.slow,
            repeats=timing.repeats,
            tflops=shape.flops / timing.median / 1e9,
            speedup=None if first is None else first.median / timing.median,
        )
    short = {label: run for label, run in runs.items() if timings[label].median < GRAPH_LIMIT}
    for label, milliseconds in _time_graphs(short, device, seconds).items():
        results[label] = replace(results[label], graph_milliseconds=milliseconds)
    for implementation in implementations:
        if implementation.label in runs and implementation.config is not None:
            measured = _time_quantization(query, key, value, implementation.config, facts, device, seconds)
            results[implementation.label] = replace(results[implementation.label], **measured)
    return list(results.values())


def exact_rows(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, *, is_causal: bool) -> Tensor:
    """Return attention in fp64 for some query rows, ``[B, Hq, rows, D]``, one head at a time."""
    group = query.shape[1] // key.shape[1]
    hidden = torch.arange(key.shape[2], device=rows.device)[None] > rows[:, None]
    outputs = []
    for head in range(query.shape[1]):
        scores = query[:, head, rows].double() @ key[:, head // group].double().mT * query.shape[3] ** -0.5
        if is_causal:
            scores = scores.masked_fill(hidden, -torch.inf)
        outputs.append(scores.softmax(-1) @ value[:, head // group].double())
    return torch.stack(outputs, 1)


def _time_graphs(runs: dict[str, Run], device: torch.device, seconds: float) -> dict[str, float]:
    """Return the median milliseconds of each run as a CUDA graph; those that cannot be captured are left out."""
    replays = captured(runs, device)
    if not replays:
        return {}
    return {label: timing.median for label, timing in time_in_turns(replays, device, seconds=seconds / 2).items()}


def _time_quantization(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: DMAConfig,
    facts: DeviceFacts,
    device: torch.device,
    seconds: float,
) -> dict[str, Any]:
    """Time what precedes the attention kernel alone; nothing for the reference, which has no such part."""
    if resolve_backend(config.backend, device, query.dtype) != "triton":
        return {}
    recipe: Recipe = config.recipe

    def run() -> Operands:
        return quantize_operands(query, key, value, recipe)

    moved = _moved_bytes(key, value, run())
    if not moved:
        return {}
    source, target = torch.empty((2, -(-moved // 16)), dtype=torch.float64, device=device)
    runs: dict[str, Run] = {"quantize": run, "copy": lambda: target.copy_(source)}
    if device.type == "cuda":
        runs = {name: capture(each, device) for name, each in runs.items()}
    timings = time_in_turns(runs, device, seconds=seconds / 4)
    rate = facts.copy_bytes_per_second
    return {
        "quantize_milliseconds": timings["quantize"].median,
        "quantize_copy_milliseconds": None if rate is None else 1e3 * moved / rate,
        "plain_copy_milliseconds": timings["copy"].median,
    }


def _moved_bytes(key: Tensor, value: Tensor, operands: Operands) -> int:
    """Return the bytes that must be read and written, each once, to make the operands."""
    tiles = [operands.high] if operands.low is None else [operands.high, operands.low]
    written = {}
    for tile in tiles:
        for tensor in (tile.key, tile.value, tile.key_scale, tile.key_factor, tile.value_factor):
            if tensor is not None:
                written[tensor.data_ptr()] = tensor
    read = [
        source
        for source, made in ((key, [tile.key for tile in tiles]), (value, [tile.value for tile in tiles]))
        if any(tensor.data_ptr() != source.data_ptr() for tensor in made)
    ]
    own = {key.data_ptr(), value.data_ptr()}
    return sum(x.nbytes for x in read) + sum(x.nbytes for pointer, x in written.items() if pointer not in own)


def _flex(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Run:
    """Return compiled FlexAttention, for exactly this shape."""
    torch.compiler.reset()  # a function is compiled for a few shapes only, and stays uncompiled from there on
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = causal_block_mask(query.shape[2], query.device) if is_causal else None
    return lambda: compiled(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])


def causal_block_mask(length: int, device: torch.device) -> BlockMask:
    """Return FlexAttention's causal mask, made block by block: nothing of size ``length`` squared."""
    blocks = -(-length // FLEX_BLOCK)
    index = torch.arange(blocks, dtype=torch.int32, device=device)
    diagonal = torch.zeros(1, 1, blocks, blocks, dtype=torch.int32, device=device)
    diagonal[..., 0] = index
    return BlockMask.from_kv_blocks(
        torch.ones(1, 1, blocks, dtype=torch.int32, device=device),
        diagonal,
        index.view(1, 1, blocks),
        index.expand(1, 1, blocks, blocks).contiguous(),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=_is_visible,
        seq_lengths=(length, length),
        compute_q_blocks=False,
    )


def _is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
