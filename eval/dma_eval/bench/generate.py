"""Time ``generate`` with several attentions and caches on one model.

A run is named ``ATTENTION+CACHE``. The attention is a backend (:mod:`dma_eval.load.backends`). The cache is ``dynamic``
(Transformers' default), ``static`` (Transformers' static cache), or a format of :class:`dma_hf.DMACache`.

A run calls ``generate`` as a user does, without options for speed. So a step is eager over a dynamic cache, compiled
over a static cache on a GPU, and a CUDA graph over a packed cache on a GPU.
"""

from __future__ import annotations

import bisect
import copy
import importlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, DynamicCache, LlamaConfig, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import is_flash_attn_3_available

import dma_hf
from dma_eval import console
from dma_eval.errors import UserError, one_line
from dma_eval.load.backends import Backend, activate, parse_backends
from dma_eval.load.models import head_dim_of
from dma_eval.names import DMA, FORMAT_SUFFIXES, check_runs, refuse_repeats
from dma_hf.integrations.cache_argument import CACHE_ARGUMENT

from .capture import text_windows
from .results import GenerateResult, LongestContext
from .timing import FAILURES, Timing, measure_each, stored_bytes

PACKED = tuple(FORMAT_SUFFIXES.values())
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
FILL_TOKENS = 65_536
"""Tokens that fill a cache at a time, enough to keep the device busy."""


@dataclass(frozen=True)
class GenerateRun:
    """An attention with a cache."""

    label: str
    backend: Backend
    cache: str

    @property
    def options(self) -> dict[str, str]:
        """Arguments of ``generate`` that select the cache. A packed cache is a setting of the model."""
        return {"cache_implementation": "static"} if self.cache == "static" else {}

    def make_cache(self, model: PreTrainedModel, max_tokens: int) -> Cache:
        """Return an empty cache with room for ``max_tokens`` tokens, of the kind that ``generate`` makes."""
        if self.cache == "dynamic":
            return DynamicCache(config=model.config)
        if self.cache == "static":
            return StaticCache(config=model.config, max_cache_len=max_tokens)
        return dma_hf.DMACache(model.config)


def default_runs() -> list[str]:
    """Return the names of the runs that are measured by default. A note says if FlashAttention-3 is left out."""
    if is_flash_attn_3_available():
        return list(DEFAULT_RUNS)
    console.print_note(f"{FLASH_3} is left out: Transformers finds no package flash_attn_interface of FlashAttention-3")
    return [name for name in DEFAULT_RUNS if name != FLASH_3]


def parse_runs(names: Sequence[str]) -> list[GenerateRun]:
    """Resolve names as given on the command line.

    Raises:
        UserError: There are none, two are the same, or an attention or a cache is unknown; the message lists the valid
            ones.
    """
    check_runs(names)
    runs = []
    for name in names:
        attention, _, cache = name.rpartition("+")
        packed = f"+{cache}" if cache in PACKED else ""
        (backend,) = parse_backends([f"{attention}{packed}"], "--run")
        runs.append(GenerateRun(f"{backend.label.removesuffix(packed)}+{cache}", backend, cache))
    refuse_repeats("--run", [run.label for run in runs])
    return runs


def build_model(shape: str, device: torch.device, dtype: torch.dtype, layers: int | None = None) -> PreTrainedModel:
    """Return a model of a shape with random weights, made on the device, with as many layers as the shape or so many.

    Raises:
        UserError: There is no such shape, or the device has no room for it.
    """
    if shape not in SHAPES:
        raise UserError(f"--shape: unknown shape {shape!r}; valid: {', '.join(SHAPES)}")
    config = copy.deepcopy(SHAPES[shape])
    config.num_hidden_layers = layers or config.num_hidden_layers
    try:
        with device:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except torch.OutOfMemoryError as error:
        raise UserError(f"--shape {shape} does not fit on {device}: {one_line(error)}") from None
    return never_stopping(model.eval())


