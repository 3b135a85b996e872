"""``dma-hf lm-eval``: lm-eval tasks under several attention backends, compared sample by sample."""

from __future__ import annotations

import argparse

from dma_eval.commands import options
from dma_eval.commands.measuring import measure
from dma_eval.parts import Suite, TasksPart

EXAMPLES = """
dma-hf lm-eval -m HuggingFaceTB/SmolLM2-135M --tasks arc_easy,hellaswag --limit 500 --out run
dma-hf lm-eval -m ./model --tasks my_task --include-path ./tasks --attn sdpa dma_mxfp:balanced dma_mxfp:fp4
accelerate launch -m dma_eval lm-eval -m ./model --tasks lambada_openai --out run
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_attn(parser)
    options.add_model(parser)
    group = options.add_tasks(parser)
    help = "Tasks or groups of lm-eval, or YAML files. Takes several values, with commas or spaces between them."
    options.add(group, "--tasks", "-t", dest="names", metavar="TASK", several=True, required=True, help=help)
    shown = "what each task says"
    options.add(group, "--num-fewshot", type=options.number(0), help="Examples in each prompt.", shown=shown)
    help = "Put prompts through the model's chat template."
    options.add(group, "--apply-chat-template", dest="chat_template", action="store_true", help=help)
    help = "Sequences per forward pass."
    options.add(group, "--batch-size", type=options.number(1), default=TasksPart.batch_size, help=help)
    options.add_out(parser)


def run(args: argparse.Namespace) -> int:
    """Compare attention backends on lm-eval tasks: accuracy, paired differences with intervals, flipped answers.

    Every backend answers the same samples in the same order. With --out, every answer is kept there, and a run that was
    interrupted goes on where it stopped. Started by accelerate launch, the processes split the samples. Exit code 1 if
    a backend failed, 2 for invalid input.
    """
    return measure(args, Suite(name="lm-eval", tasks=options.part_of(TasksPart, args)))
