"""``dma-hf stress``: what the model's keys are like, and every backend on twins that are harder to quantise."""

from __future__ import annotations

import argparse

from dma_eval.commands import options
from dma_eval.commands.measuring import measure
from dma_eval.parts import StressPart, Suite

EXAMPLES = """
dma-hf stress -m meta-llama/Llama-3.2-1B --data Salesforce/wikitext:wikitext-2-raw-v1:test --out run
dma-hf stress -m model.gguf --data book.txt --attn sdpa dma_mxfp:balanced dma_mxfp:my.toml --context 4096
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_attn(parser, (), shown="sdpa and every preset")
    options.add_model(parser)
    options.add_text(parser)
    options.add_windows(parser)
    parser.set_defaults(max_windows=StressPart().max_windows)
    options.add_out(parser)


def run(args: argparse.Namespace) -> int:
    """Compare attention backends on twins of the model whose keys, queries or values are harder to quantise.

    First it says how far the model's own key channels stand out. A twin has channels of every head scaled, and what
    meets them by the inverse, so that it computes the same; or key biases, and is compared with its own exact
    attention. Exit code 1 if a backend failed, 2 for invalid input.
    """
    return measure(args, Suite(name="stress", stress=options.part_of(StressPart, args, data=None)))
