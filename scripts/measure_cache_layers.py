"""Measure which layers cause the loss of an ``int4`` cache, and what it is with the worst ones in ``int8``.

    python scripts/measure_cache_layers.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data wiki.test.raw --out FILE

The model reads windows through the cache, 128 tokens at a time, in fp32. KL is the mean over tokens, from SDPA. First
one layer alone is in ``int4``, and the others in ``int8``. Then layers are in ``int8`` from the one with the highest KL
down, and the others in ``int4``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from dma_eval.config import PerplexityPart
from dma_eval.errors import UserError
from dma_eval.files import check_file, write_json
from dma_eval.load.backends import activate, parse_backends
from dma_eval.load.data import load_text
from dma_eval.load.models import load_model
from dma_eval.load.reading import read
from dma_eval.measures.perplexity import cut
from dma_eval.results import here_and_now
from dma_kernels.numerics.formats import TILE
from torch import Tensor
from transformers import PreTrainedModel

import dma_hf
from dma_hf.integrations.internals import CACHE_ARGUMENT

IN_INT8 = (0, 1, 2, 3, 5)
"""Numbers of layers in ``int8``, of which the others are in ``int4``."""


@torch.inference_mode()
def divergence(model: PreTrainedModel, ids: Tensor, expected: Tensor, formats: list[str]) -> float:
    """Return the mean KL of a model that reads ``ids`` ``[B, T]`` through a cache with a format for each layer.

    ``expected`` has the log-probabilities of SDPA, ``[B, T, V]``.
    """
    cache, total = dma_hf.DMACache(model.config, formats), 0.0
    for chunk, wanted in zip(torch.split(ids, TILE, 1), torch.split(expected, TILE, 1), strict=True):
        log_probs = model(chunk, **{CACHE_ARGUMENT: cache}).logits.float().log_softmax(-1)
        total += float((wanted.exp() * (wanted - log_probs)).sum())
    return total / ids.numel()


def main(
    model: Annotated[str, typer.Option(help="Hub name, local folder, or GGUF file.")],
    data: Annotated[str, typer.Option(help="Text file.")],
    out: Annotated[Path, typer.Option(help="JSON file of the results.")],
    context: Annotated[int, typer.Option(help="Tokens of a window.")] = 2048,
    max_windows: Annotated[int, typer.Option(help="Windows, read at the same time.")] = 4,
) -> None:
    """Measure every layer, then the worst ones together."""
    check_file(out, "--out")
    loaded = load_model(model, dtype="float32")
    sdpa, packed = parse_backends(["sdpa", "dma_mxfp:balanced+int4"])
    reading = cut(loaded, load_text(data), PerplexityPart(max_windows=max_windows), context)
    ids = torch.stack([window.of(reading.tokens.ids) for window in reading.windows]).to(loaded.model.device)
    activate(loaded.model, sdpa)
    expected = torch.cat([read(loaded.model, sdpa, row[None]).float().log_softmax(-1) for row in ids])
    activate(loaded.model, packed)
    layers = range(len(dma_hf.DMACache(loaded.model.config, "int8").layers))

    def kl(in_int8: Iterable[int]) -> float:
        formats = ["int8" if layer in in_int8 else "int4" for layer in layers]
        return divergence(loaded.model, ids, expected, formats)

    alone = [kl(set(layers) - {layer}) for layer in layers]
    worst = sorted(layers, key=alone.__getitem__, reverse=True)
    facts = {"model": Path(model).name, "data": Path(data).name, "context": context, "windows": len(ids)}
    results: list[dict[str, Any]] = []
    for in_int8 in (*(sorted(worst[:count]) for count in (*IN_INT8, len(layers))), [0]):
        results.append(facts | {"in_int8": in_int8, "kl": kl(in_int8)})
        typer.echo(f"in int8: {in_int8}, KL {results[-1]['kl']:.3g}")
    results.append(facts | {"kl_of_one_layer_in_int4": alone})
    write_json(here_and_now() | {"results": results}, out)


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        sys.exit(f"Error: {error}")
