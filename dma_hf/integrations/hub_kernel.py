"""Entry points of the Hub kernel, the copy of this package that ``scripts/build_hub_kernel.py`` makes.

For ``attn_implementation="org/repo:dma_mxfp"`` Transformers loads the copy with Hugging Face's ``kernels``. It
registers the kernel's ``flash_attn_forward`` with SDPA's mask function. A kernel cannot choose another one. Those masks
are dense and have no positions, so tiles of left-padded rows would start at the wrong keys.

:func:`register_masks` replaces them by :func:`~dma_hf.masks.dma_mask`. It runs when Transformers, after registering the
kernel, looks up optional functions that the kernel does not have (:func:`__getattr__`). If a later release does not
look them up, the first forward pass raises an error.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention import dma_attention_forward
from ..masks import dma_mask
from .internals import attention_name


def dma_mxfp(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Compute the attention of one layer, as :func:`~dma_hf.attention.dma_attention_forward` does.

    Raises:
        RuntimeError: Another mask function makes the layer's masks.
    """
    if not torch.compiler.is_compiling():
        implementation = str(attention_name(module.config))
        is_registered = ALL_ATTENTION_FUNCTIONS.get(implementation) is dma_mxfp
        if is_registered and ALL_MASK_ATTENTION_FUNCTIONS.get(implementation) is not dma_mask:
            raise RuntimeError(
                f"attention {implementation!r} is registered with another mask function than dma_mask; call "
                "register_masks() of the loaded kernel before the forward pass"
            )
    return dma_attention_forward(module, *args, **kwargs)


def register_masks() -> None:
    """Register :func:`~dma_hf.masks.dma_mask` for every attention name that runs :func:`dma_mxfp`."""
    for name, function in ALL_ATTENTION_FUNCTIONS.items():
        if function is dma_mxfp:
            AttentionMaskInterface.register(name, dma_mask)


def __getattr__(name: str) -> NoReturn:
    """Register the masks, and raise the error for an attribute that the kernel does not have."""
    register_masks()
    raise AttributeError(f"the Hub kernel of dma_mxfp has no attribute {name!r}")
