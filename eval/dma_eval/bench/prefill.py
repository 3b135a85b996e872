"""Prefill attention timed side by side: SDPA, FlexAttention, other packages, and ``dma_mxfp`` with its presets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from dma_kernels import attention, attention_with_lse
from dma_kernels.numerics.geometry import AttentionGeometry
from dma_kernels.prefill.config import select_compute_path
from dma_kernels.prefill.plan import quantize_operands
from dma_kernels.runtime.chip import device_arch, resolve_backend
from torch import Tensor

import dma_hf
from dma_eval import console
from dma_eval.backends import Backend, parse_compared
from dma_eval.errors import UserError, one_line
from dma_eval.names import DMA

from .inputs import Inputs, exact_rows, random_inputs, with_outlying_channels
from .peers import (
    CUDNN,
    FLASHINFER,
    PREQUANTIZED,
    SDPA,
    Prepared,
    cudnn_fp8,
    flash_attention_3,
    flash_attention_4,
    flashinfer,
    flex,
    sage_attention,
    sdpa,
)
from .results import PrefillResult, PrefillShape
from .timing import FAILURES, Run, capture, captured, extra_memory, time_interleaved, time_isolated

SAMPLED_ROWS = 64
GRAPH_LIMIT = 2.0
"""Milliseconds. Longer calls hide their launches, and are not timed as CUDA graphs."""


def _sdpa(label: str, inputs: Inputs) -> Prepared:
    return Prepared(sdpa(label, *inputs.tensors, **inputs.options))


PEERS: dict[str, Callable[[Inputs], Prepared]] = {
    **{label: partial(_sdpa, label) for label in SDPA},
    "flex": flex,
    **{label: partial(flash_attention_3, label) for label in ("fa3", "fa3:fp8", f"fa3:fp8{PREQUANTIZED}")},
    "fa4": flash_attention_4,
    **{label: partial(cudnn_fp8, label) for label in ("cudnn:fp8", f"cudnn:fp8{PREQUANTIZED}")},
    **{label: partial(flashinfer, threshold) for label, threshold in FLASHINFER.items()},
    "sage": sage_attention,
}
"""What ``dma_mxfp`` is compared with, by the names of ``--attn``."""


def prepare(backend: Backend, inputs: Inputs) -> Prepared:
    """Return the call that is timed.

    Raises:
        ImportError: Its package is not installed; the message names it.
    """
    if backend.config is None:
        return PEERS[backend.label](inputs)
    recipe, on = backend.config.recipe, backend.config.backend
    query, key, value = inputs.tensors
    call = partial(attention, query, key, value, recipe, **inputs.options, backend=on)
    if resolve_backend(on, query.device, query.dtype) != "triton" or inputs.documents > 1:
        return Prepared(call)
    geometry = AttentionGeometry(key.shape[2], 0, 0, None, is_causal=inputs.is_causal)
    path = select_compute_path(recipe, device_arch(query.device), query.shape[3])
    return Prepared(call, lambda: quantize_operands(query, key, value, recipe, path, geometry))


def default_names(device: torch.device) -> list[str]:
    """Everything that a device runs without other packages; the first is what others are compared with."""
    names = [*SDPA, "flex", *(f"{DMA}:{preset}" for preset in dma_hf.PRESETS)]
    return [name for name in names if device.type == "cuda" or name != CUDNN]


def parse_implementations(names: Sequence[str]) -> list[Backend]:
    """Resolve names as given on the command line; see :func:`dma_eval.backends.parse_compared`."""
    return parse_compared(names, "--attn", tuple(PEERS))


def measure_shape(
    shape: PrefillShape, implementations: Sequence[Backend], device: torch.device, dtype: torch.dtype, *, seconds: float
) -> list[PrefillResult]:
    """Time all implementations on random inputs of one shape and dtype; see :func:`measure_layers`.

    Errors are measured a second time on inputs with outlier key channels.
    """
    try:
        inputs = random_inputs(shape, device, dtype)
        harder = with_outlying_channels(inputs)
    except RuntimeError as error:
        raise UserError(f"--shape: cannot make inputs of {shape}: {one_line(error)}") from error
    return measure_layers(shape, [inputs], implementations, seconds=seconds, harder=harder)


def measure_layers(
    shape: PrefillShape,
    layers: Sequence[Inputs],
    implementations: Sequence[Backend],
    *,
    seconds: float,
    harder: Inputs | None = None,
) -> list[PrefillResult]:
    """Time all implementations on the layers of one shape, and sum over the layers.

    ``speedup`` is relative to the first implementation. The interleaved rounds take about ``seconds``, without
    compilation, and then each isolated implementation as long again.
    """
    console.print_note(str(shape))
    device = layers[0].query.device
    rows = torch.randperm(shape.length)[:SAMPLED_ROWS].sort().values.to(device)
    exact = [exact_rows(inputs, rows) for inputs in layers]
    harder_exact = None if harder is None else exact_rows(harder, rows)

    def error(call: Prepared, expected: Tensor) -> float:
        return float((call.read(call.run())[:, :, rows].double() - expected).norm() / expected.norm())

    def examine(implementation: Backend) -> tuple[list[Prepared], dict[str, Any]]:
        """Return the calls, and what is measured of them besides times."""
        found: dict[str, Any] = {}
        if harder is not None and harder_exact is not None:
            found["error_with_outliers"] = error(prepare(implementation, harder), harder_exact)
        calls = [prepare(implementation, inputs) for inputs in layers]
        errors = [error(call, each) for call, each in zip(calls, exact, strict=True)]
        found |= {"error": sum(errors) / len(errors), "input_bytes": layers[0].nbytes}
        found["extra_bytes"] = extra_memory(calls[0].run, device)  # not the first of its kind, which compiles
        return calls, found | _skipped_shares(implementation, layers)

    prepared: dict[str, list[Prepared]] = {}
    results = {}
    for each in implementations:
        result = PrefillResult(shape=shape, label=each.label, config=each.info["config"])
        try:
            prepared[each.label], found = examine(each)
        except FAILURES as failure:
            found = {"failure": one_line(failure)}
        results[each.label] = replace(result, **found)
    times = _time_calls(prepared, device, seconds)
    first = times.get(implementations[0].label, {}).get("milliseconds")
    for label, found in times.items():
        milliseconds = found["milliseconds"]
        found["tflops"] = len(layers) * shape.flops / milliseconds / 1e9
        found["speedup"] = None if first is None else first / milliseconds
        parts = [call.quantize for call in prepared[label] if call.quantize is not None]
        if parts:
            run = capture(_chained(parts), device) if device.type == "cuda" else _chained(parts)
            timing = time_interleaved({label: run}, device, seconds=seconds / 4)[label]
            found["quantize_milliseconds"] = timing.median
        results[label] = replace(results[label], **found)
    return list(results.values())


def _time_calls(prepared: dict[str, list[Prepared]], device: torch.device, seconds: float) -> dict[str, dict[str, Any]]:
    """Return what was timed of each implementation, by the names of the result's fields.

    Implementations are interleaved layer by layer. An isolated run is all layers, one after the other.
    """
    layers = max(map(len, prepared.values()), default=0)
    runs = {(label, layer): calls[layer].run for layer in range(layers) for label, calls in prepared.items()}
    timings = time_interleaved(runs, device, seconds=seconds)
    found: dict[str, dict[str, Any]] = {}
    for label in prepared:
        taken = [timings[label, layer] for layer in range(layers)]
        found[label] = {
            "milliseconds": sum(each.median for each in taken),
            "milliseconds_fast": sum(each.fast for each in taken),
            "milliseconds_slow": sum(each.slow for each in taken),
            "repeats": taken[0].repeats,
        }
    if device.type != "cuda":
        return found
    short = [label for label, calls in prepared.items() if found[label]["milliseconds"] < len(calls) * GRAPH_LIMIT]
    replays, refusals = captured({place: run for place, run in runs.items() if place[0] in short}, device)
    for (label, _), reason in refusals.items():
        found[label]["graph_failure"] = reason
    replays = {place: run for place, run in replays.items() if "graph_failure" not in found[place[0]]}
    graph_timings = time_interleaved(replays, device, seconds=seconds / 2)
    for label, calls in prepared.items():
        places = [(label, layer) for layer in range(len(calls))]
        if places[0] in replays:
            found[label]["graph_milliseconds"] = sum(graph_timings[place].median for place in places)
        found[label]["sustained_milliseconds"] = time_isolated(
            _chained([replays.get(place, runs[place]) for place in places]),
            device,
            seconds=seconds,
            milliseconds=found[label]["milliseconds"],
        )
    return found


def _chained(runs: Sequence[Run]) -> Run:
    """Return what calls all of them; the results are not kept."""

    def run() -> None:
        for each in runs:
            each()

    return run


def _skipped_shares(implementation: Backend, layers: Sequence[Inputs]) -> dict[str, Any]:
    """Return the share of low tiles that the recipe's threshold skips, over all layers."""
    config = implementation.config
    if config is None or config.recipe.skip_threshold is None or math.isinf(config.recipe.skip_threshold):
        return {}
    first = layers[0].query
    tile_counts = torch.zeros(first.shape[1], 2, dtype=torch.int64, device=first.device)
    for inputs in layers:
        options = inputs.options | {"backend": config.backend, "tile_counts": tile_counts}
        attention_with_lse(*inputs.tensors, config.recipe, **options)
    skipped, seen = tile_counts.sum(0).tolist()
    return {"skipped_share": skipped / max(seen, 1)}
