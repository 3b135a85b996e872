"""Continuous batching with one backend, on terms that are the same for all."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from transformers import ContinuousBatchingConfig, PreTrainedModel

import dma_hf

from .backends import Backend
from .errors import UserError

GIB = 1 << 30


def settings(model: PreTrainedModel, backend: Backend, cache_gib: float | None) -> ContinuousBatchingConfig:
    """Return Transformers' settings of continuous batching.

    Args:
        model: The model.
        backend: What it is to run.
        cache_gib: Memory for the paged cache, in GiB; by default what Transformers finds free.

    Raises:
        UserError: That memory does not hold a page for every layer.
    """
    # No other attention than the one that was asked for.
    config = ContinuousBatchingConfig(auto_switch_to_flash=False)
    if backend.config is not None:
        config.use_cuda_graph = False  # lengths are needed on the host
    if cache_gib is not None:
        text = model.config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        # Transformers counts in blocks of 16-bit (of the model's own) keys and values, whatever pages then hold.
        token = 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim * model.dtype.itemsize
        config.num_blocks = int(cache_gib * GIB / (token * config.page_size))
        if config.num_blocks < 1:
            least = token * config.page_size / GIB
            raise UserError(f"--cache-gib: expected at least {least:.3g} for a page in every layer, got {cache_gib:g}")
    return config


def batching(model: PreTrainedModel, backend: Backend) -> AbstractContextManager[None]:
    """What a model that runs ``backend`` batches continuously within.

    Raises:
        UserError: It cannot.
    """
    if backend.config is None:
        return nullcontext()
    if backend.config.cache is not None:
        raise UserError(f"{backend.label!r}: continuous batching keeps keys and values in 16 bits; leave out the +")
    return dma_hf.continuous_batching(model)
