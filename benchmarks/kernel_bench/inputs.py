"""Queries, keys and values that prefill attention is timed on: random ones, and exact results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .results import PrefillShape


@dataclass(frozen=True, eq=False)
class Inputs:
    """One call of attention over a whole sequence."""

    query: Tensor  # [B, Hq, T, D]
    key: Tensor  # [B, Hkv, T, D]
    value: Tensor  # [B, Hkv, T, D]
    scale: float  # factor of the scores
    is_causal: bool = True  # whether a query attends to no key after its own position

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def options(self) -> dict[str, Any]:
        """Scale and mask, as ``attention`` of this package takes them."""
        return {"is_causal": self.is_causal, "scale": self.scale}

    @cached_property
    def token_major(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as contiguous ``[B, T, H, D]``: the layout of FlashAttention."""
        query, key, value = (each.transpose(1, 2).contiguous() for each in self.tensors)
        return query, key, value


def random_inputs(shape: PrefillShape, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Return independent normal numbers of a shape. No tile of them can be skipped."""
    query, key, value = (
        torch.randn(shape.batch, heads, shape.length, shape.head_dim, device=device, dtype=dtype)
        for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
    )
    return Inputs(query, key, value, shape.head_dim**-0.5, shape.is_causal)


def with_outlying_channels(inputs: Inputs) -> Inputs:
    """Return inputs with two outlier key channels, as Llama and Qwen have them, and a sharper softmax.

    One channel is 16 times as large and its query's a sixteenth, another has a bias of 12; queries are doubled.
    """
    query, key = 2.0 * inputs.query, inputs.key.clone()
    large, biased = key.shape[3] // 16, 7 * key.shape[3] // 10
    key[..., large] *= 16.0
    query[..., large] /= 16.0
    key[..., biased] += 12.0
    return replace(inputs, query=query, key=key)


def exact_rows(inputs: Inputs, rows: Tensor) -> Tensor:
    """Return attention in fp64 for some query rows, ``[B, Hq, rows, D]``, one kv head at a time."""
    query, key, value = inputs.tensors
    visible = torch.arange(key.shape[2], device=rows.device) <= rows[:, None] if inputs.is_causal else None
    options: dict[str, Any] = {"attn_mask": visible, "scale": inputs.scale, "enable_gqa": True}
    heads = zip(*(each.chunk(key.shape[1], 1) for each in (query[:, :, rows], key, value)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*(x.double() for x in head), **options) for head in heads], 1)
