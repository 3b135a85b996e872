"""Numerics of diagonal-tiled mixed-precision attention: formats, quantisers, the reference and the kernels.

Knows torch and Triton, not Transformers.
"""

from .api import attention
from .formats import BLOCK_FORMATS, FORMAT_NAMES, TILE, BlockFormat, ScaleRounding, SharedScale
from .quantize import QuantizedTensor, quantize
from .recipe import Recipe
from .transforms import hadamard_rotate, key_mean

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
    "hadamard_rotate",
    "key_mean",
    "quantize",
]
