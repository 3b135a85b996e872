"""``dma-hf fidelity``: how far attention backends are from SDPA in fp32."""

from __future__ import annotations

import argparse

from dma_eval.commands import options
from dma_eval.commands.measuring import measure
from dma_eval.parts import FidelityPart, Suite

EXAMPLES = """
dma-hf fidelity -m HuggingFaceTB/SmolLM2-135M --data book.txt --context 4096 --max-windows 8 --out run
dma-hf fidelity -m ./model --data book.txt --attn sdpa dma_mxfp:fp4 --dtype bfloat16 --head-windows 4
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_attn(parser)
    options.add_model(parser)
    options.add_text(parser)
    options.add_windows(parser)
    group = parser.add_argument_group("parts")
    help = "Windows for the errors by head; 0: leave them out."
    options.add(group, "--head-windows", type=options.number(0), default=FidelityPart.head_windows, help=help)
    help = "Greedy continuations to compare; 0: leave them out."
    options.add(group, "--prompts", type=options.number(0), default=FidelityPart.prompts, help=help)
    options.add(group, "--new-tokens", type=options.number(1), default=FidelityPart.new_tokens, help="Tokens of each.")
    options.add_out(parser)


def run(args: argparse.Namespace) -> int:
    """Find where attention backends leave SDPA in fp32: tokens, positions, heads, and greedy continuations.

    The reference has the same weights in fp32, whatever --dtype the backends run in; put sdpa among them to see what
    that dtype costs by itself. Heads are measured one by one, each layer given SDPA's own inputs, which is how a bad
    one is found. Exit code 1 if a backend failed, 2 for invalid input.
    """
    return measure(args, Suite(name="fidelity", fidelity=options.part_of(FidelityPart, args)))
