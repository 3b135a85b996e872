"""What a layer asks of attention beside its tensors and its mask: read in one place, for every attention function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .settings import Settings, settings_of


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of an attention function that all of them take.

    Attributes:
        settings: What the configuration of the layer's model says.
        scaling: Factor of the scores; ``D ** -0.5`` by default.
        dropout: Must be 0.
        softcap: Cap of the scores; 0 is none, as FlashAttention has it.
        sinks: Sink logits, ``[Hq]``; Transformers' ``s_aux``.
        position_bias: Must be ``None``.
        others: What else the model passes. Arguments that are known to change nothing are ignored.
    """

    settings: Settings
    scaling: float | None
    dropout: float
    softcap: float | None
    sinks: Tensor | None
    position_bias: Tensor | None
    others: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **others: Any,
    ) -> Call:
        """Read the keyword arguments that Transformers gives to the attention function of a layer."""
        sinks = None if s_aux is None else s_aux.reshape(-1)
        return cls(settings_of(module.config), scaling, dropout, softcap or None, sinks, position_bias, others)

    @property
    def options(self) -> dict[str, Any]:
        """The same as arguments of :func:`dma_kernels.attention`."""
        return {
            "scale": self.scaling,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "backend": self.settings.config.backend,
        }


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return what autocast casts a tensor to for SDPA, whose place this attention has; ``None`` where it does not."""
    kind = tensor.device.type
    if kind == "meta" or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)
