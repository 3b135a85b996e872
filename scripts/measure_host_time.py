"""Measure the host time of a warm eager prefill call, or steps and first tokens of plain ``generate``.

    python scripts/measure_host_time.py --out host-time.json
    python scripts/measure_host_time.py --out generate-steps.json --shape llama-3.1-8b --context 1024 --context 8192

Calls come in bursts. The GPU finishes one before the next begins, so the host never waits for the queue.
Implementations take turns. The inputs are random, bf16, causal, with 32 query and 8 kv heads of 128 channels.

With ``--shape``, a model with random weights calls ``generate`` as README does, with one prompt of random tokens. Runs
are interleaved. Before each timed call, an untimed one compiles, captures and builds cuDNN's plans. An eager step at
batch 1 takes as long as the host needs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from dma_eval.bench.generate import build_model, never_stopping
from dma_eval.bench.timing import FAILURES, Run
from dma_eval.load.backends import Backend
from dma_eval.results import here_and_now
from torch import Tensor
from transformers import PreTrainedModel

import dma_hf

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from kernel_bench.command import parse_compared
from kernel_bench.inputs import random_inputs
from kernel_bench.results import PrefillShape
from prefill import PEERS, prepare

SHAPES = [
    PrefillShape(batch=batch, length=length, query_heads=32, kv_heads=8, head_dim=128, is_causal=True)
    for batch, length in ((1, 128), (1, 1024), (1, 2048), (8, 1024))
]
IMPLEMENTATIONS = ["dma_mxfp:balanced", "fa3", "sdpa"]
CALLS = 20
"""Calls of a burst."""


def burst_microseconds(run: Run) -> float:
    """Return the host time per call of one burst."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    return 1e6 * (time.perf_counter() - start) / CALLS


def measure(shape: PrefillShape, implementations: list[Backend], bursts: int) -> dict[str, float]:
    """Return the median host time of a call by implementation; those whose package is missing are left out."""
    inputs = random_inputs(shape, torch.device("cuda"), torch.bfloat16)
    runs = {}
    for each in implementations:
        try:
            runs[each.label] = prepare(each, inputs).run
            burst_microseconds(runs[each.label])  # compiles
        except FAILURES as error:
            runs.pop(each.label, None)
            typer.echo(f"{each.label}: {error}", err=True)
    times: dict[str, list[float]] = {label: [] for label in runs}
    for _ in range(bursts):
        for label, run in runs.items():
            times[label].append(burst_microseconds(run))
    return {label: statistics.median(each) for label, each in times.items()}


NEW_TOKENS = 66
"""Tokens of a timed call of ``generate``. A step is the difference to a call with two tokens, over 64."""
EAGER = {"disable_compile": True}
GENERATE: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "sdpa": ("sdpa", None, {}),
    "flash_attention_3": ("flash_attention_3", None, {}),
    "balanced": (dma_hf.NAME, None, {}),
    "balanced+int8": (dma_hf.NAME, "int8", {}),
    "balanced+int4": (dma_hf.NAME, "int4", {}),
    "balanced+int8, eager": (dma_hf.NAME, "int8", EAGER),
    "balanced+int4, eager": (dma_hf.NAME, "int4", EAGER),
}
"""Runs of ``generate``: attention, cache in the model's settings, and options."""


def generate_seconds(model: PreTrainedModel, prompt: Tensor, tokens: int, options: dict[str, Any]) -> float:
    """Return the time of one call of ``generate`` that makes ``tokens`` tokens."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_generate(model: PreTrainedModel, context: int, rounds: int, runs: list[str]) -> dict[str, Any]:
    """Return the median step, first token and replayed steps of every run; those that cannot run are left out."""
    prompt = torch.randint(1, 1000, (1, context), device="cuda")  # 0 pads
    times: dict[str, list[tuple[float, float]]] = {run: [] for run in runs}
    replays = dict.fromkeys(runs, 0)
    for _ in range(rounds):
        for run in list(times):
            attention, cache, options = GENERATE[run]
            try:
                model.set_attn_implementation(attention)
                if attention == dma_hf.NAME:
                    dma_hf.configure(model, "balanced", cache=cache)
                dma_hf.reset_stats(model)
                generate_seconds(model, prompt, NEW_TOKENS, options)
                first, two, many = (generate_seconds(model, prompt, n, options) for n in (1, 2, NEW_TOKENS))
            except FAILURES as error:
                del times[run]
                typer.echo(f"{run}: {error}", err=True)
                continue
            times[run].append((1e3 * (many - two) / (NEW_TOKENS - 2), 1e3 * first))
            replays[run] = dma_hf.stats(model).replays
        dma_hf.configure(model, "balanced", activate=True)  # frees the idle cache
    return {
        run: {
            "step_ms": round(statistics.median(step for step, _ in found), 2),
            "first_token_ms": round(statistics.median(first for _, first in found), 2),
            "replayed_steps": replays[run],
        }
        for run, found in times.items()
    }


def write(results: list[dict[str, Any]], out: Path) -> None:
    """Write the results so far, one on a line, and print the last one."""
    facts = here_and_now()
    report = facts | {"environment": asdict(facts["environment"]), "results": results}
    out.write_text(json.dumps(report).replace(', {"', ',\n{"') + "\n", encoding="utf-8")
    typer.echo(" ".join(f"{key}={value}" for key, value in results[-1].items()))


def main(
    out: Annotated[Path, typer.Option(help="JSON file of the results.")],
    bursts: Annotated[int, typer.Option(help="Bursts of each implementation.")] = 60,
    shape: Annotated[str | None, typer.Option(help="Model shape, to measure generate.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens of a prompt.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of generate.")] = 5,
    run: Annotated[list[str] | None, typer.Option(help="Runs of generate; default: all.")] = None,
) -> None:
    """Measure every shape."""
    results: list[dict[str, Any]] = []
    if shape is not None:
        model = never_stopping(build_model(shape, torch.device("cuda"), torch.bfloat16))
        for length in context or [1024]:
            measured = measure_generate(model, length, rounds, run or [*GENERATE])
            results.append({"shape": shape, "context": length} | measured)
            write(results, out)
        return
    implementations = parse_compared(IMPLEMENTATIONS, "IMPLEMENTATIONS", tuple(PEERS), caches=False)
    for each in SHAPES:
        times = measure(each, implementations, bursts)
        results.append({"shape": str(each)} | {f"{label}_us": round(taken, 1) for label, taken in times.items()})
        write(results, out)


if __name__ == "__main__":
    typer.run(main)
