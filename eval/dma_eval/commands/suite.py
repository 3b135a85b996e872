"""``dma-hf suite``: everything that a suite asks for, in one run and one folder."""

from __future__ import annotations

import argparse
from dataclasses import replace

from dma_eval.commands import options
from dma_eval.commands.measuring import measure
from dma_eval.parts import load_suite

EXAMPLES = """
dma-hf suite --suite quick -m HuggingFaceTB/SmolLM2-135M --out run
accelerate launch -m dma_eval suite --suite standard -m ./model --out run
dma-hf suite --suite my.toml -m ./model --data book.txt --include-path ./tasks --out run
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    help = "quick, standard, long-context, local-quality, or a TOML file."
    options.add(parser, "--suite", "-s", metavar="NAME|FILE.toml", required=True, help=help)
    options.add_attn(parser, (), shown="sdpa and every preset")
    options.add_model(parser)
    options.add_text(parser, required=False, shown="the suite's")
    options.add_max_windows(parser.add_argument_group("windows"))
    help = "Sequences per forward pass."
    options.add(options.add_tasks(parser), "--batch-size", type=options.number(1), default=8, help=help)
    options.add_out(parser, "Folder for the report and every answer.", required=True)


def run(args: argparse.Namespace) -> int:
    """Measure everything that a suite asks for: perplexity, fidelity, tasks, retrieval, stress.

    Results in --out are written after each part, and what is finished there is not measured again. Started by
    accelerate launch, the processes split the work. A part that fails is reported, and the others go on. Exit code 1 if
    a part or a backend failed, 2 for invalid input.
    """
    suite = load_suite(args.suite)
    windows = {} if args.max_windows is None else {"max_windows": args.max_windows}
    samples = {} if args.limit is None else {"limit": args.limit}
    changed = replace(
        suite,
        perplexity=suite.perplexity and replace(suite.perplexity, **windows),
        fidelity=suite.fidelity and replace(suite.fidelity, **windows),
        stress=suite.stress and replace(suite.stress, **windows),
        tasks=suite.tasks and replace(suite.tasks, batch_size=args.batch_size, **samples),
    )
    return measure(args, changed, goes_on=True)
