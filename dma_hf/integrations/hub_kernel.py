"""Entry points of the Hub kernel, the copy of this package that ``scripts/build_hub_kernel.py`` makes.

For ``attn_implementation="org/repo:dma_mxfp"`` Transformers loads the copy with Hugging Face's ``kernels``, and
registers its ``flash_attn_forward`` together with SDPA's mask function (``load_and_register_attn_kernel``; a kernel
cannot name another). Those masks are dense and know no positions: left-padded rows would be cut into other tiles than
the rule says. So :func:`register_masks` puts :func:`~dma_hf.dma_mask` in their place. It runs when Transformers, having
registered the kernel, asks it for optional functions that it does not have (:func:`__getattr__`); should an upstream
release not ask any more, the first forward pass is an error, not another result.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention import dma_attention_forward
from ..masking import dma_mask
from .attention_name import attention_name


def dma_mxfp(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Compute the attention of one layer; arguments and result as for :func:`~dma_hf.dma_attention_forward`.

    Raises:
        RuntimeError: The layer's masks are made by another mask function.
    """
    if not torch.compiler.is_compiling():
        implementation = str(attention_name(module.config))
        is_registered = ALL_ATTENTION_FUNCTIONS.get(implementation) is dma_mxfp
        if is_registered and ALL_MASK_ATTENTION_FUNCTIONS.get(implementation) is not dma_mask:
            raise RuntimeError(
                f"attention {implementation!r} was registered with another mask function than its own, which this "
                "release of Transformers does not let it choose; call register_masks() of the loaded kernel before the "
                "forward pass"
            )
    return dma_attention_forward(module, *args, **kwargs)


def register_masks() -> None:
    """Have masks made by :func:`~dma_hf.dma_mask` wherever :func:`dma_mxfp` is the attention."""
    for name, function in ALL_ATTENTION_FUNCTIONS.items():
        if function is dma_mxfp:
            AttentionMaskInterface.register(name, dma_mask)


def __getattr__(name: str) -> NoReturn:
    """Answer for what the kernel does not have; in between, register the masks."""
    register_masks()
    raise AttributeError(f"the Hub kernel of dma_mxfp has no attribute {name!r}")
