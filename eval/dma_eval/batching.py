"""The settings of continuous batching, on terms that are the same for all backends."""

from __future__ import annotations

from transformers import ContinuousBatchingConfig, PreTrainedModel

from .errors import UserError

GIB = 1 << 30


def settings(model: PreTrainedModel, cache_gib: float | None) -> ContinuousBatchingConfig:
    """Return Transformers' settings of continuous batching.

    Args:
        model: The model.
        cache_gib: Memory for the paged cache, in GiB; by default what Transformers finds free.

    Raises:
        UserError: That memory does not hold a page for every layer.
    """
    # No other attention than the one that was asked for.
    config = ContinuousBatchingConfig(auto_switch_to_flash=False)
    if cache_gib is not None:
        text = model.config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        # Counted in blocks of 16-bit (of the model's own) keys and values, whatever pages then hold.
        token = 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim * model.dtype.itemsize
        config.num_blocks = int(cache_gib * GIB / (token * config.page_size))
        if config.num_blocks < 1:
            least = token * config.page_size / GIB
            raise UserError(f"--cache-gib: expected at least {least:.3g} for a page in every layer, got {cache_gib:g}")
    return config
