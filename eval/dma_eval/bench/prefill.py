"""Prefill attention timed side by side: SDPA, FlexAttention, other packages, and ``dma_mxfp`` with its presets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from dma_kernels import attention
from dma_kernels.numerics.formats import TILE
from dma_kernels.numerics.geometry import PrefillGeometry
from dma_kernels.prefill.backend import quantize_operands
from dma_kernels.prefill.operands import Operands
from dma_kernels.runtime.chip import resolve_backend
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import dma_hf
from dma_eval import console
from dma_eval.backends import Backend, parse_compared
from dma_eval.errors import one_line
from dma_eval.names import DMA

from .peers import FLASH_3, SAGE, flash_attention_3, sage_attention, sdpa
from .results import DeviceFacts, PrefillResult, PrefillShape
from .timing import FAILURES, Run, capture, captured, extra_memory, time_alone, time_in_turns

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


def prepare(backend: Backend, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> tuple[Run, Run | None]:
    """Return the call that is timed, and the part of it that quantises, where that can be called by itself.

    Raises:
        ImportError: Its package is not installed; the message names it.
    """
    label, config = backend.label, backend.config
    if config is not None:
        recipe, on = config.recipe, config.backend
        is_fused = resolve_backend(on, query.device, query.dtype) == "triton"
        geometry = PrefillGeometry(key.shape[2], 0, 0, None, is_causal=is_causal, window=None, mask=None)
        return (
            lambda: attention(query, key, value, recipe, is_causal=is_causal, backend=on),
            (lambda: quantize_operands(query, key, value, recipe, geometry)) if is_fused else None,
        )
    if label in FLASH_3:
        return flash_attention_3(label, query, key, value, is_causal=is_causal)
    if label == SAGE:
        return sage_attention(query, key, value, is_causal=is_causal), None
    if label == FLEX:
        return _flex(query, key, value, is_causal=is_causal), None
    return sdpa(SDPA_BACKENDS[label], query, key, value, is_causal=is_causal), None


def default_names() -> list[str]:
    """Everything that can be compared without other packages; the first is what others are compared with."""
    return [*SDPA_BACKENDS, FLEX, *(f"{DMA}:{preset}" for preset in dma_hf.PRESETS)]


def parse_implementations(names: Sequence[str]) -> list[Backend]:
    """Resolve names as given on the command line; see :func:`dma_eval.backends.parse_compared`."""
    return parse_compared(names, "--attn", (*SDPA_BACKENDS, FLEX, *FLASH_3, SAGE))


def measure_shape(
    shape: PrefillShape,
    implementations: Sequence[Backend],
    facts: DeviceFacts,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seconds: float,
) -> list[PrefillResult]:
    """Time all implementations on one shape; the first is what the others' ``speedup`` refers to.

    The rounds take about so many ``seconds``, without compiling, and then each by itself as many; ``dtype`` is that of
    queries, keys and values.
    """
    console.print_note(str(shape))
    inputs = [
        torch.randn(shape.batch, heads, shape.length, shape.head_dim, device=device, dtype=dtype)
        for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
    ]
    harder = with_outlying_channels(*inputs)
    rows = torch.randperm(shape.length)[:SAMPLED_ROWS].sort().values.to(device)
    exact, harder_exact = (
        exact_rows(each[0], each[1], each[2], rows, is_causal=shape.is_causal) for each in (inputs, harder)
    )
    runs: dict[str, Run] = {}
    parts: dict[str, Run] = {}
    results = {}
    for implementation in implementations:
        label = implementation.label
        result = PrefillResult(shape=shape, label=label, config=implementation.info["config"])
        try:
            on_harder, _ = prepare(implementation, *harder, is_causal=shape.is_causal)
            harder_error = _error(on_harder(), harder_exact, rows)
            run, part = prepare(implementation, *inputs, is_causal=shape.is_causal)
            run()  # what comes after is not the first of its kind
            out, extra = extra_memory(run, device)
        except (*FAILURES, ImportError) as error:
            results[label] = replace(result, failure=one_line(error))
            continue
        assert isinstance(out, Tensor)
        results[label] = replace(
            result,
            error=_error(out, exact, rows),
            error_with_outliers=harder_error,
            extra_bytes=None if extra is None else extra - out.nbytes,
            input_bytes=sum(each.nbytes for each in inputs),
        )
        runs[label] = run
        if part is not None:
            parts[label] = part
        del out, on_harder
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
    replays, refusals = captured(
        {label: run for label, run in runs.items() if timings[label].median < GRAPH_LIMIT}, device
    )
    for label, reason in refusals.items():
        results[label] = replace(results[label], graph_failure=reason)
    if replays:
        for label, timing in time_in_turns(replays, device, seconds=seconds / 2).items():
            results[label] = replace(results[label], graph_milliseconds=timing.median)
    if device.type == "cuda":
        for label, run in {**runs, **replays}.items():
            taken = time_alone(run, device, seconds=seconds, milliseconds=timings[label].median)
            results[label] = replace(results[label], sustained_milliseconds=taken)
    for label, part in parts.items():
        results[label] = replace(results[label], **_time_quantization(part, inputs, facts, device, seconds))
    return list(results.values())


def with_outlying_channels(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return inputs with two key channels that stand out, as those of Llama and Qwen do, and a sharper softmax.

    One channel is 16 times as large and its query's a sixteenth, another has a bias of 12; queries are doubled.
    """
    query, key = 2.0 * query, key.clone()
    large, biased = key.shape[3] // 16, 7 * key.shape[3] // 10
    key[..., large] *= 16.0
    query[..., large] /= 16.0
    key[..., biased] += 12.0
    return [query, key, value]


