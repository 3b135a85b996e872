"""Difference of each backend from SDPA in fp32: by token, position and head, and in generated text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dma_hf
from dma_eval.config import FidelityPart, PerplexityPart
from dma_eval.errors import UserError, one_line
from dma_eval.load.backends import Backend, activate, compared_with, in_chunks, needs_chunks
from dma_eval.load.data import Text, Window
from dma_eval.load.reading import continued, probed
from dma_eval.results import Divergence, FidelitySection, HeadErrors
from dma_eval.session import Session
from dma_hf.config import NAME as DMA
from dma_hf.stats import counted_tiles

from .perplexity import compare, cut

REFERENCE = Backend("sdpa, fp32", "sdpa")
HORIZONS = (64, 256, 1024)
"""Numbers of generated tokens for which the share of equal tokens is reported, because errors accumulate."""
Array = NDArray[np.float64]


def measure_fidelity(session: Session, text: Text, part: FidelityPart) -> FidelitySection:
    """Compare every backend, in the model's dtype, with SDPA on a copy of the model in fp32."""
    loaded = session.loaded
    how = PerplexityPart(max_windows=part.max_windows, batch_size=part.batch_size)
    reading = cut(loaded, text, how, part.context)
    windows, context = reading.windows, reading.context
    prompt_tokens = context // 2
    if part.prompts:
        loaded.check_positions(prompt_tokens + part.new_tokens, "half of --context with --new-tokens")
    reference_model = cache(lambda: in_fp32(loaded.model))  # needed unless every piece is saved
    chunked = [in_chunks(REFERENCE)] if needs_chunks(loaded.model, session.backends) else []
    runs = [REFERENCE, *chunked, *(compared_with(chunked[0], session.backends) if chunked else session.backends)]
    in_full: dict[str, Any] = {"reference_model": reference_model, "references": 1 + len(chunked)}
    tokens = compare(session, reading, runs, place=("fidelity", "tokens"), **in_full)
    results = tokens.backends[1 + len(chunked) :]
    working = [run for run, result in zip(session.backends, results, strict=True) if not result.failure]
    full = [window for window in windows if window.length == context]
    measured = full[: part.head_windows] if working else []
    room = prompt_tokens - len(reading.tokens.begins_with)
    halves = [
        replace(window, begin=window.begin + skipped, end=window.begin + skipped + room)
        for skipped in (0, room)
        for window in full
    ]
    prompts = halves[: part.prompts] if working else []  # second halves if there are few windows

    def piece(name: str, kind: Any, make: Callable[..., Any], chosen: Sequence[Window], **settings: Any) -> Any:
        """Measure something over some windows, or take it from the run's folder."""

        def made() -> Any:
            tokens = [each.of(reading.tokens.ids) for each in chosen]
            return make(session, reference_model(), tokens, working, **settings)

        if not chosen:
            return []
        read = [[each.begin, each.end, each.prefix] for each in chosen]
        place = "fidelity", name
        found, _ = session.piece(kind, made, *place, backends=working, text=text.sha256, windows=read, **settings)
        return found

    heads = piece("heads", list[HeadErrors], head_errors, measured)
    divergence = piece("divergence", list[Divergence], _divergence, prompts, new_tokens=part.new_tokens)
    return FidelitySection(
        tokens=tokens,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        head_windows=len(measured),
        heads=heads,
        prompt_tokens=prompt_tokens,
        new_tokens=part.new_tokens,
        divergence=divergence,
    )


