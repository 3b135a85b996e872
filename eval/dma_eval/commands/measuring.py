"""What the commands that measure a model's quality do: each makes a suite of its options, and runs it here."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.markup import escape

from dma_eval import console
from dma_eval.errors import UserError, one_line
from dma_eval.files import make_folder
from dma_eval.names import check_names
from dma_eval.parts import Suite

if TYPE_CHECKING:
    from dma_eval.models import LoadedModel
    from dma_eval.processes import Processes
    from dma_eval.results import Report

FAILURES = (UserError, RuntimeError, ValueError, TypeError)
"""What a part that cannot be measured raises: input that does not fit it, or an error of a model or a library."""


def measure(
    args: argparse.Namespace,
    suite: Suite,
    *,
    goes_on: bool = False,
    also: Callable[[Report], None] = lambda report: None,
) -> int:
    """Measure what a suite asks for; show it, write it, and return the exit code.

    Args:
        args: The options of the model, the backends, the text, the tasks and the output.
        suite: What to measure.
        goes_on: Whether a part that fails is reported and the others go on, and what does not fit the model is skipped.
        also: Called with the report at the end, in one process.

    Raises:
        UserError: The input cannot work.
    """
    check_names(args.attn)
    with console.starting():
        from dma_eval.backends import default_names, parse_backends

        backends = parse_backends(args.attn or default_names())  # before all that takes longer to import
        from dma_eval.files import Store
        from dma_eval.processes import leave_processes
        from dma_eval.results import write_report
        from dma_eval.run import Run
        from dma_eval.run_folder import RESULTS, make_report, write_run
        from dma_eval.session import Session

    processes = join(args)
    if args.out is not None and processes.is_main:
        make_folder(args.out)
    began = time.perf_counter()
    given = {name: getattr(args, name) for name in ("data", "split", "column", "include_path") if hasattr(args, name)}
    run = Run(suite, **given)
    loaded = load(args, processes)
    session = Session(loaded, backends, processes, Store(args.out), seed=args.seed)
    seconds = {"preparation": time.perf_counter() - began}
    failed = False
    for name, part in run.parts(session, skips=goes_on):
        try:
            seconds[name] = part()
            console.print_line(f"[bold]{escape(name)}: {seconds[name]:,.1f} s[/]\n")
        except FAILURES as error:
            if not goes_on or processes.count > 1:  # the others wait for this one
                raise
            if args.debug:
                console.err.print_exception()
            console.print_error(f"{name} failed: {one_line(error)}")
            failed = True
        facts = {"command": console.command_line(), "seed": args.seed, "part_seconds": seconds}
        report = make_report(loaded, **facts, **run.sections)
        if processes.is_main and args.out is not None:
            write_report(report, args.out / RESULTS)
        if run.is_interrupted:
            console.print_error(f"interrupted; {'the same command' if args.out else '--out FOLDER'} would go on here")
            break
    if processes.is_main:
        also(report)
        if args.out is not None:
            console.print_wrote(*write_run(report, args.out), folder=args.out)
    leave_processes()
    if run.is_interrupted:
        return console.INTERRUPTED
    return console.FAILED if failed or run.has_failures else 0


def join(args: argparse.Namespace) -> Processes:
    """Seed PyTorch, and join the processes of the run; all but the first are silent from here on."""
    import torch

    from dma_eval.processes import join_processes

    torch.manual_seed(args.seed)
    processes = join_processes(args.device)
    if not processes.is_main:
        console.quiet()
    return processes


def load(args: argparse.Namespace, processes: Processes) -> LoadedModel:
    """Load the model as the options say, on this process's device.

    Raises:
        UserError: It cannot be loaded, or several processes would each spread it over all devices.
    """
    from dma_eval.models import load_model

    if processes.count > 1 and args.device_map is not None:
        raise UserError(
            f"--device-map: each of {processes.count} processes would spread the model over all devices; start one"
        )
    device = args.device if processes.device is None or args.device != "auto" else str(processes.device)
    options = {name: getattr(args, name) for name in ("dtype", "device_map", "revision", "trust_remote_code", "yarn")}
    with console.working(f"Loading {args.model}"):
        return load_model(args.model, device=device, **options)