def _error(out: object, exact: Tensor, rows: Tensor) -> float:
    """Return the norm of the difference over the norm."""
    assert isinstance(out, Tensor)
    return float((out[:, :, rows].double() - exact).norm() / exact.norm())


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


def _time_quantization(
    part: Run, inputs: Sequence[Tensor], facts: DeviceFacts, device: torch.device, seconds: float
) -> dict[str, Any]:
    """Time what precedes the attention kernel alone; of our own kernels, beside a copy of as many bytes."""
    made = part()
    moved = _moved_bytes(inputs[1], inputs[2], made) if isinstance(made, Operands) else None
    if moved == 0:
        return {}
    runs = {"quantize": part}
    if moved is not None:
        source, target = torch.empty((2, -(-moved // 16)), dtype=torch.float64, device=device)
        runs["copy"] = lambda: target.copy_(source)
    if device.type == "cuda":
        runs = {name: capture(each, device) for name, each in runs.items()}
    timings = time_in_turns(runs, device, seconds=seconds / 4)
    rate = facts.copy_bytes_per_second
    return {
        "quantize_milliseconds": timings["quantize"].median,
        "quantize_copy_milliseconds": None if rate is None or moved is None else 1e3 * moved / rate,
        "plain_copy_milliseconds": timings["copy"].median if "copy" in timings else None,
    }


def _moved_bytes(key: Tensor, value: Tensor, operands: Operands) -> int:
    """Return the bytes that must be read and written, each once, to make the operands.

    The first tile is read even where it is not written: it says how the others are scaled.
    """
    assert operands.written is not None
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
    of_all = -(-key.shape[2] // TILE)
    tiles_read = len({0, *operands.written}) if operands.written else 0
    bytes_read = sum(x.nbytes for x in read) * tiles_read
    bytes_written = sum(x.nbytes for pointer, x in written.items() if pointer not in own) * len(operands.written)
    return (bytes_read + bytes_written) // of_all


def _flex(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Run:
    compiled, mask = _compiled_flex(query.shape, key.shape, query.device, is_causal=is_causal)
    return lambda: compiled(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])


@functools.lru_cache(maxsize=1)
def _compiled_flex(
    query_shape: torch.Size, key_shape: torch.Size, device: torch.device, *, is_causal: bool
) -> tuple[Callable[..., Any], BlockMask | None]:
    """Return compiled FlexAttention, for exactly these shapes, and its mask."""
    torch.compiler.reset()  # a function is compiled for a few shapes only, and stays uncompiled from there on
    return (
        torch.compile(flex_attention, dynamic=False),
        causal_block_mask(query_shape[2], device) if is_causal else None,
    )


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
