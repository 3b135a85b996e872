"""The attention output of every head under several backends, each layer given the inputs that SDPA in fp32 gives it.

One forward pass of the fp32 model serves all backends. In every layer SDPA's output goes on to the next one, and each
backend computes from the same query, key and value what it would have put in its place. An error found so is the
head's own, and not the echo of a layer before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dma_hf import NAME as DMA

from .backends import Backend
from .errors import UserError, one_line
from .results import HeadErrors
from .session import Session

PROBE = "dma_eval_probe"

Array = NDArray[np.float64]


Sums = dict[int, Array]
"""By layer, sums over tokens ``[4, heads]``: of the error, of the reference, of their cosine, and of ones."""


def _add(sums: Sums, layer: int, more: Array) -> None:
    sums[layer] = sums[layer] + more if layer in sums else more


def _sums_of(output: Tensor, reference: Tensor) -> Array:
    """The sums of one call, whose outputs are ``[B, T, H, D]``."""
    output, reference = output.double(), reference.double()
    cosine = nn.functional.cosine_similarity(output, reference, dim=-1).sum((0, 1))
    tokens = torch.full_like(cosine, output.shape[0] * output.shape[1])
    error, magnitude = ((output - reference).abs().sum((0, 1, 3)), reference.abs().sum((0, 1, 3)))
    return torch.stack([error, magnitude, cosine, tokens]).cpu().numpy()


def _errors(label: str, sums: Sums) -> HeadErrors:
    """What the sums come to; layers that never ran are left out."""
    layers = [sums[layer] for layer in sorted(sums)]
    tiny = np.finfo(np.float64).tiny
    return HeadErrors(
        label=label,
        relative_l1=[(error / np.maximum(magnitude, tiny)).tolist() for error, magnitude, _, _ in layers],
        cosine=[(cosine / tokens).tolist() for _, _, cosine, tokens in layers],
    )


def head_errors(
    session: Session, model: PreTrainedModel, windows: Sequence[Tensor], backends: Sequence[Backend]
) -> list[HeadErrors]:
    """Measure the error of every head under every backend that Transformers runs through its attention interface.

    ``eager`` is a function of each model's own, which the interface does not give, and is left out; so are backends
    that read through a cache, whose heads are those of the same precisions without one.

    Args:
        session: The run; the backends are given their query, key and value in the dtype of its model.
        model: The model in fp32; it is left with SDPA.
        windows: Token ids, int64 ``[T]`` each.
        backends: The backends.

    Raises:
        UserError: The model does not run SDPA, or a backend refuses its calls.
    """
    dtype, processes = session.loaded.model.dtype, session.processes
    own = processes.share(windows)
    session.progress.begin("Heads", len(own))
    known = ALL_ATTENTION_FUNCTIONS.valid_keys()
    measured = [backend for backend in backends if backend.implementation in known and not backend.reads_cache]
    sums: dict[str, Sums] = {backend.label: {} for backend in measured}

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        reference, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)
        inputs = [tensor.to(dtype) for tensor in (query, key, value)]
        for backend in measured:
            with _section(module, backend):
                output, _ = ALL_ATTENTION_FUNCTIONS[backend.implementation](module, *inputs, attention_mask, **options)
            _add(sums[backend.label], int(getattr(module, "layer_idx", 0)), _sums_of(output, reference))
        return reference, None

    failure: str | None = None
    AttentionInterface.register(PROBE, probe)
    AttentionMaskInterface.register(PROBE, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model.set_attn_implementation(PROBE)
        with torch.inference_mode():
            for ids in own:
                model(input_ids=ids[None].to(model.device), use_cache=False, **_no_logits(model))
                session.progress.advance()
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        failure = one_line(error)
    finally:
        model.set_attn_implementation("sdpa")
    failures = [each for each in processes.gathered(failure) if each is not None]
    if failures:
        raise UserError(f"{type(model).__name__}: the heads cannot be measured: {failures[0]}")
    first, *others = processes.gathered(sums)
    for other in others:
        for label, by_layer in other.items():
            for layer, more in by_layer.items():
                _add(first[label], layer, more)
    return [_errors(backend.label, first[backend.label]) for backend in measured]


def _no_logits(model: PreTrainedModel) -> dict[str, int]:
    """The option to compute the logits of one position only, where the model has it."""
    import inspect

    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


@contextmanager
def _section(module: nn.Module, backend: Backend) -> Iterator[None]:
    """Give the layer's configuration the backend's ``dma_mxfp`` section for the time of one call."""
    config: Any = module.config
    before = getattr(config, DMA, None)
    setattr(config, DMA, None if backend.config is None else backend.config.to_dict())
    try:
        yield
    finally:
        setattr(config, DMA, before)
