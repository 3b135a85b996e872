"""Attention of PyTorch, and of other packages, which benchmarks compare with where they are installed.

None of the packages is a dependency. On PyPI FlashAttention-3's kernels for Hopper are ``fa3-fwd``, SageAttention is
``sageattention``.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from dma_kernels.numerics.formats import E4M3_MAX
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .timing import Run

FLASH_3 = {"fa3": False, "fa3:fp8": True}
"""FlashAttention-3 by the name that it has in results, and whether it takes numbers of 8 bits."""
SAGE = "sage"
MODULE, SAGE_MODULE = "fa3_fwd_interface", "sageattention"


def sdpa(chosen: SDPBackend | None, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Run:
    """Return a call of PyTorch's attention on a backend of its own, or on the one that it chooses by itself."""

    def run() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)

    def forced() -> Tensor:
        assert chosen is not None
        with sdpa_kernel(chosen):
            return run()

    return run if chosen is None else forced


def flash_attention_3(
    name: str, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool
) -> tuple[Run, Run | None]:
    """Return a call of FlashAttention-3, and the part of it that quantises, if it does.

    Its operands lie as it takes them, so that no 16-bit number is copied in the call. With ``fa3:fp8`` the call makes
    E4M3 numbers of them with a scale for each row's kv head, as its user has to: a maximum, a product, and a cast.

    Args:
        name: Of :data:`FLASH_3`.
        query: bf16 or fp16 ``[B, Hq, T, D]``.
        key: ``[B, Hkv, T, D]``.
        value: ``[B, Hkv, T, Dv]``.
        is_causal: Whether a query sees no key after its own position.

    Raises:
        ImportError: The package is not installed; the message names it.
    """
    attend = _module(MODULE, "FlashAttention-3", "fa3-fwd").flash_attn_func
    laid = _laid(query, key, value)
    if not FLASH_3[name]:
        return lambda: attend(*laid, causal=is_causal).transpose(1, 2), None

    def run() -> Tensor:
        codes, scales = _quantized(laid)
        out: Tensor = attend(*codes, causal=is_causal, **scales)
        return out.transpose(1, 2)

    return run, lambda: _quantized(laid)


def sage_attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Run:
    """Return a call of SageAttention, which quantises queries and keys itself; arguments as above.

    Raises:
        ImportError: The package is not installed; the message names it.
    """
    attend = _module(SAGE_MODULE, "SageAttention", "sageattention").sageattn
    return lambda: attend(query, key, value, is_causal=is_causal)


def flash_attention_3_step(name: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Run, int]:
    """Return a step of decoding over keys and values that lie ready, and the bytes of what is stored.

    With ``fa3:fp8`` the cache holds E4M3 numbers with a scale for each row's kv head, and the step converts its query,
    whose scale is 1. How the keys are split over the chip is FlashAttention-3's own choice.

    Args:
        name: Of :data:`FLASH_3`.
        query: bf16 or fp16 ``[B, Hq, 1, D]``.
        key: ``[B, Hkv, N, D]``.
        value: ``[B, Hkv, N, Dv]``.

    Raises:
        ImportError: The package is not installed; the message names it.
    """
    attend = _module(MODULE, "FlashAttention-3", "fa3-fwd").flash_attn_with_kvcache
    laid = _laid(query, key, value)
    scales: dict[str, Tensor] = {}
    if FLASH_3[name]:
        laid, scales = _quantized(laid)
        scales["q_descale"] = torch.ones_like(scales["q_descale"])
    _, keys, values = laid
    query = query.transpose(1, 2)
    lengths = torch.full((len(query),), key.shape[2], dtype=torch.int32, device=query.device)

    def step() -> Tensor:
        out: Tensor = attend(query.to(keys.dtype), keys, values, cache_seqlens=lengths, **scales)
        return out.transpose(1, 2)

    return step, keys.nbytes + values.nbytes


def _module(name: str, title: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{title} is not installed: pip install {package} ({error})") from error


def _laid(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return query, key and value as ``[B, T, H, D]``."""
    return [x.transpose(1, 2).contiguous() for x in (query, key, value)]


def _quantized(laid: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return query, key and value ``[B, T, H, D]`` in E4M3, and the scales by which they are to be multiplied."""
    kv_heads = laid[1].shape[2]
    codes, scales = [], {}
    for name, x in zip(("q_descale", "k_descale", "v_descale"), laid, strict=True):
        by_kv_head = torch.unflatten(x, 2, (kv_heads, -1))
        largest = torch.linalg.vector_norm(by_kv_head, torch.inf, (1, 3, 4), dtype=torch.float32)
        scales[name] = largest.clamp_min(torch.finfo(torch.float32).tiny) / E4M3_MAX
        reciprocal = (1.0 / scales[name]).to(x.dtype)[:, None, :, None, None]
        codes.append((by_kv_head * reciprocal).to(torch.float8_e4m3fn).flatten(2, 3))
    return codes, scales
