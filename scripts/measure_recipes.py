"""Measure what each step of the recipe is worth: perplexity and divergence of many precisions, in fp32.

    python scripts/measure_recipes.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data wiki.test.raw --out OUT

makes a configuration of each row of ``RECIPES`` in ``OUT/recipes``, reads windows of 8,192 and of 2,048 tokens, and
writes one report of both to ``OUT``. In fp32 everything runs in the reference, on any machine. All arguments that it
does not know go to ``dma-hf ppl``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dma_eval.cli import main as dma_hf_command

from dma_hf import DMAConfig

WINDOWS = {8192: 4, 2048: 12}
"""Windows to read of each context."""
PLAIN = {"smooth_k": False, "rotate": False, "pv": "bf16"}
TRANSFORMED = {"smooth_k": True, "rotate": True, "pv": "bf16"}
EVERYWHERE = {"diagonal_tiles": 0, "sink_tiles": 0, **PLAIN}
MXFP4 = {"low": "mxfp4", "high": "mxfp8", "shared_scale": "block", "diagonal_tiles": 1}
NVFP4 = {"low": "nvfp4", "high": "mxfp8", "shared_scale": "block", "diagonal_tiles": 1, "sink_tiles": 1}
ROW = {"low": "mxfp8", "shared_scale": "row", "scale_rounding": "ceil"}
BAND = {"high": "bf16", "diagonal_tiles": 1, "sink_tiles": 1}
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "mxfp4-everywhere": {"low": "mxfp4", "high": "mxfp4", "shared_scale": "block", "scale_rounding": "floor"}
    | EVERYWHERE,
    "nvfp4-everywhere": {"low": "nvfp4", "high": "nvfp4", "shared_scale": "block"} | EVERYWHERE,
    "mxfp8-everywhere-floor": {"low": "mxfp8", "high": "mxfp8", "shared_scale": "block", "scale_rounding": "floor"}
    | EVERYWHERE,
    "mxfp8-everywhere-ceil": {"low": "mxfp8", "high": "mxfp8", "shared_scale": "block", "scale_rounding": "ceil"}
    | EVERYWHERE,
    "mxfp4-band-floor": MXFP4 | {"sink_tiles": 1, "scale_rounding": "floor"} | PLAIN,
    "mxfp4-band-ceil": MXFP4 | {"sink_tiles": 1, "scale_rounding": "ceil"} | PLAIN,
    "mxfp4-band-transforms": MXFP4 | {"sink_tiles": 1, "scale_rounding": "ceil"} | TRANSFORMED,
    "mxfp4-band-transforms-no-sink": MXFP4 | {"sink_tiles": 0, "scale_rounding": "ceil"} | TRANSFORMED,
    "nvfp4-band": NVFP4 | PLAIN,
    "nvfp4-band-transforms": NVFP4 | TRANSFORMED,
    "nvfp4-band-transforms-pv-fp8": NVFP4 | TRANSFORMED | {"pv": "fp8"},
    "mxfp8-row-everywhere": ROW | {"high": "mxfp8"} | EVERYWHERE,
    "mxfp8-row-band": ROW | BAND | PLAIN,
    "mxfp8-row-band-transforms": ROW | BAND | TRANSFORMED,
    "mxfp8-row-band-transforms-pv-fp8": ROW | BAND | TRANSFORMED | {"pv": "fp8"},
    "mxint8-row-band-smooth": ROW | BAND | PLAIN | {"low": "mxint8", "smooth_k": True},
    "mxint8-row-band-smooth-pv-fp8": ROW | BAND | PLAIN | {"low": "mxint8", "smooth_k": True, "pv": "fp8"},
}


def run(*arguments: str) -> None:
    """Run ``dma-hf`` and go on after it, unless it fails."""
    sys.argv = ["dma-hf", *arguments]  # reports quote it
    try:
        dma_hf_command(sys.argv[1:])
    except SystemExit as stopped:
        if stopped.code:
            raise


def main() -> None:
    """Write the configurations, measure both contexts, and put the report together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, GGUF file or Hub name")
    parser.add_argument("--data", required=True, help="the text, as for dma-hf ppl")
    parser.add_argument("--out", required=True, type=Path, help="folder for the report")
    known, others = parser.parse_known_args()
    folder = known.out / "recipes"
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for name, fields in RECIPES.items():
        DMAConfig().with_changes(**fields).to_toml(folder / f"{name}.toml")
        names.append(f"dma_mxfp:{folder / name}.toml")
    reports = [str(known.out / f"ppl-{context}.json") for context in WINDOWS]
    for (context, windows), report in zip(WINDOWS.items(), reports, strict=True):
        options = ["--context", str(context), "--max-windows", str(windows), "--dtype", "float32", *others]
        run("ppl", "--model", known.model, "--data", known.data, *options, "--json", report, "--attn", "sdpa", *names)
    run("report", *reports, "--out", str(known.out))


if __name__ == "__main__":
    main()
