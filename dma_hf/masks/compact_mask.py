"""``CompactMask``: an attention mask that is a few numbers instead of ``[Tq, Tk]`` booleans.

Transformers passes a 4-D mask from the mask function to every attention layer unchanged. :class:`CompactMask` is such a
tensor, boolean ``[B, 1, Tq, Tk]``, that stores a single byte and has a :class:`MaskGeometry`. Passing it on costs
nothing. An operation on its values sees the dense mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..deferred import Deferred, device_only
from .geometry import MaskGeometry


class CompactMask(Deferred):
    """A read-only boolean mask ``[B, 1, Tq, Tk]`` that is computed only if an operation needs its values.

    Moving it to a device and slices of the whole mask keep it compact. Every other operation sees the dense mask.

    Attributes:
        dma_geometry: The geometry of the mask.
        dma_calls: Calls of layers that other layers may repeat (:class:`dma_hf.repeated_calls.RepeatedCall`).
    """

    dma_geometry: MaskGeometry
    dma_calls: dict[Any, Any]
    _dense: Tensor | None

    @staticmethod
    def of(geometry: MaskGeometry, device: torch.device | str) -> Tensor:
        """Return a mask with this geometry.

        Under a tensor mode that forbids subclasses (``torch.export`` without dynamo) it is the dense mask with the
        geometry as an attribute.
        """
        byte = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=device)
        if torch.compiler.is_dynamo_compiling() or type(byte) is Tensor:
            mask: Tensor = byte.expand(geometry.shape).as_subclass(CompactMask)
            mask._dense, mask.dma_calls = None, {}  # type: ignore[attr-defined]
        else:
            mask = geometry.dense(device)
        mask.dma_geometry = geometry  # type: ignore[attr-defined]
        return mask

    def dense(self) -> Tensor:
        """Return the mask as a plain boolean tensor ``[B, 1, Tq, Tk]``."""
        if self._dense is not None:
            return self._dense
        dense = self.dma_geometry.dense(self.device)
        if not torch.compiler.is_dynamo_compiling():
            self._dense = dense
        return dense

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Move the mask to a device, return the whole mask for slices of all of it, and refuse writes and sums."""
        if func is Tensor.bool:
            return args[0]
        if func is Tensor.to:
            device = device_only(args[1:], kwargs)
            if device is not None:
                geometry = args[0].dma_geometry
                return cls.of(geometry.adapted(device, geometry.batch, geometry.two_sequences), device)
        elif func is Tensor.__getitem__:
            if isinstance(args[0], CompactMask) and _takes_all(args[1], args[0].shape):
                return args[0]
        elif func in _WRITES and isinstance(args[0], CompactMask):
            raise RuntimeError(
                "the attention mask of dma_mxfp is read-only; change a copy: mask = mask.dense().clone() if it has the "
                "method dense"
            )
        elif func in _SUMS and any(isinstance(arg, Tensor) and arg.is_floating_point() for arg in args):
            # Not a TypeError: Python's binary operators turn that into "unsupported operand type(s)".
            raise ValueError(
                "a boolean attention mask was added to floating-point scores: this model computes its attention "
                "itself, for attn_implementation='eager' alone, and cannot run 'dma_mxfp'"
            )
        return NotImplemented


_WRITES = frozenset(
    {getattr(Tensor, name) for name in dir(Tensor) if name.endswith("_") and not name.startswith("_")}
    | {Tensor.__setitem__, Tensor.__iand__, Tensor.__ior__, Tensor.__ixor__, Tensor.__iadd__, Tensor.__imul__}
)
_SUMS = frozenset(
    {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, torch.sub, Tensor.sub}
)


def _takes_all(index: Any, shape: tuple[int, ...]) -> bool:
    """Return whether ``mask[index]`` is the whole mask."""
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) > len(shape):
        return False
    for part, size in zip(parts, shape, strict=False):
        if part is Ellipsis and len(parts) == 1:
            return True
        if not isinstance(part, slice) or part.start not in (None, 0) or part.step not in (None, 1):
            return False
        if part.stop is not None and not (isinstance(part.stop, int) and part.stop >= size):
            return False
    return True
