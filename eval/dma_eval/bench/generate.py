"""Time ``generate`` with several attentions and caches on one model.

A run is named ``ATTENTION+CACHE``. The attention is a backend (:mod:`dma_eval.load.backends`). The cache is ``dynamic``
or ``static`` (of Transformers), or a format of :class:`dma_hf.DMACache`. A run calls ``generate`` as a user does. So a
step is eager over a dynamic cache, compiled over a static cache on a GPU, and a CUDA graph over a packed one on a GPU.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, LlamaConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import is_flash_attn_3_available

import dma_hf
from dma_eval import console
from dma_eval.errors import UserError, one_line
from dma_eval.load.backends import Backend, activate, parse_backends
from dma_eval.load.data import Tokens
from dma_eval.names import DMA, FORMAT_SUFFIXES, check_runs, refuse_repeats
from dma_hf.cache_layers import DMALayer
from dma_hf.integrations.internals import CACHE_ARGUMENT

from .results import GenerateResult
from .timing import FAILURES, Timing, stored_bytes

PACKED = tuple(FORMAT_SUFFIXES.values())
STATES = ("keys", "values", "conv_states", "recurrent_states")  # what layers of caches of Transformers hold
FLASH_3 = "flash_attention_3+dynamic"
DEFAULT_RUNS = ("sdpa+dynamic", FLASH_3, "sdpa+static", *(f"{DMA}:balanced+{c}" for c in ("dynamic", *PACKED)))
LLAMA_3 = {
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1 << 21,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 1 << 14}
SHAPES = {
    "llama-3.1-8b": LlamaConfig(**LLAMA_3, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32),
    "llama-3.2-1b": LlamaConfig(**LLAMA_3, **SMALL, tie_word_embeddings=True),
    "tiny": LlamaConfig(**TINY, vocab_size=256, num_attention_heads=4, num_key_value_heads=2),
}
"""Models with random weights, on which the speed does not depend."""


def default_runs() -> list[str]:
    """Return the names of the runs that are measured by default. A note says if FlashAttention-3 is left out."""
    if is_flash_attn_3_available():
        return list(DEFAULT_RUNS)
    console.print_note(f"{FLASH_3} is left out: Transformers finds no package flash_attn_interface of FlashAttention-3")
    return [name for name in DEFAULT_RUNS if name != FLASH_3]


def parse_runs(names: Sequence[str]) -> list[Backend]:
    """Resolve names as given on the command line. The label of each backend ends in its cache."""
    check_runs(names)
    runs = []
    for name in names:
        attention, _, cache = name.rpartition("+")
        packed = f"+{cache}" if cache in PACKED else ""
        (backend,) = parse_backends([f"{attention}{packed}"], "--run")
        label, config = backend.label, backend.config
        if config is not None and config.cache is not None:  # of the run's name, or of a file
            label, config = label.removesuffix(f"+{config.cache}"), replace(config, cache=cache if packed else None)
        runs.append(replace(backend, label=f"{label}+{cache}", config=config))
    refuse_repeats("--run", [run.label for run in runs])
    return runs


def build_model(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of a shape with random weights, made on the device."""
    if shape not in SHAPES:
        raise UserError(f"--shape: unknown shape {shape!r}; valid: {', '.join(SHAPES)}")
    try:
        with device:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(SHAPES[shape]), dtype=dtype)
    except torch.OutOfMemoryError as error:
        raise UserError(f"--shape {shape} does not fit on {device}: {one_line(error)}") from None
    return never_stopping(model.eval())


