"""Quality baselines: Transformers' quantized caches, and simulations of the rounding of other kernels.

The caches have Transformers' default group sizes. ``sim_sage``, ``sim_fa3_fp8`` and ``sim_fp8_cache`` are attention
implementations. They round where the simulated kernel rounds, with scales of the same granularity, and compute
everything else exactly. They do not run its code, and ignore its tile order and accumulator width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from dma_kernels.numerics.formats import E4M3_MAX
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, QuantizedCache
from transformers.masking_utils import sdpa_mask

QUANTIZED: dict[str, dict[str, Any]] = {
    "+quanto4": {"backend": "quanto", "nbits": 4},
    "+quanto2": {"backend": "quanto", "nbits": 2},
    # Transformers' documentation prescribes this axis for HQQ: groups along the channels of a token.
    **{f"+hqq{bits}": {"backend": "hqq", "nbits": bits, "axis_key": 1, "axis_value": 1} for bits in (8, 4, 2)},
    "+fp8": {"backend": "fp8"},
}
"""Arguments of ``QuantizedCache`` by suffix. With Quanto it does not support 8 bits."""
Rounding = Callable[[Tensor], Tensor]
ROWS = 512  # queries whose scores are computed at a time
FA3_SHIFT = 256.0  # FlashAttention-3 multiplies FP8 probabilities by it: small ones are not subnormal in E4M3


def quantized_cache(config: PreTrainedConfig, suffix: str) -> QuantizedCache:
    """An empty ``QuantizedCache`` for models of ``config``."""
    return QuantizedCache(config=config, **QUANTIZED[suffix])


def e4m3(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Round ``x`` to E4M3, with a scale for all of ``dims`` that maps their largest number to E4M3's largest."""
    scale = x.abs().amax(dims, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / E4M3_MAX
    return _as_e4m3(x / scale) * scale


def int8(x: Tensor, block: int) -> Tensor:
    """Round ``x`` ``[..., T, D]`` to symmetric 8-bit integers, with a scale for each ``block`` tokens of a head."""
    length = x.shape[-2]
    blocks = torch.unflatten(F.pad(x, (0, 0, 0, -length % block)), -2, (-1, block))
    scale = blocks.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return torch.flatten((blocks / scale).round() * scale, -3, -2)[..., :length, :]


def _as_e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


@dataclass(frozen=True)
class Scheme:
    """How a kernel rounds queries ``[B, Hkv, G, T, D]``, keys and values ``[B, Hkv, 1, T, D]``, and probabilities."""

    query: Rounding = lambda x: x
    key: Rounding = lambda x: x
    value: Rounding = lambda x: x
    probability: Rounding = lambda x: x  # relative to the largest of its row

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Compute the attention of a layer; the interface is Transformers' ``AttentionInterface``."""
        if any(others.get(name) is not None for name in ("s_aux", "position_bias", "indices")):
            raise ValueError("simulated kernels support no sink logits, position bias or sparse-attention indexer")
        group, length, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        rounded_query = self.query(torch.unflatten(query.float(), 1, (-1, group)))
        rounded_key, rounded_value = self.key(key.float().unsqueeze(2)), self.value(value.float().unsqueeze(2))
        visible = None
        if attention_mask is not None:  # boolean, or added to the scores; [B, 1 or Hq, T, keys]
            visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
            visible = torch.unflatten(visible, 1, (-1, group)) if visible.shape[1] > 1 else visible.unsqueeze(2)
        elif length > 1 and (module.is_causal if is_causal is None else is_causal):
            visible = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
        outputs = []
        for begin in range(0, length, ROWS):
            rows = slice(begin, begin + ROWS)
            scores = scaling * rounded_query[..., rows, :] @ rounded_key.mT
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            if visible is not None:
                scores = scores.masked_fill(~visible[..., rows, :], torch.finfo(scores.dtype).min)
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            outputs.append(self.probability(weights) @ rounded_value / weights.sum(-1, keepdim=True))
        return torch.cat(outputs, -2).flatten(1, 2).transpose(1, 2).to(query.dtype), None


PER_HEAD = (partial(e4m3, dims=(2, 3, 4)),) * 3
SCHEMES = {
    # SageAttention 1.0.6: keys without their mean, INT8 scores by blocks of 128 queries and 64 keys, P·V in 16 bits.
    "sim_sage": Scheme(partial(int8, block=128), lambda key: int8(key - key.mean(-2, keepdim=True), block=64)),
    # FlashAttention-3 in FP8: E4M3 in both products; queries, keys and values with a scale per key head.
    "sim_fa3_fp8": Scheme(*PER_HEAD, lambda weights: _as_e4m3(weights * FA3_SHIFT) / FA3_SHIFT),
    # An FP8 cache as serving engines keep it: E4M3 with one scale for all keys of a layer, and one for all values.
    "sim_fp8_cache": Scheme(key=partial(e4m3, dims=(0, 1, 2, 3, 4)), value=partial(e4m3, dims=(0, 1, 2, 3, 4))),
}

for _name, _scheme in SCHEMES.items():
    AttentionInterface.register(_name, _scheme.attend)
    AttentionMaskInterface.register(_name, sdpa_mask)
