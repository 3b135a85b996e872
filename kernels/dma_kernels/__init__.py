"""Numerics of diagonal-tiled mixed-precision attention: formats, quantizers, the reference and the kernels.

Depends on PyTorch and Triton, not on Transformers.
"""

from .api import attention, attention_with_lse
from .numerics.formats import BLOCK_FORMATS, FORMAT_NAMES, TILE, BlockFormat, ScaleRounding, SharedScale
from .numerics.quantize import QuantizedTensor, quantize
from .numerics.recipe import Recipe
from .numerics.saturation import saturated_values
from .numerics.transforms import hadamard_rotate, key_mean
from .varlen import attention_varlen

__all__ = [
    "BLOCK_FORMATS",
    "FORMAT_NAMES",
    "TILE",
    "BlockFormat",
    "QuantizedTensor",
    "Recipe",
    "ScaleRounding",
    "SharedScale",
    "attention",
    "attention_varlen",
    "attention_with_lse",
    "hadamard_rotate",
    "key_mean",
    "quantize",
    "saturated_values",
]
