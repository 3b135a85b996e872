"""``dma-hf demo``: the whole comparison on a small model and a text that come with the package."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from dma_eval import config, console
from dma_eval.config import PerplexityPart, Suite
from dma_eval.files import check_folder

PART = PerplexityPart(contexts=[4096], max_windows=2)
PROMPT_TOKENS, NEW_TOKENS = 1500, 48
# The prompt ends by repeating this passage, so the model can continue by recalling keys from hundreds of tokens back,
# in low-bit tiles.
RECALLED = slice(600, 632)


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    out: Path = config.out_option(Path("dma-demo"), "-o", help="Folder for the report.")


def demo(args: DemoOptions) -> int:
    """Compare SDPA with every preset on a small model that comes with the package, in a minute or two on a CPU.

    Measures perplexity and divergence on a held-out text. Then every backend continues a prompt that ends with an
    earlier passage, so it can recall the continuation. Needs no network. Writes results.json, pages, plots and
    configurations to the folder.

    Examples:
    dma-hf demo
    dma-hf demo --out /tmp/report
    """
    check_folder(args.out)
    with console.starting():
        import torch

        from dma_eval.load.backends import default_names, parse_backends
        from dma_eval.load.data import load_text, tokenize
        from dma_eval.measures.fidelity import continue_greedily
        from dma_eval.results import Report
        from dma_eval.run import Run

    assets = resources.files("dma_eval") / "assets"
    with resources.as_file(assets / "demo_model") as folder, resources.as_file(assets / "heldout.txt") as file:
        model = config.QualityOptions(model=str(folder), dtype="float32", out=args.out)
        text = config.TextOptions(data=str(file))
        run = Run(model, parse_backends(default_names()), Suite(name="demo", perplexity=PART), text, ())

        def generate(report: Report) -> None:
            if any(section.windows_left for section in report.perplexity):  # interrupted
                return
            tokens = tokenize(run.session.loaded.tokenizer, load_text(text.data).content)[:PROMPT_TOKENS]
            with run.session.progress.shown():
                prompt = torch.cat([tokens, tokens[RECALLED]])
                report.generations.extend(continue_greedily(run.session, prompt, NEW_TOKENS))
            console.print_generations(report.generations)

        return run.measure(goes_on=False, also=generate)
