"""``dma-hf bench prefill`` from a source tree: ``python scripts/bench_prefill.py --json prefill.json``."""

from __future__ import annotations

import sys

from dma_eval.cli import main

if __name__ == "__main__":
    main(["bench", "prefill", *sys.argv[1:]])
