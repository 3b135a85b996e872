"""What may a query see? From Transformers' masks and arguments to the numbers that the kernels take.

The answer for a layer is a :class:`~dma_hf.masks.geometry.MaskGeometry`. Here are the last two queries of a row of five
tokens, of which the first is padding:

| index of a key | 0 | 1 | 2 | 3 | 4 |
|---|---|---|---|---|---|
| position of a key | -1 | 0 | 1 | 2 | 3 |
| seen at position 2 | | x | x | x | |
| seen at position 3 | | x | x | x | x |

The geometry says: ``q_len = 2, kv_len = 5, is_causal, q_offset = 2, kv_offset = -1, kv_range = [1, 5]``. A ``window``
hides distant keys, a ``pattern`` any others, and ``documents`` separates packed rows. The modules, in order:

- ``mask_function``: once a forward pass, ``dma_mask`` reads Transformers' pattern and the padding.
- ``geometry``: the geometry, and the compact mask that carries it to the layers in place of a dense one.
- ``layer_geometry``: fits the geometry to the tensors of a layer, or reads a dense mask, and finds packed documents.
"""

from .mask_function import dma_mask

__all__ = ["dma_mask"]
