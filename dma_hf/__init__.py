"""Diagonal-tiled mixed-precision attention (arXiv 2604.03950) for Hugging Face Transformers.

Importing this package registers the attention implementation ``dma_mxfp`` (and ``dma_mxfp:PRESET``, which brings its
settings along), and has ``generate`` of models that run it use the packed cache that their settings name. It changes
nothing else::

    import dma_hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="dma_mxfp")
    dma_hf.configure(model, "fp4")
"""

from transformers import AttentionInterface, AttentionMaskInterface

from .attention import dma_attention_forward
from .cache import DMACache
from .cache_step import CachedStates
from .compact_mask import CompactMask, MaskGeometry
from .config import PRESETS, DMAConfig, preset, resolve
from .equalization import equalize
from .integrations.batching import continuous_batching
from .integrations.generate import wrap_generate
from .integrations.names import wrap_name_check
from .integrations.versions import UnsupportedTransformersError
from .masking import dma_mask
from .models import configure
from .settings import IMPLEMENTATIONS, NAME
from .stats import LayerStats, Stats, Use, reset_stats, stats
from .tile_counts import counted_tiles
from .unsupported import fallback_counts, reset_fallback_counts

__all__ = [
    "NAME",
    "PRESETS",
    "CachedStates",
    "CompactMask",
    "DMACache",
    "DMAConfig",
    "LayerStats",
    "MaskGeometry",
    "Stats",
    "UnsupportedTransformersError",
    "Use",
    "configure",
    "continuous_batching",
    "counted_tiles",
    "dma_attention_forward",
    "dma_mask",
    "equalize",
    "fallback_counts",
    "preset",
    "reset_fallback_counts",
    "reset_stats",
    "resolve",
    "stats",
]

wrap_generate()
if __name__ == "dma_hf":  # the copy in a Hub kernel is registered by Transformers, under the repository's name
    for implementation in IMPLEMENTATIONS:
        AttentionInterface.register(implementation, dma_attention_forward)
        AttentionMaskInterface.register(implementation, dma_mask)
    wrap_name_check()
