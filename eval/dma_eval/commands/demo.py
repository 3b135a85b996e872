"""``dma-hf demo``: the whole comparison on a small model and a text that come with the package."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from dma_eval import console
from dma_eval.commands import options
from dma_eval.errors import UserError
from dma_eval.files import make_folder
from dma_eval.parts import PerplexityPart

PART = PerplexityPart(contexts=[4096], max_windows=2)
PROMPT_TOKENS, NEW_TOKENS = 1500, 48
# The prompt ends by repeating this passage, so the model can continue by recalling keys from hundreds of tokens back,
# in low-bit tiles.
RECALLED = slice(600, 632)


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The output folder."""

    out: Path = options.out_option(Path("dma-demo"), "Folder for the report.")


def demo(args: DemoOptions) -> int:
    """Compare SDPA with every preset on a small model that comes with the package, in a minute or two on a CPU.

    Measures perplexity and divergence on a held-out text. Then every backend continues a prompt that ends with an
    earlier passage, so it can recall the continuation. Needs no network. Writes results.json, pages, plots and
    configurations to the folder.

    Examples:
    dma-hf demo
    dma-hf demo --out /tmp/report
    """
    make_folder(args.out)
    with console.starting():
        import torch

        from dma_eval.backends import default_names, parse_backends
        from dma_eval.data import load_text, tokenize
        from dma_eval.models import load_model
        from dma_eval.pages import perplexity_page
        from dma_eval.perplexity import measure_perplexity
        from dma_eval.reading import continue_greedily
        from dma_eval.render import write_run
        from dma_eval.results import Report, here_and_now
        from dma_eval.session import Session

    torch.manual_seed(0)
    backends = parse_backends(default_names())
    assets = resources.files("dma_eval") / "assets"
    with resources.as_file(assets / "demo_model") as folder, resources.as_file(assets / "heldout.txt") as file:
        if not folder.is_dir() or not file.is_file():
            raise UserError("this installation lacks the demo model; install the dma-hf package again")
        loaded = load_model(str(folder), dtype="float32", title="demo model")
        text = replace(load_text(str(file)), name="heldout.txt (in the package)")
    tokens = tokenize(loaded.tokenizer, text.content)[:PROMPT_TOKENS]
    session = Session(loaded, backends)
    with session.progress.shown():
        section = measure_perplexity(session, text, PART, PART.contexts[0])
        generations = continue_greedily(session, torch.cat([tokens, tokens[RECALLED]]), NEW_TOKENS)
    console.print_page(perplexity_page(section))
    console.print_generations(generations)
    facts = here_and_now() | {"seed": 0, "model": loaded.info}
    files = write_run(Report(**facts, perplexity=[section], generations=generations), args.out)
    console.print_line("")
    console.print_wrote(*files, folder=args.out)
    return console.FAILED if any(result.failure is not None for result in section.backends) else 0
