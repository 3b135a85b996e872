"""Attention of other packages, which benchmarks compare with where it is installed: FlashAttention-3.

It is no dependency. The package with its kernels for Hopper is ``fa3-fwd`` on PyPI.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from .timing import Run

FLASH_3 = {"fa3": False, "fa3:fp8": True}
"""FlashAttention-3 by the name that it has in results, and whether it takes numbers of 8 bits."""
PACKAGE = "fa3-fwd"
MODULE = "fa3_fwd_interface"
E4M3_MAX = 448.0


def flash_attention_3(name: str, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Run:
    """Return a call of FlashAttention-3; its operands lie as it takes them, so that nothing is copied in the call.

    With ``fa3:fp8`` they are E4M3 numbers with a scale for each row's kv head. They are made here: the call is
    attention alone, as if the layer before had written them.

    Args:
        name: Of :data:`FLASH_3`.
        query: bf16 or fp16 ``[B, Hq, T, D]``.
        key: ``[B, Hkv, T, D]``.
        value: ``[B, Hkv, T, Dv]``.
        is_causal: Whether a query sees no key after its own position.

    Raises:
        ImportError: The package is not installed; the message names it.
    """
    attend = _module().flash_attn_func
    operands, scales = _operands(name, query, key, value)
    return lambda: attend(*operands, causal=is_causal, **scales).transpose(1, 2)


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
    attend = _module().flash_attn_with_kvcache
    (_, keys, values), scales = _operands(name, query, key, value)
    if scales:
        scales["q_descale"] = torch.ones_like(scales["q_descale"])
    query = query.transpose(1, 2)
    lengths = torch.full((len(query),), key.shape[2], dtype=torch.int32, device=query.device)

    def step() -> Tensor:
        out: Tensor = attend(query.to(keys.dtype), keys, values, cache_seqlens=lengths, **scales)
        return out.transpose(1, 2)

    return step, keys.nbytes + values.nbytes


def _module() -> Any:
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise ImportError(f"FlashAttention-3 is not installed: pip install {PACKAGE} ({error})") from error


def _operands(name: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return query, key and value as ``[B, T, H, D]``, and the scales by which they are to be multiplied."""
    if not FLASH_3[name]:
        return [x.transpose(1, 2).contiguous() for x in (query, key, value)], {}
    operands, scales = [], {}
    for scale_name, x in (("q_descale", query), ("k_descale", key), ("v_descale", value)):
        by_kv_head = torch.unflatten(x, 1, (key.shape[1], -1))
        scale = by_kv_head.abs().amax((2, 3, 4)).float().clamp_min(torch.finfo(torch.float32).tiny) / E4M3_MAX
        codes = (by_kv_head / scale[:, :, None, None, None]).to(torch.float8_e4m3fn)
        operands.append(codes.flatten(1, 2).transpose(1, 2).contiguous())
        scales[scale_name] = scale
    return operands, scales
