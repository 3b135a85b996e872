"""The command line that the scripts share."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dma_eval import console
from dma_eval.errors import UserError
from dma_eval.files import check_file
from dma_eval.load.backends import Backend, parse_backends
from dma_eval.names import DMA, PRESETS, refuse_repeats

DTYPES = ("bfloat16", "float16")


def make_parser(description: str, seconds: float) -> argparse.ArgumentParser:
    """Return a parser with the options of every script."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results, after every shape")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default=DTYPES[0], choices=DTYPES, help="data type of what is not quantized")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--seconds", type=duration, default=seconds, help="about how long one shape is measured")
    return parser


def count(text: str) -> int:
    """Parse the value of an option that is at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def duration(text: str) -> float:
    """Parse seconds: a finite number that is not negative."""
    if not 0 <= float(text) < math.inf:  # a text that is no number is an error of argparse
        raise argparse.ArgumentTypeError(f"expected a finite number of at least 0, got {text!r}")
    return float(text)


def seed(text: str) -> int:
    """Parse a seed: an integer that ``torch.manual_seed`` takes."""
    if not -(2**63) <= int(text) < 2**64:  # a text that is no integer is an error of argparse
        raise argparse.ArgumentTypeError(f"expected an integer of at most 64 bits, got {text!r}")
    return int(text)


def run(main: Callable[[argparse.Namespace], int], parser: argparse.ArgumentParser) -> None:
    """Run a script with the arguments of the process, and exit with its code."""
    args = parser.parse_args()
    try:
        check_file(args.json, "--json")
        sys.exit(main(args))
    except UserError as error:
        console.print_error(str(error))
        sys.exit(console.USER_ERROR)
    except KeyboardInterrupt:
        console.print_error("interrupted")
        sys.exit(console.INTERRUPTED)


def parse_compared(names: Sequence[str], option: str, peers: Sequence[str], *, caches: bool) -> list[Backend]:
    """Resolve the names that a script compares: peers, and configurations of ``dma_mxfp`` with or without a cache.

    Raises:
        UserError: One is unknown or given twice, or is of the other kind; the message lists the valid ones.
    """
    found: list[Backend] = []
    for name in names:
        if name not in peers and re.split("[:+]", name)[0] != DMA:
            known = [*peers, *(f"{DMA}:{preset}" for preset in PRESETS), f"{DMA}:FILE.toml"]
            raise UserError(f"{option}: unknown name {name!r}; valid: {', '.join(known)}")
        found += [Backend(name, name)] if name in peers else parse_backends([name], option)
        if found[-1].config is not None and found[-1].reads_cache != caches:
            what = "has no cache; add +int8 or +int4" if caches else "reads through a cache; leave out +CACHE"
            raise UserError(f"{option}: {name!r} {what}")
    refuse_repeats(option, [backend.label for backend in found])
    return found


def parse_heads(value: str, option: str) -> tuple[int, int]:
    """Return query and kv heads of ``QUERY/KV``, or raise a ``UserError``."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", value)
    if found is None or int(found[1]) % int(found[2]):
        raise UserError(f"{option}: expected QUERY/KV with KV dividing QUERY, such as 32/8, got {value!r}")
    return int(found[1]), int(found[2])
