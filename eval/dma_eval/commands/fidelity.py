"""``dma-hf fidelity``: how far attention backends are from SDPA in fp32."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from dma_eval import console, options
from dma_eval.commands.shared import join, leave, load

DEFAULT_ATTN = ["sdpa", "dma_mxfp:balanced"]
PARTS_PANEL = "Parts"
EPILOG = """
[bold]Examples[/]

dma-hf fidelity -m HuggingFaceTB/SmolLM2-135M --data book.txt --context 4096 --max-windows 8 --out run

dma-hf fidelity -m ./model --data book.txt --attn sdpa dma_mxfp:fp4 --dtype bfloat16 --head-windows 4
"""


def fidelity(
    model: options.Model,
    data: options.Data,
    attn: options.Attn = DEFAULT_ATTN,
    split: options.Split = None,
    column: options.Column = "text",
    context: options.Context = None,
    max_windows: options.MaxWindows = None,
    batch_size: options.WindowBatchSize = 1,
    head_windows: Annotated[
        int,
        typer.Option(min=0, help="Windows for the errors by head; 0: leave them out.", rich_help_panel=PARTS_PANEL),
    ] = 2,
    prompts: Annotated[
        int,
        typer.Option(min=0, help="Greedy continuations to compare; 0: leave them out.", rich_help_panel=PARTS_PANEL),
    ] = 4,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.", rich_help_panel=PARTS_PANEL)] = 64,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = 0,
    out: options.Out = None,
    debug: options.Debug = False,
) -> None:
    """Find where attention backends leave SDPA in fp32: tokens, positions, heads, and greedy continuations.

    The reference has the same weights in fp32, whatever --dtype the backends run in; put sdpa among them to see what
    that dtype costs by itself. Heads are measured one by one, each layer given SDPA's own inputs, which is how a bad
    one is found. Exit code 1 if a backend failed, 2 for invalid input.
    """
    with console.user_errors(debug):
        with console.starting():
            from dma_eval.backends import parse_backends
            from dma_eval.data import load_text
            from dma_eval.fidelity import compare_with_fp32
            from dma_eval.report import make_report
            from dma_eval.run_folder import make_folder, write_run
            from dma_eval.section_pages import fidelity_page

        processes = join(device, seed)
        if out is not None and processes.is_main:
            make_folder(out)
        backends = parse_backends(attn)
        with console.working(f"Reading {data}"):
            text = load_text(data, split=split, column=column)
        loaded = load(model, processes, dtype, device, device_map, revision, trust_remote_code)
        with console.measuring() as (on_start, on_pass):
            section = compare_with_fp32(
                loaded,
                text,
                backends,
                context=context,
                max_windows=max_windows,
                batch_size=batch_size,
                head_windows=head_windows,
                prompts=prompts,
                new_tokens=new_tokens,
                processes=processes,
                on_start=on_start,
                on_pass=on_pass,
            )
        console.print_page(fidelity_page(section))
        if out is not None and processes.is_main:
            report = make_report(loaded, command=console.command_line(), seed=seed, fidelity=[section])
            console.print_line(f"\nWrote {escape(', '.join(write_run(report, out)))} to {escape(str(out))}/")
        leave()
    if any(result.failure is not None for result in section.tokens.backends):
        raise typer.Exit(console.BACKEND_FAILED)
