"""Measure first tokens and steps of plain ``generate``, interleaved, and what a step's time on the GPU consists of.

    python scripts/measure_generate.py --out generate-steps.json --shape llama-3.1-8b --context 1024 --context 8192
    python scripts/measure_generate.py --out first-tokens.json --context 128 --first-tokens 40 --rounds 0 --run sdpa \
        --run balanced

A model with random weights calls ``generate`` as README does, with one prompt of random tokens. All runs share the
weights, and each has a separate model object, so that settings, caches and graphs stay as a user has them. Runs take
turns. Untimed calls come first: they compile, capture, and build cuDNN's plans. With ``--unseen``, each first token is
of a prompt whose length is new to the process, as most are in use: between half of the context and all of it.

A step is the difference between calls with 66 and with 2 tokens, over 64. An eager step at batch 1
takes as long as the host needs. Ratios to the first run are of the same round, so they vary less than the times do.
"""

from __future__ import annotations

import copy
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from dma_eval.bench.generate import build_model
from dma_eval.bench.timing import FAILURES
from dma_eval.errors import UserError
from dma_eval.files import check_file, write_json
from dma_eval.results import here_and_now
from torch import Tensor
from torch.profiler import ProfilerActivity
from transformers import CompileConfig, PreTrainedModel

import dma_hf

NEW_TOKENS = 66
FEW_TOKENS = 2
KERNELS = 12
"""Kernels of a profile that are listed by name; the others are one row."""
EAGER = {"disable_compile": True}
STATIC = {"cache_implementation": "static"}
RUNS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "sdpa": ("sdpa", None, {}),
    "flash_attention_3": ("flash_attention_3", None, {}),
    "balanced": ("dma_mxfp", None, {}),
    "balanced+int8": ("dma_mxfp", "int8", {}),
    "balanced+int4": ("dma_mxfp", "int4", {}),
    "sdpa, static": ("sdpa", None, STATIC),
    "balanced, static": ("dma_mxfp", None, STATIC),
    "balanced+int8, eager": ("dma_mxfp", "int8", EAGER),
    "balanced+int4, eager": ("dma_mxfp", "int4", EAGER),
    "balanced+int8, compiled": ("dma_mxfp", "int8", {"compile_config": CompileConfig()}),
    "balanced+int4, compiled": ("dma_mxfp", "int4", {"compile_config": CompileConfig()}),
}
"""Attention, cache in the model's settings, and options of ``generate``."""
DEFAULT_RUNS = [name for name in RUNS if not name.endswith(("compiled", "static"))]


