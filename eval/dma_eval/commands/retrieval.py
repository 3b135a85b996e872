"""``dma-hf retrieval``: needles and key-value pairs in long prompts, under several attention backends."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from dma_eval import console, options
from dma_eval.commands.shared import join, leave, load

DEFAULT_ATTN = ["sdpa", "dma_mxfp:balanced"]
PROMPT_PANEL = "Prompts"
EPILOG = """
[bold]Examples[/]

dma-hf retrieval -m meta-llama/Llama-3.2-1B --data book.txt --lengths 4096 16384 65536 --out run

dma-hf retrieval -m ./model --kind kv --attn sdpa dma_mxfp:balanced dma_mxfp:fp4 --samples 20
"""


def retrieval(
    model: options.Model,
    attn: options.Attn = DEFAULT_ATTN,
    kind: Annotated[
        list[str],
        typer.Option(
            metavar="KIND...",
            help="needle: a sentence in the prose of --data. kv: one pair among pairs of keys and values.",
            rich_help_panel=PROMPT_PANEL,
        ),
    ] = ["kv"],  # noqa: B006 (Typer copies it)
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            metavar="FILE|DATASET",
            help="The prose for needles, as for dma-hf ppl.",
            show_default="none",
            rich_help_panel=PROMPT_PANEL,
        ),
    ] = None,
    split: options.Split = None,
    column: options.Column = "text",
    lengths: Annotated[
        list[int],
        typer.Option(
            metavar="TOKENS...",
            min=1,
            help="Lengths of the prompts.",
            show_default="1024 and its doubles, four at most, up to the model's maximum",
            rich_help_panel=PROMPT_PANEL,
        ),
    ] = [],  # noqa: B006
    depths: Annotated[
        list[float],
        typer.Option(metavar="DEPTH...", help="Places of the answer, 0 to 1.", rich_help_panel=PROMPT_PANEL),
    ] = [0.0, 0.25, 0.5, 0.75, 1.0],  # noqa: B006
    samples: Annotated[
        int, typer.Option(min=1, help="Questions for each length and depth.", rich_help_panel=PROMPT_PANEL)
    ] = 5,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = 0,
    out: options.Out = None,
    debug: options.Debug = False,
) -> None:
    """Ask for one passage of a long prompt, at growing lengths and depths.

    Every backend is asked the same questions. Exit code 1 if a backend failed, 2 for invalid input.
    """
    with console.user_errors(debug):
        with console.starting():
            from dma_eval.backends import parse_backends
            from dma_eval.data import load_text
            from dma_eval.report import make_report
            from dma_eval.retrieval import measure_retrieval
            from dma_eval.run_folder import make_folder, write_run
            from dma_eval.section_pages import retrieval_page

        processes = join(device, seed)
        if out is not None and processes.is_main:
            make_folder(out)
        backends = parse_backends(attn)
        text = None
        if data is not None:
            with console.working(f"Reading {data}"):
                text = load_text(data, split=split, column=column)
        loaded = load(model, processes, dtype, device, device_map, revision, trust_remote_code)
        sections = []
        for each in dict.fromkeys(kind):
            with console.measuring() as (on_start, on_pass):
                section = measure_retrieval(
                    loaded,
                    backends,
                    each,
                    text=text,
                    lengths=lengths,
                    depths=depths,
                    samples=samples,
                    seed=seed,
                    processes=processes,
                    on_start=on_start,
                    on_pass=on_pass,
                )
            sections.append(section)
            console.print_page(retrieval_page(section))
        if out is not None and processes.is_main:
            report = make_report(loaded, command=console.command_line(), seed=seed, retrieval=sections)
            console.print_line(f"\nWrote {escape(', '.join(write_run(report, out)))} to {escape(str(out))}/")
        leave()
    if any(backend.failure is not None for section in sections for backend in section.backends):
        raise typer.Exit(console.BACKEND_FAILED)
