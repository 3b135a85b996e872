"""Measure the host time of a warm eager prefill call: microseconds that Python and the launches take.

    python scripts/measure_host_time.py --out host-time.json [--baseline OTHER_CHECKOUT/kernels] [--rounds 3]

Calls come in bursts that the GPU has finished before the next one begins, so that the host never waits for the queue.
Each version of the kernels runs in a process of its own, and the processes take turns. FlashAttention-3 is measured
where it is installed. 32 query and 8 kv heads of 128 channels, causal, bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

LENGTHS = (128, 2_048)
CALLS, BURSTS = 20, 60
ROOT = Path(__file__).parents[1]


def host_microseconds(call: Callable[[], object]) -> float:
    """Return the median host time of a call."""
    for _ in range(5):
        call()
    times = []
    for _ in range(BURSTS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS)
    return 1e6 * statistics.median(times)


def calls_of(name: str, length: int) -> Callable[[], object]:
    """Return a call of an implementation.

    Raises:
        ImportError: FlashAttention-3 is not installed.
    """
    query, key, value = (
        torch.randn(1, heads, length, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8, 8)
    )
    if name == "sdpa":
        return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    if name == "fa3":
        from fa3_fwd_interface import flash_attn_func  # type: ignore[import-not-found]

        tensors = [tensor.transpose(1, 2).contiguous() for tensor in (query, key, value)]
        return lambda: flash_attn_func(*tensors, causal=True)
    from dma_kernels import Recipe, attention

    recipe = Recipe(low="mxint8", shared_scale="tile", smooth_k=True, rotate=True, pv="fp8")  # the preset balanced
    return lambda: attention(query, key, value, recipe)


def measure(names: list[str], kernels: Path) -> dict[str, dict[str, float]]:
    """Return the host time by implementation and length, measured in a new process; those that are missing are not."""
    paths = [str(kernels), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, __file__, "--worker", *names],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    found: dict[str, dict[str, float]] = json.loads(result.stdout.splitlines()[-1])
    return found


def work(names: list[str]) -> dict[str, dict[str, float]]:
    """Measure implementations in this process."""
    found: dict[str, dict[str, float]] = {}
    for name in names:
        try:
            found[name] = {str(length): host_microseconds(calls_of(name, length)) for length in LENGTHS}
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--baseline", type=Path, help="the kernels folder of another version, measured too")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each process")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(options.worker)))
        return
    rounds: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for name, times in measure(["dma_mxfp", "fa3", "sdpa"], ROOT / "kernels").items():
            rounds.setdefault(name, []).append(times)
        if options.baseline is not None:
            rounds.setdefault("baseline", []).append(measure(["dma_mxfp"], options.baseline)["dma_mxfp"])
    import triton

    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "microseconds": {
            name: {length: statistics.median(each[length] for each in found) for length in found[0]}
            for name, found in rounds.items()
        },
    }
    print(f"{'host microseconds':20}" + "".join(f"{f'1 x {length}':>10}" for length in LENGTHS))
    for name, times in facts["microseconds"].items():
        print(f"{name:20}" + "".join(f"{times[str(length)]:10.1f}" for length in LENGTHS))
    if options.out is not None:
        options.out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
