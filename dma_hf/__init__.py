"""Diagonal-tiled mixed-precision attention (arXiv 2604.03950) for Hugging Face Transformers.

Importing this package registers the attention implementations ``dma_mxfp[:PRESET][+CACHE]``. ``generate`` and
``generate_batch`` of a model that runs one use the packed cache that its settings name. Nothing else changes::

    import dma_hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="dma_mxfp:balanced+int4")
    dma_hf.configure(model, "fp4", cache="int8")
"""

from transformers import AttentionInterface, AttentionMaskInterface

from .attention import dma_attention_forward
from .cache import DMACache
from .config import IMPLEMENTATIONS, PRESETS, DMAConfig
from .configure import configure
from .integrations.internals import UnsupportedTransformersError
from .integrations.wrapping import wrap_generation, wrap_name_check
from .masks import dma_mask
from .stats import reset_stats, stats

__all__ = [
    "PRESETS",
    "DMACache",
    "DMAConfig",
    "UnsupportedTransformersError",
    "configure",
    "reset_stats",
    "stats",
]

wrap_generation()
if __name__ == "dma_hf":  # the copy in a Hub kernel is registered by Transformers, under the repository's name
    for implementation in IMPLEMENTATIONS:
        AttentionInterface.register(implementation, dma_attention_forward)
        AttentionMaskInterface.register(implementation, dma_mask)
    wrap_name_check()
