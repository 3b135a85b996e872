"""``dma-hf report`` and ``dma-hf card``: pages made from the results of a run, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dma_eval import config, console
from dma_eval.config import argument, option
from dma_eval.errors import UserError
from dma_eval.files import check_file, check_folder, write_text


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    run: Path = argument(metavar="RUN", help="Folder of a run, or its results.json.")
    out: Path | None = config.out_option(None, "-o", help="Folder for the report.", shown="that of the run")


@dataclass(frozen=True, kw_only=True)
class CardOptions:
    run: Path = argument(metavar="RUN", help="Folder of a run, or its results.json.")
    backend: str | None = option(None, shown="the first dma_mxfp backend", help="The backend that the card is for.")
    base_model: str | None = option(
        None, metavar="OWNER/NAME", shown="the name it was loaded by", help="The model on the Hub."
    )
    license_name: str | None = option(None, "--license", help="The licence, as the Hub spells it.")
    out: Path | None = config.out_option(
        None, "-o", help="File for the card.", metavar="FILE", shown="shown on the screen"
    )


def report(args: ReportOptions) -> int:
    """Rewrite the pages, the plots and the configurations of a run from its results.

    Results that are there are never overwritten. A folder with the results of another run is refused.

    Examples:
    dma-hf report run
    dma-hf report run/results.json --out page
    """
    from dma_eval.results import RESULTS, read_report
    from dma_eval.show.render import write_run

    source = args.run / RESULTS if args.run.is_dir() else args.run
    run, folder = read_report(source), args.out or source.parent
    results, copied = folder / RESULTS, []
    if results.exists() and results.read_bytes() != source.read_bytes():
        raise UserError(f"--out: {folder} holds the results of another run ({RESULTS}); name another folder")
    if args.out is not None and not results.exists():  # a copy, which makes the folder complete
        check_folder(folder)
        write_text(source.read_text(encoding="utf-8"), results)
        copied = [RESULTS]
    console.print_wrote(*copied, *write_run(run, folder), folder=folder)
    return 0


def card(args: CardOptions) -> int:
    """Make a Hub model card from a run: metadata, results as a model index, use, settings, limits.

    To upload it, use the Hub's own command: `hf upload OWNER/NAME README.md`.

    Examples:
    dma-hf card run --base-model HuggingFaceTB/SmolLM2-135M --license apache-2.0 --out README.md
    dma-hf card run/results.json --base-model HuggingFaceTB/SmolLM2-135M --backend dma_mxfp:fp4
    """
    check_file(args.out, "--out")
    if args.license_name is not None and not args.license_name.strip():
        raise UserError(f"--license: expected a licence, such as apache-2.0, got {args.license_name!r}")
    from dma_eval.results import read_report
    from dma_eval.show.card import make_card

    card = make_card(
        read_report(args.run), backend=args.backend, base_model=args.base_model, license_name=args.license_name
    )
    if args.out is None:
        console.out.file.write(str(card))  # unformatted, to be piped into a file
    else:
        write_text(str(card), args.out)
        console.print_wrote(args.out)
    return 0
