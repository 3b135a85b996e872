"""``dma-hf retrieval``: a needle in prose or one pair among pairs, in long prompts, under several backends."""

from __future__ import annotations

import argparse

from dma_eval.commands import options
from dma_eval.commands.measuring import measure
from dma_eval.errors import UserError
from dma_eval.parts import RetrievalPart, Suite

EXAMPLES = """
dma-hf retrieval -m meta-llama/Llama-3.2-1B --data book.txt --lengths 4096 16384 65536 --out run
dma-hf retrieval -m ./model --kind kv --attn sdpa dma_mxfp:balanced dma_mxfp:fp4 --samples 20
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    part = RetrievalPart()
    options.add_attn(parser)
    options.add_model(parser)
    options.add_text(parser, required=False, shown="none; needles need one")
    group = parser.add_argument_group("prompts")
    help = "needle: a sentence in the prose of --data. kv: one pair among pairs of keys and values."
    options.add(group, "--kind", dest="kinds", metavar="KIND", several=True, default=part.kinds, help=help)
    shown = "1024 and its doubles, four at most, up to the model's maximum"
    help, length = "Lengths of the prompts.", options.number(1)
    options.add(group, "--lengths", metavar="TOKENS", type=length, several=True, shown=shown, help=help)
    help = "Places of the answer, 0 to 1."
    options.add(group, "--depths", metavar="DEPTH", type=float, several=True, default=part.depths, help=help)
    help = "Questions for each length and depth."
    options.add(group, "--samples", type=options.number(1), default=part.samples, help=help)
    options.add_out(parser)


def run(args: argparse.Namespace) -> int:
    """Ask for one passage of a long prompt, at growing lengths and depths.

    Every backend is asked the same questions. Exit code 1 if a backend failed, 2 for invalid input.
    """
    part = options.part_of(RetrievalPart, args)
    if part.needs_text and args.data is None:
        raise UserError("--data: needles need a text to be hidden in; name one")
    return measure(args, Suite(name="retrieval", retrieval=part))
