"""Attention by its formula, all scores at once: what the reference must equal, and autograd can differentiate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def visible_cells(query: Tensor, key: Tensor, options: dict[str, Any]) -> Tensor:
    """Return which keys each query attends to, boolean ``[B, Hq, Tq, Tk]``; options are those of ``attention``."""
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    is_causal, window = options.get("is_causal", True), options.get("window")
    kv_offset = torch.as_tensor(options.get("kv_offset", 0)).expand(batch)
    q_offset = options.get("q_offset", kv_offset + kv_len - q_len if is_causal else 0)
    q_pos = torch.as_tensor(q_offset).expand(batch)[:, None] + torch.arange(q_len)
    index = torch.arange(kv_len)
    distance = q_pos[:, :, None] - (kv_offset[:, None] + index)[:, None]
    kv_range = options.get("kv_range", torch.tensor([[0, kv_len]]))
    seen = ((index >= kv_range[:, :1]) & (index < kv_range[:, 1:]))[:, None]
    if is_causal:
        seen = seen & (distance >= 0)
    if window is not None:
        seen = seen & (distance < window if is_causal else distance.abs() <= window)
    seen = seen[:, None] & options.get("mask", torch.tensor(True))
    return seen.expand(batch, heads, q_len, kv_len)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp; products in the inputs' dtype, the softmax in at least fp32."""
    visible = visible_cells(query, key, options)
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = (query @ key.mT).to(torch.promote_types(query.dtype, torch.float32))
    scores = scores * options.get("scale", query.shape[-1] ** -0.5)
    if softcap := options.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    sinks = options.get("sinks")
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    lse = torch.logsumexp(scores.detach(), -1)
    # Without the bound, a row that sees nothing would be NaN, and so would its gradient.
    weights = scores.clamp(min=-1e30).softmax(-1)[..., : key.shape[2]].masked_fill(~visible, 0.0)
    return weights.to(value.dtype) @ value, lse
