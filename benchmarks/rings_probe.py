"""To be dropped: time stage rings of the warp-specialized kernel against each other, interleaved in one process.

    python benchmarks/rings_probe.py --inputs MODEL.gguf -d TEXT --length 32768 --layers 7 --json rings.json

Kernels: `one` has a ring for keys and values, `two` has rings of their own, `two-no-v` also loads no values of low
tiles (wrong results: it bounds what loading fewer of them can gain), `on-demand` is a rough prototype that loads them
if a warpgroup is likely to keep the tile, or keeps it. `dense` skips nothing, `fa3` is FlashAttention-3.
`SPEED` is relative to fa3, or to dense without it. Besides a model's inputs: inputs whose tiles are skipped by design.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import prefill
import torch
from dma_eval.bench.timing import FAILURES, time_interleaved
from dma_eval.errors import one_line
from dma_kernels import api, attention, attention_with_lse
from dma_kernels.numerics.recipe import Recipe
from dma_kernels.prefill import config as configs
from dma_kernels.prefill.plan import Plans
from kernel_bench.command import look, run
from kernel_bench.inputs import Inputs
from kernel_bench.results import PrefillShape
from torch import Tensor

import dma_hf

KERNELS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "one": lambda config: {"value_stages": config.stages},
    "two": lambda config: {},
    "two-no-v": lambda config: {"probe_no_values": True},
    "on-demand": lambda config: {"values_on_demand": True},
}
CONFIGURE = configs.warp_specialized_config
PLANS = {name: Plans() for name in KERNELS}


def configured(name: str, *args: Any) -> Any:
    """Return the configuration of the warp-specialized kernel, changed as KERNELS says."""
    found = CONFIGURE(*args)
    return found and replace(found, **KERNELS[name](found))


def call(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call ``function`` on a kernel of KERNELS."""
    with (
        mock.patch.object(configs, "warp_specialized_config", partial(configured, name)),
        mock.patch.object(api, "plan", PLANS[name]),
    ):
        return function(*args, **options)


def made(length: int, skipped: Tensor, device: torch.device, seed: int = 0) -> Inputs:
    """Return 12/2 heads of 128 channels in which warpgroup ``g`` of a CTA skips the tiles of ``skipped[g]``.

    Three channels say which of three blocks of 64 queries a query is in, and move the scores of tiles by -20.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    query, key, value = (
        torch.randn(1, heads, length, 128, device=device, generator=generator).bfloat16() for heads in (12, 2, 2)
    )
    index = torch.arange(length, device=device)
    skipped[:, 0] = False
    for g in range(3):
        query[..., g] = torch.where(index // 64 % 3 == g, 15.0, 0.0).bfloat16()
        key[..., g] = torch.where(skipped[g].to(device)[index // 128], -15.0, 0.0).bfloat16()
    return Inputs(query, key, value, 128**-0.5)


def patterns(length: int) -> dict[str, Tensor]:
    """Return which warpgroup skips which tiles, ``[3, tiles]``, by name."""
    generator = torch.Generator().manual_seed(0)
    tiles = torch.arange(length // 128).expand(3, -1)
    group = torch.arange(3)[:, None]
    random = torch.rand(3, length // 128, generator=generator)
    return {
        "nothing": random < 0.0,
        "all": random < 2.0,
        "42 %, together": (random[:1] < 0.42).expand(3, -1).clone(),
        "42 %, each by itself": random < 0.42,
        "90 %, together": (random[:1] < 0.9).expand(3, -1).clone(),
        "90 %, each by itself": random < 0.9,
        "runs of 16 of 48, together": tiles // 16 % 3 == 0,
        "runs of 16 of 48, staggered": (tiles // 16 + group) % 3 == 0,
        "two of three warpgroups": (group < 2).expand(3, length // 128).clone(),
    }


def measure(
    title: str, layers: list[Inputs], thresholds: list[float], kernels: list[str], device: torch.device, seconds: float
) -> Any:
    """Time everything on the layers, and print a table."""
    recipe: Recipe = dma_hf.PRESETS["balanced"]
    runs: dict[str, list[Callable[[], Any]]] = {}
    shares: dict[str, float] = {}
    notes: list[str] = []
    try:
        runs["fa3"] = [prefill.PEERS["fa3"](inputs).run for inputs in layers]
        runs["fa3"][0]()
    except FAILURES as failure:
        runs.pop("fa3", None)
        notes.append(f"fa3: {one_line(failure)}")
    runs["dense"] = [partial(call, "two", attention, *x.tensors, recipe, **x.options) for x in layers]
    for t in thresholds:
        skipping = replace(recipe, skip_threshold=t)
        counts = torch.zeros(layers[0].query.shape[1], 2, dtype=torch.int64, device=device)
        for inputs in layers:
            call("one", attention_with_lse, *inputs.tensors, skipping, **inputs.options, tile_counts=counts)
        skipped, seen = counts.sum(0).tolist()
        for name in kernels:
            label = f"{name} t={t:g}"
            shares[label] = skipped / max(seen, 1)
            runs[label] = [partial(call, name, attention, *x.tensors, skipping, **x.options) for x in layers]
        for name in ("two", "on-demand"):
            for layer, (a, b) in enumerate(zip(runs[f"one t={t:g}"], runs.get(f"{name} t={t:g}", []))):
                if not torch.equal(a(), b()):
                    notes.append(f"DIFFERENT OUTPUTS of one and {name}: layer {layer}, t = {t}")
    for of in runs.values():
        of[0]()
    flat = {(label, layer): each for layer in range(len(layers)) for label, of in runs.items() for each in [of[layer]]}
    timings = time_interleaved(flat, device, seconds=seconds)
    total = {label: sum(timings[label, layer].median for layer in range(len(layers))) for label in runs}
    reference = total.get("fa3", total["dense"])
    print(f"\n== {title} ({timings['dense', 0].repeats} rounds)", *notes, sep="\n")
    for label, ms in total.items():
        of = [timings[label, layer] for layer in range(len(layers))]
        share = f"skipped {100 * shares[label]:5.1f} %" if label in shares else ""
        old = total.get("one " + label.partition(" ")[2])
        against = f"over one {old / ms:5.3f}" if old else ""
        spread = f"{sum(x.fast for x in of):8.3f} to {sum(x.slow for x in of):8.3f}"
        print(f"{label:16s} {ms:8.3f} ms ({spread}) speed {reference / ms:5.3f} {against:15s} {share}", flush=True)
    per_layer = {label: [timings[label, layer].median for layer in range(len(layers))] for label in runs}
    return {"title": title, "milliseconds": total, "by layer": per_layer, "skipped": shares, "notes": notes}


def main(args: argparse.Namespace) -> int:
    """Measure, print and write."""
    device, _, facts = look(args)
    found = []
    shape: PrefillShape
    for shape, layers in prefill.model_inputs(args):
        found.append(measure(str(shape), layers, [100.0, 7.0, 6.0, 5.0], args.kernels, device, args.seconds))
    for length in args.length:
        for name, skipped in patterns(length).items():
            layer = made(length, skipped, device)
            found.append(measure(f"{length}: {name}", [layer], [6.0], args.kernels, device, args.seconds / 5))
    if args.json is not None:
        args.json.write_text(json.dumps({"device": str(facts["device"]), "results": found}, indent=1))
    return 0


if __name__ == "__main__":
    parser = prefill.make_options()
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=["one", "two", "two-no-v"])
    run(main, parser)