class Run:
    """A model that shares its weights with those of the other runs."""

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        attention, cache, self.options = RUNS[name]
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self.model = copy.deepcopy(model, shared)
        self.model.set_attn_implementation(attention)
        if attention == "dma_mxfp":
            dma_hf.configure(self.model, "balanced", cache=cache)

    def seconds(self, prompt: Tensor, tokens: int) -> float:
        """Return the time of one call of ``generate`` that makes ``tokens`` tokens."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.model.generate(prompt, max_new_tokens=tokens, do_sample=False, **self.options)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def kernel_microseconds(self, prompt: Tensor) -> dict[str, float]:
        """Return the time on the GPU in a step by kernel, the longest first."""
        spent: Counter[str] = Counter()
        for tokens, sign in ((FEW_TOKENS, -1), (NEW_TOKENS, 1)):
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
                self.seconds(prompt, tokens)
            for event in profile.key_averages():
                spent[event.key] += sign * event.self_device_time_total
        ranked = [(name[:90], round(each / (NEW_TOKENS - FEW_TOKENS), 1)) for name, each in spent.most_common()]
        return dict(ranked[:KERNELS]) | {"others": round(sum(each for _, each in ranked[KERNELS:]), 1)}


def quartiles(values: list[float]) -> list[float]:
    return [round(each, 3) for each in statistics.quantiles(values, method="inclusive")]


def spread(times: list[float], first: list[float], what: str) -> dict[str, list[float]]:
    """Return quartiles of times in seconds, as milliseconds, and of their ratios to those of the first run."""
    ratios = [own / other for own, other in zip(times, first, strict=True)]
    return {f"{what}_ms": quartiles([1e3 * each for each in times]), f"{what}_over_first_run": quartiles(ratios)}


def measure(runs: dict[str, Run], prompt: Tensor, lengths: list[int], rounds: int, profiled: bool) -> dict[str, Any]:
    """Return quartiles of steps, and of first tokens of prompts with these lengths; runs that fail are left out."""
    results: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        try:
            calls = [run.seconds(prompt, NEW_TOKENS if rounds else 1) for _ in range(2)]
            results[name] = {"first_call_s": round(calls[0], 2), "second_call_s": round(calls[1], 2)}
        except FAILURES as error:
            typer.echo(f"{name}: {error}", err=True)
    firsts: dict[str, list[float]] = {name: [] for name in results}
    steps: dict[str, list[float]] = {name: [] for name in results}
    for length in (prompt.shape[1], prompt.shape[1], *lengths):  # the first two do not count
        for name in results:
            firsts[name].append(runs[name].seconds(prompt[:, :length], 1))
    for _ in range(rounds):
        for name in results:
            few, many = (runs[name].seconds(prompt, tokens) for tokens in (FEW_TOKENS, NEW_TOKENS))
            steps[name].append((many - few) / (NEW_TOKENS - FEW_TOKENS))
    first = next(iter(results), "")
    for name, result in results.items():
        if len(lengths) > 1:
            result |= spread(firsts[name][2:], firsts[first][2:], "first_token")
        if rounds > 1:
            result |= spread(steps[name], steps[first], "step")
        result["replayed_steps"] = dma_hf.stats(runs[name].model).replays
        if profiled:
            result["kernel_us_of_a_step"] = runs[name].kernel_microseconds(prompt)
    return results


def main(
    out: Annotated[Path, typer.Option(help="JSON file of the results.")],
    shape: Annotated[str, typer.Option(help="Shape of the model, as in `dma-hf bench`.")] = "llama-3.1-8b",
    context: Annotated[list[int] | None, typer.Option(help="Tokens of a prompt.")] = None,
    first_tokens: Annotated[int, typer.Option(help="First tokens of each run.")] = 10,
    unseen: Annotated[bool, typer.Option(help="First tokens of prompts of unseen lengths.")] = False,
    rounds: Annotated[int, typer.Option(help="Measured steps of each run; 0: none, else at least 2.")] = 5,
    run: Annotated[list[str] | None, typer.Option(help="Runs; default: all that compile nothing.")] = None,
    profile: Annotated[bool, typer.Option(help="Add the kernels of a step.")] = False,
) -> None:
    """Measure every context."""
    if unknown := [name for name in run or () if name not in RUNS]:
        raise UserError(f"--run: unknown run {unknown[0]!r}; valid: {'; '.join(RUNS)}")
    if not torch.cuda.is_available():
        raise UserError("it needs a CUDA device, and PyTorch finds none")
    check_file(out, "--out")
    model = build_model(shape, torch.device("cuda"), torch.bfloat16)
    runs = {name: Run(name, model) for name in run or DEFAULT_RUNS}
    results: list[dict[str, Any]] = []
    for length in context or [1024]:
        prompt = torch.randint(1, model.config.vocab_size, (1, length), device="cuda")  # 0 pads
        lengths = [length] * first_tokens
        if unseen:
            lengths = random.Random(0).sample(range(length // 2, length), first_tokens)
        case = {"shape": shape, "context": length} | ({"shortest": length // 2} if unseen else {})
        results.append(case | measure(runs, prompt, lengths, rounds, profile))
        typer.echo(f"{length} tokens: {results[-1]}")
        write_json(here_and_now() | {"results": results}, out)


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        sys.exit(f"Error: {error}")