def in_fp32(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model itself if its weights are fp32, else a copy with the same weights in fp32."""
    if model.dtype == torch.float32:
        return model
    for name, weight in model.named_parameters():
        if not (weight.is_floating_point() and type(weight) is nn.Parameter and type(weight.data) is Tensor):
            raise UserError(f"the reference needs unpacked weights, and those of {name} are packed")
    try:
        # model.float() refuses every model from a quantized file, even if its weights have been dequantized.
        converted: PreTrainedModel = nn.Module.float(copy.deepcopy(model))
    except (torch.OutOfMemoryError, MemoryError) as error:
        gib = 4 * model.num_parameters() / 2**30
        raise UserError(
            f"the fp32 weights of the reference need {gib:,.1f} GiB more memory; use a larger device"
        ) from error
    return converted


def _divergence(
    session: Session,
    reference_model: PreTrainedModel,
    prompts: Sequence[Tensor],
    backends: Sequence[Backend],
    new_tokens: int,
) -> list[Divergence]:
    """Find where the greedy continuations of prompts, each ``[T]``, diverge from those of the reference.

    Raises:
        UserError: The model or a backend cannot generate.
    """

    def tokens_of(model: PreTrainedModel, backend: Backend) -> Tensor:
        activate(model, backend)
        try:
            return continued(model, backend, torch.stack(list(prompts)), new_tokens, min_new_tokens=new_tokens)
        except (ValueError, TypeError, RuntimeError, ImportError) as error:
            what = f"{type(model).__name__} cannot generate with {backend.label}: {one_line(error)}"
            raise UserError(f"{what}; --prompts 0 leaves out the continuations") from error

    session.progress.begin("Generating", len(backends))
    expected = tokens_of(reference_model, REFERENCE)
    found = []
    for backend in backends:
        equal = (tokens_of(session.loaded.model, backend) == expected).double()
        shares = {str(n): float(equal[:, :n].mean()) for n in HORIZONS if n <= new_tokens}
        same = equal.cumprod(1).sum(1).int().tolist()  # up to the first difference
        found.append(Divergence(label=backend.label, same_tokens=same, equal_share=shares))
        session.progress.advance(backend.label)
    return found


def head_errors(
    session: Session, model: PreTrainedModel, windows: Sequence[Tensor], backends: Sequence[Backend]
) -> list[HeadErrors]:
    """Measure the error of every head under every backend that Transformers runs through its attention interface.

    One forward pass of ``model``, in fp32, over each window ``[T]`` serves all backends. SDPA's output is passed on to
    the next layer. Each backend also computes the layer from the same inputs, in the dtype of the session's model.
    ``eager``, which is a function of each model, and backends with a cache are left out.
    """
    dtype = session.loaded.model.dtype
    session.progress.begin("Heads", len(windows))
    known = ALL_ATTENTION_FUNCTIONS.valid_keys()
    measured = [backend for backend in backends if backend.implementation in known and not backend.reads_cache]
    sums: dict[tuple[str, nn.Module], Array] = {}  # by backend and layer, as of :func:`_sums_of`

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        if options.get("indices") is not None:  # a model adds it to the mask of an implementation called sdpa
            raise ValueError("its sparse-attention indexer works with SDPA under its own name only")
        reference, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)
        inputs = [tensor.to(dtype) for tensor in (query, key, value)]
        for backend in measured:
            dma_hf.reset_stats(module)
            with _section(module, backend), counted_tiles():
                output, _ = ALL_ATTENTION_FUNCTIONS[backend.implementation](module, *inputs, attention_mask, **options)
            place = backend.label, module
            layer = dma_hf.stats(module).layers.get("")
            sums[place] = sums.get(place, 0) + _sums_of(output, reference, None if layer is None else layer.tiles)
        return reference, None

    try:
        with probed(model, probe) as options, torch.inference_mode():
            for ids in windows:
                model(input_ids=ids[None].to(model.device), **options)
                session.progress.advance()
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise UserError(f"{type(model).__name__}: the heads cannot be measured: {one_line(error)}") from error
    errors = []
    numbers = _numbers(list(dict.fromkeys(module for _, module in sums)))
    for backend in measured:
        totals = [sums[backend.label, module] for module in numbers]  # which may differ in their number of heads
        skips = backend.config is not None and backend.config.skip_threshold is not None
        made = HeadErrors(
            label=backend.label,
            relative_l1=[(error / np.maximum(size, np.finfo(np.float64).tiny)).tolist() for error, size, *_ in totals],
            cosine=[(cosine / count).tolist() for _, _, cosine, count, *_ in totals],
            skipped=[(skipped / np.maximum(seen, 1)).tolist() for *_, skipped, seen in totals] if skips else None,
            layers=[*numbers.values()],
        )
        errors.append(made)
    return errors


def _numbers(modules: Sequence[nn.Module]) -> dict[nn.Module, int]:
    """Return the number of each layer in the model, in ascending order; those of HRM or Zamba count as they run."""
    own: Sequence[Any] = [getattr(module, "layer_idx", None) for module in modules]
    are_distinct = len({*own}) == len(own) and all(number is not None and number >= 0 for number in own)
    found: dict[nn.Module, int] = dict(zip(modules, own if are_distinct else range(len(own)), strict=True))
    return dict(sorted(found.items(), key=lambda each: each[1]))


def _sums_of(output: Tensor, reference: Tensor, tiles: Tensor | None) -> Array:
    """Return sums over outputs ``[B, T, H, D]``: error, reference, cosine, tokens, tiles skipped, tiles examined."""
    output, reference = output.double(), reference.double()
    cosine = nn.functional.cosine_similarity(output, reference, dim=-1).sum((0, 1))
    tokens = torch.full_like(cosine, output.shape[0] * output.shape[1])
    error, magnitude = ((output - reference).abs().sum((0, 1, 3)), reference.abs().sum((0, 1, 3)))
    counts = torch.zeros_like(cosine).expand(2, -1) if tiles is None else tiles.T.to(cosine)
    return torch.cat([torch.stack([error, magnitude, cosine, tokens]), counts]).cpu().numpy()


@contextmanager
def _section(module: nn.Module, backend: Backend) -> Iterator[None]:
    """Set the ``dma_mxfp`` section of the layer's configuration during one call."""
    config: Any = module.config
    before = getattr(config, DMA, None)
    setattr(config, DMA, None if backend.config is None else backend.config.to_section())
    try:
        yield
    finally:
        setattr(config, DMA, before)
