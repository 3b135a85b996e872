"""``dma-hf ppl``: perplexity and fidelity of attention backends on the same tokens."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dma_eval import console
from dma_eval.commands import options
from dma_eval.commands.measuring import measure
from dma_eval.parts import PerplexityPart, Suite

if TYPE_CHECKING:
    from dma_eval.results import Report

EXAMPLES = """
dma-hf ppl -m HuggingFaceTB/SmolLM2-135M --data Salesforce/wikitext:wikitext-2-raw-v1:test --context 2048
dma-hf ppl -m model.gguf --data book.txt --attn sdpa dma_mxfp:balanced dma_mxfp:paper --json r.json --plot r.png
dma-hf ppl -m ./model --data rows.jsonl --column content --attn sdpa dma_mxfp:my.toml --context 8192 --stride 4096
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_attn(parser)
    options.add_model(parser)
    options.add_text(parser)
    group = options.add_windows(parser)
    help = "Distance of two windows. If less than the context, windows overlap and each scores its new tokens."
    options.add(group, "--stride", type=int, help=help, shown="the context")
    options.add(group, "--skip-windows", type=int, default=0, help="Leave out so many windows at the text's begin.")
    help = "Spread --max-windows over the whole text instead of taking the first ones."
    options.add(group, "--spread", action="store_true", help=help)
    options.add_files(options.add_out(parser), "json", "markdown", "plot")


def run(args: argparse.Namespace) -> int:
    """Compare attention backends: perplexity, divergence from the first one, speed and memory.

    Every backend reads the same tokens with the same weights. Interrupted, the command shows and writes the figures of
    the windows that are done; with --out they are kept, and the same command goes on after them. Started by accelerate
    launch, the processes split the windows. Exit code 1 if a backend failed, 2 for invalid input.
    """
    files = options.prepare_files(args)
    part = options.part_of(PerplexityPart, args, contexts=[] if args.context is None else [args.context], data=None)

    def write(report: Report) -> None:
        from dma_eval.markdown import Plot, to_markdown
        from dma_eval.results import write_report

        section = report.perplexity[0]
        if args.json is not None:
            write_report(report, args.json)
        if args.plot is not None:
            from dma_eval.plots import plot_comparison

            plot_comparison(section, f"{Path(args.model).name}, context {section.context:,}", args.plot)
        if args.markdown is not None:
            plots = [] if args.plot is None else [Plot("Comparison of the backends", link(args.plot, args.markdown))]
            args.markdown.write_text(to_markdown(report, plots), encoding="utf-8")
        for path in files:
            console.print_wrote(path)

    return measure(args, Suite(name="ppl", perplexity=part), also=write)


def link(path: Path, page: Path) -> str:
    """``path`` as a link from the file ``page``."""
    return Path(os.path.relpath(path, page.parent)).as_posix()
