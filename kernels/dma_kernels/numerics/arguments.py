"""Arguments that attention takes over keys and over a cache alike: what may be given, and what is said of the rest."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer, also one that a compiler stands in for; a bool is none."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def is_integer(tensor: Tensor) -> bool:
    """Whether a tensor holds integers."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def check_options(*, is_causal: Any, window: Any, scale: Any, softcap: Any) -> None:
    """Check the options that are no tensors.

    Raises:
        TypeError: ``is_causal`` is no bool, or ``scale`` or ``softcap`` neither ``None`` nor a number.
        ValueError: One of these is not positive and finite, or ``window`` neither ``None`` nor an integer from 1 on.
    """
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be true or false, got {is_causal!r}")
    for name, number in (("scale", scale), ("softcap", softcap)):
        _check_positive(name, number)
    if window is not None and not (is_int(window) and window >= 1):
        raise ValueError(f"window must be an integer of at least 1, got {window!r}")


def check_kind(name: str, tensor: Any, other: Tensor, whose: str = "query") -> None:
    """Check that an argument is a tensor on the device of another one, which ``whose`` names.

    Raises:
        TypeError: It is none.
        ValueError: It is elsewhere.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device != other.device:
        raise ValueError(f"{name} must be on the device of {whose}, {other.device}, got {tensor.device}")


def check_sinks(sinks: Any, query: Tensor) -> None:
    """Check the sink logits of queries ``[B, Hq, T, D]``.

    Raises:
        TypeError: They are no floating-point tensor.
        ValueError: They are not ``[Hq]``, or on another device.
    """
    check_kind("sinks", sinks, query)
    if sinks.shape != (query.shape[1],):
        raise ValueError(f"sinks must be [{query.shape[1]}], one logit per query head, got {list(sinks.shape)}")
    if not sinks.is_floating_point():
        raise TypeError(f"sinks must be floating point, got {sinks.dtype}")


def check_mask(mask: Tensor, query: Tensor, columns: int | None) -> Tensor:
    """Check the mask of queries ``[B, Hq, T, D]``; return it with four dimensions.

    Raises:
        TypeError: It is no boolean tensor.
        ValueError: It does not broadcast to ``[B, Hq, T, columns]``, of any columns where these are ``None``; or is on
            another device.
    """
    check_kind("mask", mask, query)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, got {mask.dtype}")
    shape = (*(1,) * (4 - mask.ndim), *mask.shape)
    full = (*query.shape[:3], shape[-1] if columns is None else columns)
    if len(shape) > 4 or any(size not in (1, whole) for size, whole in zip(shape, full, strict=True)):
        raise ValueError(f"mask must be broadcastable to {list(full)}, got {list(mask.shape)}")
    return mask.reshape(shape) if mask.ndim < 4 else mask


def _check_positive(name: str, number: Any) -> None:
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a positive finite number, got {number!r}")
    if not 0.0 < number < math.inf:
        raise ValueError(f"{name} must be a positive finite number, got {number!r}")
