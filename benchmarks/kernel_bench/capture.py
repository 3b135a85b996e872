"""Capture the queries, keys and values of a model's layers while it reads a text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from dma_eval import console
from dma_eval.bench.generate import text_windows
from dma_eval.environment import portable
from dma_eval.errors import UserError, one_line
from dma_eval.load.data import load_text
from dma_eval.load.models import LoadedModel, load_model
from dma_eval.load.reading import probed
from dma_eval.names import check_yarn
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .inputs import Inputs
from .results import ModelInputs, PrefillShape

FULL = "full_attention"


def choose_layers(model: PreTrainedModel, count: int | None) -> list[int]:
    """Return the layers to capture: all with full attention, or so many of them, evenly spaced, if there are enough."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    full = [layer for layer, kind in enumerate(kinds) if kind == FULL]
    if not full or (count is not None and count > len(full)):
        wanted = "at least one" if count is None else str(count)
        raise UserError(f"--layers: wanted {wanted}, but {type(model).__name__} has {len(full)} with full attention")
    return [full[round(place)] for place in np.linspace(0, len(full) - 1, count or len(full))]


def model_inputs(args: argparse.Namespace) -> Iterator[tuple[PrefillShape, list[Inputs]]]:
    """Capture layers of the model of --inputs at each length, and yield them with their shape.

    A pass of the model reads ``--batch`` windows of the text. Options are checked before the first pass.
    """
    if args.shape or not args.data or not args.length:
        raise UserError("--inputs needs --data and --length, and excludes --shape: the model's layers decide")
    check_yarn(args.yarn)
    text = load_text(args.data)
    loaded = load_model(args.inputs, dtype=args.dtype, device=args.device, yarn=args.yarn, option="--inputs")
    info, layers = loaded.info, choose_layers(loaded.model, args.layers)
    assert info.head_dim is not None
    assert info.layers is not None
    tokens, windows = loaded.tokenize(text.content), {}
    origin = ModelInputs(
        model=portable(loaded.name),
        data=portable(args.data),
        layers=tuple(layers),
        model_layers=info.layers,
        model_head_dim=info.head_dim,
        yarn=loaded.yarn,
        begins_with=tuple(tokens.begins_with),
    )
    for length in sorted(set(args.length)):
        loaded.check_positions(length, "--length")
        windows[length] = text_windows(tokens, args.batch, length, "--length")
    for length, ids in windows.items():
        with console.working(f"Capturing {len(layers)} layers at {length:,} tokens"):
            inputs = list(capture_layers(loaded, ids, layers).values())
        shape = PrefillShape(
            length=length,
            head_dim=info.head_dim,
            query_heads=inputs[0].query.shape[1],
            kv_heads=inputs[0].key.shape[1],
            batch=args.batch,
            is_causal=True,
            inputs=origin,
        )
        yield shape, inputs


def capture_layers(loaded: LoadedModel, input_ids: Tensor, layers: Sequence[int]) -> dict[int, Inputs]:
    """Run the model once, with SDPA, and return what the attention of each of these layers is computed from.

    Queries and keys are those after the rotary embedding. They stay on the model's device. Afterwards the model runs
    the attention that it ran before. ``input_ids`` is ``[B, T]``.

    Raises:
        UserError: A layer computes something other than plain causal attention.
    """
    model = loaded.model
    found: dict[int, Inputs] = {}

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        layer: int = getattr(module, "layer_idx", -1)
        if layer in layers:
            found[layer] = _plain_inputs(module, query, key, value, attention_mask, options)
        out: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)
        return out

    try:
        with probed(model, record) as options, torch.no_grad():
            model(input_ids=input_ids.to(model.device), **options)
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise UserError(f"--inputs: {type(model).__name__} cannot be captured: {one_line(error)}") from error
    missing = ", ".join(str(layer) for layer in layers if layer not in found)
    if missing:
        raise UserError(f"--inputs: {type(model).__name__} calls no attention function in layers {missing}")
    return {layer: found[layer] for layer in layers}


def _plain_inputs(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Inputs:
    """Return the inputs of a layer's call. A ``ValueError`` says why it is not plain causal attention."""
    is_causal, scale = options.get("is_causal"), options.get("scaling")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    used = [name for name in ("softcap", "s_aux", "position_bias", "indices") if options.get(name) is not None]
    used += ["a mask"] if mask is not None else []
    used += [] if is_causal else ["bidirectional attention"]
    if used:
        raise ValueError(f"layer {module.layer_idx} uses {', '.join(used)}; only plain causal attention is timed")
    if value.shape[3] != query.shape[3]:
        sizes = f"keys of {query.shape[3]} channels and values of {value.shape[3]}"
        raise ValueError(f"layer {module.layer_idx} has {sizes}")
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    return Inputs(query.contiguous(), key.contiguous(), value.contiguous(), scale)