def never_stopping(model: PreTrainedModel) -> PreTrainedModel:
    """Remove the model's end of text, so that it generates as many tokens as requested."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def text_windows(tokens: Tokens, batch: int, length: int, option: str) -> Tensor:
    """Return the first windows of a text, ``[batch, length]``. ``option`` is the one that gives the length."""
    prefix = len(tokens.begins_with)
    if len(tokens.ids) < prefix + batch * (length - prefix):
        raise UserError(
            f"--data: the text has {len(tokens.ids):,} tokens, too few for {batch} x {length:,}; give a longer text, "
            f"or a smaller {option} or --batch"
        )
    return tokens.windows(batch, length)


def measure(
    model: PreTrainedModel, prompts: Sequence[Tensor], runs: Sequence[Backend], *, new_tokens: int
) -> Iterator[GenerateResult]:
    """Generate from each prompt, ``[B, T]``, with every run, and yield each result. The first one has speed 1."""
    for prompt in prompts:
        first: float | None = None
        for index, run in enumerate(runs):
            console.print_note(f"{prompt.shape[1]:,} tokens, {run.label}")
            result = _measure_one(model, prompt.to(model.device), run, new_tokens)
            taken = result.step_milliseconds
            first = first if index else taken
            yield replace(result, speedup=first / taken if first and taken else None)


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Record the time of each token. ``generate`` copies tokens to the host for it, after the device computed them."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _measure_one(model: PreTrainedModel, prompt: Tensor, run: Backend, new_tokens: int) -> GenerateResult:
    result = GenerateResult(label=run.label, context=prompt.shape[1], config=run.info["config"])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": new_tokens, "do_sample": False}
    if run.label.endswith("+static"):
        options["cache_implementation"] = "static"
    torch.compiler.reset()
    try:
        activate(model, run)
        try:
            return replace(result, **_timed(model, partial(model.generate, input_ids=prompt, **options), len(prompt)))
        finally:
            if run.reads_cache:
                dma_hf.configure(model, cache=None)  # frees the idle storage and graph
    except FAILURES as error:
        return replace(result, failure=one_line(error))


def _timed(model: PreTrainedModel, generate: Callable[..., Any], batch: int) -> dict[str, Any]:
    """Time the third call. Earlier ones compile kernels, build cuDNN's plans, and capture the graph."""
    device = model.device
    stored = cache_bytes(getattr(generate(return_dict_in_generate=True), CACHE_ARGUMENT))
    generate()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    replays = dma_hf.stats(model).replays
    clock = _Clock()
    generate(streamer=clock)
    # The streamer gets the prompt, then each token.
    steps = Timing.of((1e3 * np.diff(clock.times[2:])).tolist())
    return {
        "first_token_seconds": clock.times[2] - clock.times[0],
        "step_milliseconds": steps.median,
        "step_milliseconds_fast": steps.fast,
        "step_milliseconds_slow": steps.slow,
        "steps": steps.repeats,
        "graph_steps": dma_hf.stats(model).replays - replays,
        "tokens_per_second": 1e3 * batch / steps.median,
        "cache_bytes": stored,
        "peak_bytes": torch.cuda.max_memory_allocated(device) - weight_bytes(model) if device.type == "cuda" else None,
    }


def torchao_quantization() -> ModuleType:
    """Return torchao's module of that name, or raise a ``UserError``."""
    try:
        return importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise UserError(f"--weights fp8 needs torchao: pip install torchao ({error})") from None


def quantize_weights(model: PreTrainedModel) -> None:
    """Quantize the linear layers to FP8 with torchao, except the one that makes the logits.

    Weights have a scale for each output channel. Activations have one for each token, computed in every call.
    """
    quantization = torchao_quantization()
    head = model.get_output_embeddings()
    try:
        quantization.quantize_(
            model,
            quantization.Float8DynamicActivationFloat8WeightConfig(
                granularity=quantization.PerRow(),
                set_inductor_config=False,  # steps are compiled as with other weights
            ),
            filter_fn=lambda module, _: isinstance(module, nn.Linear) and module is not head,
        )
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise UserError(f"--weights fp8: torchao cannot quantize this model: {one_line(error)}") from error


def weight_bytes(model: PreTrainedModel) -> int:
    """Return what parameters and buffers take."""
    return stored_bytes([*model.parameters(), *model.buffers()])


def cache_bytes(cache: Cache) -> int:
    """Return what a cache's keys, values and recurrent states take. Layers that share those of others hold none."""
    packed = cache.nbytes if isinstance(cache, dma_hf.DMACache) else 0
    others = [layer for layer in cache.layers if not isinstance(layer, DMALayer)]
    return packed + stored_bytes([getattr(layer, name, None) for layer in others for name in STATES])
