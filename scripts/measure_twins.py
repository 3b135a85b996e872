"""Measure recipes on a model and on twins of it whose keys or values are harder to quantise, in fp32 on any machine.

    python scripts/measure_twins.py --model MODEL --data wiki.test.raw --windows 2 --json OUT.json

Recipes are the rows of ``RECIPES``, each a change of ``balanced``, and the presets that are named there. ``KL`` is
that of the twin's own exact attention to the recipe, per token. The file is written after every window.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from dma_eval.backends import Backend, activate
from dma_eval.data import Window, load_text, tokenize
from dma_eval.models import load_model
from dma_eval.perplexity import TokenScores, score
from dma_eval.reading import read
from dma_eval.stress import TWINS, attention_layers, key_ranges, stressed
from torch import Tensor

import dma_hf

ROTATED, STRAIGHT = {"rotate": True}, {"rotate": False}
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "MXINT8, tile scale": STRAIGHT,
    "MXINT8, tile scale, rotated": ROTATED,
    "MXINT8, block scale": STRAIGHT | {"shared_scale": "block"},
    "MXINT8, block scale, rotated": ROTATED | {"shared_scale": "block"},
    "MXFP8, tile scale": STRAIGHT | {"low": "mxfp8"},
}
PRESETS = ("fp4", "paper")


def statistics(pairs: list[tuple[TokenScores, TokenScores]]) -> dict[str, float]:
    """Perplexity, its change and the divergence of a recipe, with standard errors over tokens.

    Args:
        pairs: The exact attention's scores and the recipe's, of each window.
    """
    exact, found = (np.concatenate([pair[i].nll for pair in pairs]).astype(float) for i in range(2))
    kl = np.concatenate([pair[1].kl for pair in pairs]).astype(float)
    change, root = found - exact, len(kl) ** 0.5
    return {
        "perplexity": float(np.exp(found.mean())),
        "change_percent": float(100 * np.expm1(change.mean())),
        "change_percent_error": float(100 * change.std(ddof=1) / root),
        "mean_kl": float(kl.mean()),
        "mean_kl_error": float(kl.std(ddof=1) / root),
    }


def main() -> None:
    """Measure, window by window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, GGUF file or Hub name")
    parser.add_argument("--data", required=True, help="the text, as for dma-hf ppl")
    parser.add_argument("--context", type=int, default=2048, help="tokens per window (default: 2048)")
    parser.add_argument("--windows", type=int, default=2, help="windows (default: 2)")
    parser.add_argument("--recipes", nargs="*", default=[*RECIPES, *PRESETS], help="which (default: all)")
    parser.add_argument("--twins", nargs="*", default=[twin.name for twin in TWINS], help="which (default: all)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", required=True, type=Path, help="results file")
    known = parser.parse_args()
    loaded = load_model(known.model, dtype="float32", device=known.device)
    model, tokens = loaded.model, tokenize(loaded.tokenizer, load_text(known.data).content)
    exact = Backend("sdpa", "sdpa")
    backends = {
        name: Backend(name, "dma_mxfp", dma_hf.preset(name) if name in PRESETS else dma_hf.resolve(RECIPES[name]))
        for name in known.recipes
    }
    scores: dict[tuple[str, str], list[tuple[TokenScores, TokenScores]]] = {}
    layers = attention_layers(model, tokens[:1024])
    twins = [twin for twin in TWINS if twin.name in known.twins]

    @torch.inference_mode()
    def scored(backend: Backend, ids: Tensor, reference: Tensor | None) -> tuple[Tensor, TokenScores]:
        activate(model, backend)
        logits = read(model, backend, ids[None])[0]
        return logits, score(logits, ids, Window(0, len(ids), 1), reference)

    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "tokens": known.context,
        "key_ranges": {},
    }
    for twin in twins:
        with stressed(model, layers, twin):
            ranges = key_ranges(model, tokens[:1024])
        report["key_ranges"][twin.name] = max(each.ratio for each in ranges)
    for index in range(known.windows):
        ids = tokens[index * known.context : (index + 1) * known.context].to(model.device)
        for twin in twins:
            with stressed(model, layers, twin):
                reference, expected = scored(exact, ids, None)
                for name, backend in backends.items():
                    found = scored(backend, ids, reference)[1]
                    scores.setdefault((twin.name, name), []).append((expected, found))
                    row = statistics(scores[twin.name, name])
                    print(f"{twin.name}, {name}: KL {row['mean_kl']:.5f}, {row['change_percent']:+.2f} %", flush=True)
        report["windows"] = index + 1
        report["rows"] = [{"twin": t, "recipe": r} | statistics(pairs) for (t, r), pairs in scores.items()]
        known.json.parent.mkdir(parents=True, exist_ok=True)
        known.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
