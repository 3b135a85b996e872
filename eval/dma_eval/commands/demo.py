"""``dma-hf demo``: the whole comparison on a small model and a text that come with the package."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dma_eval import console, options
from dma_eval.errors import UserError

CONTEXT, WINDOWS = 4096, 2
PROMPT_TOKENS, NEW_TOKENS = 1500, 48
# The prompt ends with this stretch of itself once more, so that the model can go on by recalling what followed it: keys
# that lie hundreds of tokens back, in low-bit tiles.
RECALLED = slice(600, 632)
EPILOG = """
[bold]Examples[/]

dma-hf demo

dma-hf demo --out /tmp/report
"""


def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the report.", rich_help_panel=options.OUTPUT_PANEL)
    ] = Path("dma-demo"),
    debug: options.Debug = False,
) -> None:
    """Compare SDPA with every preset on a small model that comes with the package; a minute or two on a CPU.

    Measures perplexity and divergence on a held-out text, and lets every backend continue a prompt whose last lines it
    has read before, so that it can recall what followed them. Needs no network. Writes results.json, report.md and two
    plots to the folder.
    """
    with console.user_errors(debug):
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out: cannot make the folder {out}: {error.strerror}") from error
        with console.starting():
            import torch

            import dma_hf
            from dma_eval.backends import parse_backends
            from dma_eval.comparison import compare
            from dma_eval.data import load_text, tokenize
            from dma_eval.generation import continue_greedily
            from dma_eval.markdown import Plot, to_markdown
            from dma_eval.models import load_model
            from dma_eval.plots import plot_positions, plot_quality
            from dma_eval.report import make_report
            from dma_eval.results import write_report

        torch.manual_seed(0)
        backends = parse_backends(["sdpa", *(f"dma_mxfp:{preset}" for preset in dma_hf.PRESETS)])
        assets = resources.files("dma_eval") / "assets"
        with resources.as_file(assets / "demo_model") as folder, resources.as_file(assets / "heldout.txt") as file:
            if not folder.is_dir() or not file.is_file():
                raise UserError("this installation lacks the demo model; install the dma-hf package again")
            loaded = load_model(str(folder), dtype="float32", title="demo model")
            text = replace(load_text(str(file)), name="heldout.txt (in the package)")
        with console.measuring() as (on_start, on_pass):
            section = compare(
                loaded, text, backends, context=CONTEXT, max_windows=WINDOWS, on_start=on_start, on_pass=on_pass
            )
        tokens = tokenize(loaded.tokenizer, text.content)[:PROMPT_TOKENS]
        with console.working("Generating"):
            generations = continue_greedily(loaded, backends, torch.cat([tokens, tokens[RECALLED]]), NEW_TOKENS)
        console.print_section(section)
        console.print_generations(generations)

        report = make_report(loaded, [section], command=console.command_line(), seed=0, generations=generations)
        write_report(report, out / "results.json")
        title = f"Demo model, context {section.context:,}"
        plot_quality(section, title, out / "quality.png")
        plot_positions(section, title, out / "positions.png")
        plots = [
            Plot("Quality of each backend", "quality.png"),
            Plot("Loss and divergence by position", "positions.png"),
        ]
        (out / "report.md").write_text(to_markdown(report, plots), encoding="utf-8")
        console.print_line(f"\nWrote results.json, report.md, quality.png and positions.png to {escape(str(out))}/")
    if any(result.failure is not None for result in section.backends):
        raise typer.Exit(console.BACKEND_FAILED)
