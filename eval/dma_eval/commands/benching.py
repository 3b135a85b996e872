"""What the commands of ``dma-hf bench`` share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dma_eval import console
from dma_eval.commands import options
from dma_eval.errors import UserError

if TYPE_CHECKING:
    import torch

    from dma_eval.bench.results import SpeedResult
    from dma_eval.bench.timing import DeviceFacts
    from dma_eval.pages import Table

Result = TypeVar("Result", bound="SpeedResult")
positive = options.number(1)


def add_bench(
    parser: argparse.ArgumentParser,
    *,
    files: Sequence[str],
    seconds: float | None = None,
    dtypes: Sequence[str] = ("bfloat16", "float16"),
) -> None:
    """Add the options that every benchmark has."""
    options.add(parser, "--dtype", choices=dtypes, default=dtypes[0], help=f"{', '.join(dtypes)}.")
    options.add_device(parser)
    if seconds is not None:
        help = "About how long one shape is measured, compiling not counted."
        options.add(parser, "--seconds", type=options.number(0, kind=float), default=seconds, help=help)
    options.add_seed(parser)
    options.add_files(parser.add_argument_group("output"), *files)


def look(args: argparse.Namespace) -> tuple[torch.device, torch.dtype, DeviceFacts]:
    """Seed PyTorch, and return the device, the data type, and what is known and measured of the device."""
    import torch

    from dma_eval.bench.timing import look_at
    from dma_eval.models import parse_device

    device = parse_device(args.device)
    torch.manual_seed(args.seed)
    with console.working("Looking at the device"):
        return device, getattr(torch, args.dtype), look_at(device)


def finish(
    args: argparse.Namespace,
    tables: Sequence[Table],
    failures: Sequence[str],
    results: Sequence[Result],
    place: Callable[[Result], Any],
) -> int:
    """Show tables, what did not run and which files were written; return 1 if nothing ran at some place, else 0."""
    for table in tables:
        console.print_table(table)
    for line in failures:
        console.print_warning(line)
    for path in (args.json, getattr(args, "plot", None)):
        if path is not None:
            console.print_wrote(path)
    ran = {place(result) for result in results if result.failure is None}
    return 0 if all(place(result) in ran for result in results) else console.FAILED


def heads_of(value: str) -> tuple[int, int]:
    """Return the query and kv heads of a value of ``--heads``.

    Raises:
        UserError: It is none.
    """
    query, _, kv = value.partition("/")
    if not (query.isdecimal() and kv.isdecimal() and int(kv) > 0 and int(query) > 0 and int(query) % int(kv) == 0):
        raise UserError(f"--heads: expected QUERY/KV with KV dividing QUERY, such as 32/8, got {value!r}")
    return int(query), int(kv)
