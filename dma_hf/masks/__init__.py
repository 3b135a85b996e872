"""What may a query see? From Transformers' masks and arguments to the numbers that the kernels take.

The answer for a layer is a :class:`~dma_hf.masks.geometry.MaskGeometry`. A row of four keys after one token of padding,
and the last two of its queries::

    index of the key       0    1    2    3    4      kv_len = 5, kv_range = [1, 5]
    position of the key   -1    0    1    2    3      kv_offset = -1
    query at position 2         x    x    x           q_len = 2, q_offset = 2, is_causal
    query at position 3         x    x    x    x      window = None: all keys before it

``pattern`` hides further keys, and ``documents`` separates packed rows. The way to it::

    once a forward pass    mask_function: dma_mask reads Transformers' pattern and the padding
                           compact_mask: carries the geometry to the layers, in place of a dense mask
    in every layer         layer_geometry: fits the geometry to the layer's tensors, or reads a dense mask
                           documents: finds the documents of packed rows
                           arguments: reads all other arguments, and refuses those that are not supported
    by class               architectures: the models that need special treatment, and those that are refused
"""

from .mask_function import dma_mask

__all__ = ["dma_mask"]
