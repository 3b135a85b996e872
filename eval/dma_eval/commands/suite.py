"""``dma-hf suite``: everything that a suite asks for, in one run and one folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dma_eval import console, options

EPILOG = """
[bold]Examples[/]

dma-hf suite --suite quick -m HuggingFaceTB/SmolLM2-135M --out run

dma-hf suite --suite my.toml -m ./model --data book.txt --include-path ./tasks --out run
"""


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

    Results in --out are written after each part, and tasks that are finished there are not evaluated again.
    Exit code 1 if a backend failed, 2 for invalid input.
    """
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[part] = time.perf_counter() - began
        console.print_line(f"[bold]{escape(part)}: {seconds[part]:,.1f} s[/]\n")

    with console.user_errors(debug):
        with console.starting():
            import torch

            from dma_eval.backends import default_names, parse_backends
            from dma_eval.models import load_model
            from dma_eval.report import make_report
            from dma_eval.results import write_report
            from dma_eval.run_folder import RESULTS, make_folder, write_run
            from dma_eval.suite_files import load_suite
            from dma_eval.suite_run import SuiteRun

        torch.manual_seed(seed)
        make_folder(out)
        backends = parse_backends(attn or default_names())
        chosen = load_suite(suite)
        with timed("preparation"):
            run = SuiteRun(
                chosen, backends, data=data, include_paths=include_path, limit=limit, max_windows=max_windows
            )
            with console.working(f"Loading {model}"):
                loaded = load_model(
                    model,
                    dtype=dtype,
                    device=device,
                    device_map=device_map,
                    revision=revision,
                    trust_remote_code=trust_remote_code,
                )
        for part, measure in run.parts(loaded, out, batch_size=batch_size, seed=seed):
            with timed(part):
                measure()
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
        files = write_run(report, out)
        console.print_line(f"Wrote {escape(', '.join(files))} to {escape(str(out))}/")
    if run.has_failures:
        raise typer.Exit(console.BACKEND_FAILED)
