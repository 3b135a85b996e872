"""``dma-hf suite``: everything that a suite asks for, in one run and one folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dma_eval import console, options
from dma_eval.commands.shared import join, leave, load
from dma_eval.errors import UserError, one_line

EPILOG = """
[bold]Examples[/]

dma-hf suite --suite quick -m HuggingFaceTB/SmolLM2-135M --out run

accelerate launch -m dma_eval suite --suite standard -m ./model --out run

dma-hf suite --suite my.toml -m ./model --data book.txt --include-path ./tasks --out run
"""

FAILURES = (UserError, RuntimeError, ValueError, TypeError)
"""What a part that cannot be measured raises: input that does not fit it, or an error of a model or a library."""


def suite(
    suite: Annotated[
        str,
        typer.Option(
            "--suite",
            "-s",
            metavar="NAME|FILE.toml",
            help="quick, standard, long-context, local-quality, or a TOML file.",
            show_default=False,
        ),
    ],
    model: options.Model,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Folder for the report and every answer.", rich_help_panel=options.OUTPUT_PANEL
        ),
    ],
    attn: Annotated[
        list[str],
        typer.Option(
            "--attn",
            "-a",
            metavar="BACKEND...",
            help="Attention backends to compare; the first is the reference.",
            show_default="sdpa and every preset",
        ),
    ] = [],  # noqa: B006 (Typer copies it)
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            metavar="FILE|DATASET",
            help="The text, instead of the suite's.",
            show_default="the suite's",
            rich_help_panel=options.TEXT_PANEL,
        ),
    ] = None,
    include_path: options.IncludePath = [],  # noqa: B006
    limit: options.Limit = None,
    max_windows: options.MaxWindows = None,
    batch_size: options.TaskBatchSize = 8,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = 0,
    debug: options.Debug = False,
) -> None:
    """Measure everything that a suite asks for: perplexity, fidelity, tasks, retrieval.

    Results in --out are written after each part, and what is finished there is not measured again. Started by
    accelerate launch, the processes split the work. A part that fails is reported, and the others go on. Exit code 1 if
    a part or a backend failed, 2 for invalid input.
    """
    seconds: dict[str, float] = {}
    failed: list[str] = []

    def finish(part: str, value: float) -> None:
        seconds[part] = value
        console.print_line(f"[bold]{escape(part)}: {value:,.1f} s[/]\n")

    with console.user_errors(debug):
        with console.starting():
            from dma_eval.backends import default_names, parse_backends
            from dma_eval.report import make_report
            from dma_eval.results import write_report
            from dma_eval.run_folder import RESULTS, make_folder, write_run
            from dma_eval.suite_files import load_suite
            from dma_eval.suite_run import SuiteRun

        processes = join(device, seed)
        if processes.is_main:
            make_folder(out)
        backends = parse_backends(attn or default_names())
        chosen = load_suite(suite)
        began = time.perf_counter()
        run = SuiteRun(
            chosen,
            backends,
            data=data,
            include_paths=include_path,
            limit=limit,
            max_windows=max_windows,
            processes=processes,
        )
        loaded = load(model, processes, dtype, device, device_map, revision, trust_remote_code)
        finish("preparation", time.perf_counter() - began)
        for part, measure in run.parts(loaded, out, batch_size=batch_size, seed=seed):
            try:
                finish(part, measure())
            except FAILURES as error:
                if processes.count > 1:  # the others wait for this one
                    raise
                if debug:
                    console.err.print_exception()
                console.print_error(f"{part} failed: {one_line(error)}")
                failed.append(part)
            if processes.is_main:
                report = make_report(
                    loaded,
                    run.perplexity,
                    command=console.command_line(),
                    seed=seed,
                    tasks=run.tasks,
                    fidelity=run.fidelity,
                    retrieval=run.retrieval,
                    part_seconds=seconds,
                )
                write_report(report, out / RESULTS)
        if processes.is_main:
            files = write_run(report, out)
            console.print_line(f"Wrote {escape(', '.join(files))} to {escape(str(out))}/")
        leave()
    if failed or run.has_failures:
        raise typer.Exit(console.BACKEND_FAILED)
