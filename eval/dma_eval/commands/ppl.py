"""``dma-hf ppl``: perplexity and fidelity of attention backends on the same tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dma_eval import console, options
from dma_eval.commands.shared import join, leave, load
from dma_eval.errors import UserError

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
DEFAULT_ATTN = ["sdpa", "dma_mxfp:balanced"]
EPILOG = """
[bold]Examples[/]

dma-hf ppl -m HuggingFaceTB/SmolLM2-135M --data Salesforce/wikitext:wikitext-2-raw-v1:test --context 2048

dma-hf ppl -m model.gguf --data book.txt --attn sdpa dma_mxfp:balanced dma_mxfp:paper --json r.json --plot r.png

dma-hf ppl -m ./model --data rows.jsonl --column content --attn sdpa dma_mxfp:my.toml --context 8192 --stride 4096
"""


def ppl(
    model: options.Model,
    data: options.Data,
    attn: options.Attn = DEFAULT_ATTN,
    split: options.Split = None,
    column: options.Column = "text",
    context: options.Context = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Distance of two windows. If less than the context, windows overlap and each scores its new tokens.",
            show_default="the context",
            rich_help_panel=options.WINDOW_PANEL,
        ),
    ] = None,
    max_windows: options.MaxWindows = None,
    batch_size: options.WindowBatchSize = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = 0,
    json: options.Json = None,
    markdown: options.Markdown = None,
    plot: options.Plot = None,
    debug: options.Debug = False,
) -> None:
    """Compare attention backends: perplexity, divergence from the first one, speed and memory.

    Every backend reads the same tokens with the same weights. Started by accelerate launch, the processes split the
    windows. Exit code 1 if a backend failed, 2 for invalid input.
    """
    with console.user_errors(debug):
        check_plot(plot)
        for path in (json, markdown, plot):
            prepare_output(path)
        with console.starting():
            from dma_eval.backends import parse_backends
            from dma_eval.comparison import compare
            from dma_eval.data import load_text
            from dma_eval.markdown import Plot, to_markdown
            from dma_eval.report import make_report
            from dma_eval.results import write_report

        processes = join(device, seed)
        backends = parse_backends(attn)
        with console.working(f"Reading {data}"):
            text = load_text(data, split=split, column=column)
        loaded = load(model, processes, dtype, device, device_map, revision, trust_remote_code)
        with console.measuring() as (on_start, on_pass):
            section = compare(
                loaded,
                text,
                backends,
                context=context,
                stride=stride,
                max_windows=max_windows,
                batch_size=batch_size,
                processes=processes,
                on_start=on_start,
                on_pass=on_pass,
            )
        console.print_section(section)
        report = make_report(loaded, [section], command=console.command_line(), seed=seed)
        if json is not None and processes.is_main:
            write_report(report, json)
        if plot is not None and processes.is_main:
            from dma_eval.plots import plot_comparison

            plot_comparison(section, f"{Path(model).name}, context {section.context:,}", plot)
        if markdown is not None and processes.is_main:
            plots = [] if plot is None else [Plot("Comparison of the backends", relative(plot, markdown))]
            markdown.write_text(to_markdown(report, plots), encoding="utf-8")
        for path in (json, markdown, plot):
            if path is not None:
                console.print_line(f"Wrote {escape(str(path))}")
        leave()
    if any(result.failure is not None for result in section.backends):
        raise typer.Exit(console.BACKEND_FAILED)


def check_plot(path: Path | None) -> None:
    """Refuse a plot in a format that there is not; what else can be wrong, :func:`prepare_output` says.

    Raises:
        UserError: ``path`` ends in something else.
    """
    if path is not None and not path.is_dir() and path.suffix not in PLOT_SUFFIXES:
        raise UserError(f"--plot: expected a file ending in {', '.join(PLOT_SUFFIXES)}, got {path}")


def prepare_output(path: Path | None) -> None:
    """Make sure before a long run that its results can be written; folders are made as needed.

    Raises:
        UserError: ``path`` is a folder, or cannot be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"cannot write to {path}: it is a folder; name a file in it")
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from error
    if not existed:
        path.unlink(missing_ok=True)  # another process of the run may have done so


def relative(path: Path, page: Path) -> str:
    """``path`` as a link from the file ``page``."""
    return Path(os.path.relpath(path, page.parent)).as_posix()
