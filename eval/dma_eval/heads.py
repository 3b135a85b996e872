"""The attention output of every head under several backends, each layer given the inputs that SDPA in fp32 gives it.

One forward pass of the fp32 model serves all backends. In every layer SDPA's output goes on to the next one, and each
backend computes from the same query, key and value what it would have put in its place. An error found so is the
head's own, and not the echo of a layer before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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


@dataclass
class _Sums:
    """Sums over tokens of one backend's heads, by layer: each ``[heads]``."""

    difference: dict[int, Array] = field(default_factory=dict)
    magnitude: dict[int, Array] = field(default_factory=dict)
    cosine: dict[int, Array] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)

    def add(self, layer: int, output: Tensor, reference: Tensor) -> None:
        """Add the outputs of one call, ``[B, T, H, D]``."""
        output, reference = output.double(), reference.double()
        cosine = nn.functional.cosine_similarity(output, reference, dim=-1)
        for sums, values in (
            (self.difference, (output - reference).abs().sum((0, 1, 3))),
            (self.magnitude, reference.abs().sum((0, 1, 3))),
            (self.cosine, cosine.sum((0, 1))),
        ):
            sums[layer] = sums.get(layer, np.zeros(len(values))) + values.cpu().numpy()
        self.tokens[layer] = self.tokens.get(layer, 0) + output.shape[0] * output.shape[1]

    def include(self, other: _Sums) -> None:
        """Add the sums over other tokens."""
        for own, more in (
            (self.difference, other.difference),
            (self.magnitude, other.magnitude),
            (self.cosine, other.cosine),
        ):
            for layer, values in more.items():
                own[layer] = own.get(layer, np.zeros(len(values))) + values
        for layer, tokens in other.tokens.items():
            self.tokens[layer] = self.tokens.get(layer, 0) + tokens

    def errors(self, label: str) -> HeadErrors:
        """What the sums come to; layers that never ran are left out."""
        layers = sorted(self.difference)
        tiny = np.finfo(np.float64).tiny
        return HeadErrors(
            label=label,
            relative_l1=[(self.difference[i] / np.maximum(self.magnitude[i], tiny)).tolist() for i in layers],
            cosine=[(self.cosine[i] / self.tokens[i]).tolist() for i in layers],
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
    sums = {backend.label: _Sums() for backend in measured}

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        reference, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)
        inputs = [tensor.to(dtype) for tensor in (query, key, value)]
        for backend in measured:
            with _section(module, backend):
                output, _ = ALL_ATTENTION_FUNCTIONS[backend.implementation](module, *inputs, attention_mask, **options)
            sums[backend.label].add(int(getattr(module, "layer_idx", 0)), output, reference)
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
        for label, more in other.items():
            first[label].include(more)
    return [first[backend.label].errors(backend.label) for backend in measured]


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