def never_stopping(model: PreTrainedModel) -> PreTrainedModel:
    """Remove the model's end of text, so that it generates as many tokens as requested."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def measure(
    model: PreTrainedModel,
    contexts: Sequence[int],
    runs: Sequence[GenerateRun],
    *,
    batch: int,
    new_tokens: int,
    text: Tensor | None = None,
    prefix: int = 0,
) -> Iterator[GenerateResult]:
    """Generate from prompts of every length with every run, and yield each result at once.

    ``speedup`` is relative to the first run. The prompts are windows of the tokens of ``text``, each with its
    ``prefix`` special tokens in front; without a text they are random.

    Raises:
        UserError: The text is too short.
    """
    prompts = {
        context: torch.randint(model.config.vocab_size, (batch, context))
        if text is None
        else text_windows(text, batch, context, "--context", prefix)
        for context in contexts
    }
    return measure_each(
        {f"{context:,} tokens": context for context in contexts},
        {run.label: run for run in runs},
        lambda context, run: _measure_one(model, prompts[context].to(model.device), run, new_tokens),
        lambda result: result.step_milliseconds,
    )


def longest_contexts(model: PreTrainedModel, runs: Sequence[GenerateRun], batch: int) -> Iterator[LongestContext]:
    """Find the longest context of each run. A warning names a run that cannot run at any."""
    for run in runs:
        try:
            yield longest_context(model, run, batch)
        except FAILURES as error:
            console.print_warning(f"{run.label} has no longest context: {one_line(error)}")


def longest_context(model: PreTrainedModel, run: GenerateRun, batch: int) -> LongestContext:
    """Find the longest context, to a sixteenth, over which one more token can be computed."""
    sizes = [model.config.max_position_embeddings]  # descending
    while sizes[-1] > 1:
        sizes.append(sizes[-1] * 15 // 16)
    with console.working(f"Looking for the longest context of {run.label}"):
        found = bisect.bisect_left(sizes, True, key=lambda context: _fits(model, run, batch, context))
    return LongestContext(label=run.label, tokens=sizes[found] if found < len(sizes) else 0)


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Record the time of each token. ``generate`` copies tokens to the host for it, after the device computed them."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _measure_one(model: PreTrainedModel, prompt: Tensor, run: GenerateRun, new_tokens: int) -> GenerateResult:
    result = GenerateResult(label=run.label, context=prompt.shape[1], config=run.backend.info["config"])
    torch.compiler.reset()
    try:
        activate(model, run.backend)
        try:
            return _timed(model, prompt, run, new_tokens, result)
        finally:
            if run.cache in PACKED:
                dma_hf.configure(model, cache=None)  # frees the idle storage and graph
    except FAILURES as error:
        return replace(result, failure=one_line(error))


def _timed(
    model: PreTrainedModel, prompt: Tensor, run: GenerateRun, new_tokens: int, result: GenerateResult
) -> GenerateResult:
    """Generate three times, and time the third call. The first one returns its cache, whose size is measured.

    Earlier calls compile kernels, build cuDNN's plans for each new length, and capture the graph.
    """
    device = model.device
    output = _generate(model, prompt, run, new_tokens, return_dict_in_generate=True)
    stored = cache_bytes(getattr(output, CACHE_ARGUMENT))
    del output
    _generate(model, prompt, run, new_tokens)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    replays = dma_hf.stats(model).replays
    clock = _Clock()
    _generate(model, prompt, run, new_tokens, streamer=clock)
    # The streamer gets the prompt, then each token.
    steps = Timing.of((1e3 * np.diff(clock.times[2:])).tolist())
    return replace(
        result,
        first_token_seconds=clock.times[2] - clock.times[0],
        step_milliseconds=steps.median,
        step_milliseconds_fast=steps.fast,
        step_milliseconds_slow=steps.slow,
        steps=steps.repeats,
        graph_steps=dma_hf.stats(model).replays - replays,
        tokens_per_second=1e3 * prompt.shape[0] / steps.median,
        cache_bytes=stored,
        peak_bytes=torch.cuda.max_memory_allocated(device) - weight_bytes(model) if device.type == "cuda" else None,
    )


def _generate(model: PreTrainedModel, prompt: Tensor, run: GenerateRun, new_tokens: int, **options: Any) -> Any:
    return model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        **run.options,
        **options,
    )


def quantize_weights(model: PreTrainedModel) -> None:
    """Quantize the linear layers to FP8 with torchao, except the one that makes the logits.

    Weights have a scale for each output channel. Activations have one for each token, computed in every call.

    Raises:
        UserError: torchao is not installed, or the device has no FP8 products.
    """
    try:
        quantization = importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise UserError(f"--weights fp8 needs torchao: pip install torchao ({error})") from None
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
    """Return what a cache's keys and values take."""
    if isinstance(cache, dma_hf.DMACache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@torch.inference_mode()
def _fits(model: PreTrainedModel, run: GenerateRun, batch: int, context: int) -> bool:
    """Whether a token can be computed over a cache of ``context`` tokens, filled with random keys and values."""
    activate(model, run.backend)
    cache = None
    try:
        cache = run.make_cache(model, context + 1)
        _fill(model, cache, batch, context)
        token = torch.zeros((batch, 1), dtype=torch.int64, device=model.device)
        model(token, **{CACHE_ARGUMENT: cache})
        torch.cuda.synchronize(model.device)
    except torch.OutOfMemoryError:
        return False
    finally:
        del cache
        torch.cuda.empty_cache()
    return True


def _fill(model: PreTrainedModel, cache: Cache, batch: int, tokens: int) -> None:
    """Fill a cache with random keys and values."""
    text = model.config.get_text_config()
    shape = (batch, text.num_key_value_heads, min(tokens, FILL_TOKENS), head_dim_of(text))
    chunk = torch.randn(shape, dtype=model.dtype, device=model.device)
    for layer in range(text.num_hidden_layers):
        for start in range(0, tokens, FILL_TOKENS):
            part = chunk[:, :, : min(FILL_TOKENS, tokens - start)]
            cache.update(part, part, layer)
