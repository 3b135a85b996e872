"""``dma-hf equalize``: balance key channels against query channels in the weights of a model, and save it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from dma_eval import config, console
from dma_eval.config import REQUIRED, option
from dma_eval.errors import UserError, one_line
from dma_eval.files import check_folder
from dma_eval.load.hub import check_inputs


@dataclass(frozen=True, kw_only=True)
class EqualizeOptions(config.ModelOptions, config.TextOptions):
    tokens: int = option(4096, min=1024, help="Read at most this many tokens of the text.")
    out: Path = config.out_option(REQUIRED, "-o", help="Folder for the model. It loads in plain Transformers.")


def equalize(args: EqualizeOptions) -> int:
    """Balance each key channel against its query channel, without changing the model's function, and save it.

    Each pair of channels that the rotary embedding rotates together gets a power of two, which is folded into the
    weights. The logits stay bit-identical. Outlier key channels shrink, and query channels can grow. The command shows
    both. It helps low-bit attention if the model's keys have large outliers, which `dma-hf stress` shows; otherwise it
    may change nothing. Exit code 2 for a model that cannot be equalized; then nothing is written.

    Examples:
    dma-hf equalize -m Qwen/Qwen2.5-0.5B --data Salesforce/wikitext:wikitext-2-raw-v1:train --out qwen-equalized
    dma-hf equalize -m google/gemma-3-1b-it --dtype float32 --data book.txt --out gemma-equalized
    """
    if (args.out / "config.json").exists():
        raise UserError(f"--out: {args.out} holds a model already; name another folder")
    check_folder(args.out)
    check_inputs(args.model, args.data)
    with console.starting():
        from dma_eval.equalization import equalize as balance
        from dma_eval.equalization.balance import MIN_TOKENS, WINDOW
        from dma_eval.load.data import load_text
        from dma_eval.measures.stress import channel_ranges
        from dma_eval.session import load
    text = load_text(args.data, column=args.column)
    loaded = load(args)
    tokens = loaded.tokenize(text.content)
    ids = tokens.ids[: args.tokens]
    if len(ids) < MIN_TOKENS:
        raise UserError(f"--data: the text has {len(ids):,} tokens, too few to equalize; at least {MIN_TOKENS:,}")
    if tokens.begins_with:  # so must every window
        length = min(WINDOW, loaded.max_context or WINDOW)
        count = len(ids) // length
        if count * length < MIN_TOKENS:
            raise UserError(
                f"--data: {len(ids):,} tokens fill {count:,} windows of {length:,}, too few to equalize; at least "
                f"{-(-MIN_TOKENS // length):,}: give a longer text, or larger --tokens"
            )
        ids = tokens.windows(count, length)
    with console.working("Equalizing"):
        try:
            before = channel_ranges(loaded.model, ids)
            balance(loaded.model, ids)
        except (ValueError, TypeError) as error:
            raise UserError(f"--model: {one_line(error)}") from error
        after = channel_ranges(loaded.model, ids)
    for index, of in enumerate(("key", "query")):
        first, then = (max(each.ratio for each in ranges[index]) for ranges in (before, after))
        console.print_line(f"Largest {of} channel over the median one: {first:,.1f} before, {then:,.1f} after")
    console.print_line(f"Ranges are measured over {ids.numel():,} tokens of the text")
    if getattr(loaded.model, "hf_quantizer", None) is not None:  # of a GGUF file, whose weights are dequantized now
        del loaded.model.hf_quantizer
        del loaded.model.config.quantization_config
    _save(loaded.model, loaded.tokenizer, args.out)
    console.print_wrote("the model", folder=args.out)
    return 0


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer into a folder: all of their files, or none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as unfinished:
            for each in (model, tokenizer):
                each.save_pretrained(unfinished)
            for path in Path(unfinished).iterdir():
                path.replace(folder / path.name)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"--out: cannot write to {folder}: {reason}") from error
