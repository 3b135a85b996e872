"""Make a model with random weights, on which speed does not depend, for a server that needs a folder.

    python scripts/make_random_model.py --shape llama-3.1-8b --out llama-3.1-8b
    dma-hf serve llama-3.1-8b --attn dma_mxfp:balanced+int8 --continuous-batching --replicas 2

Each token of its tokenizer is a word, so that a prompt has as many words as tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from dma_eval.bench.generate import SHAPES, build_model
from dma_eval.load.models import parse_device
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words ``w0``, ``w1`` and so on."""
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def main(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "llama-3.1-8b",
    device: Annotated[str, typer.Option(help="Where the weights are made: auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Write the model, in bf16, and its tokenizer."""
    model = build_model(shape, parse_device(device), torch.bfloat16)
    model.save_pretrained(out)
    word_tokenizer(model.config.vocab_size).save_pretrained(out)


if __name__ == "__main__":
    typer.run(main)
