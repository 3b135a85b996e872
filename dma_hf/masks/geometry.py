"""``MaskGeometry``: which keys each query sees, as a few numbers; and ``CompactMask``: a mask that carries them.

Transformers passes a 4-D mask from the mask function to every attention layer unchanged. :class:`CompactMask` is such a
tensor, boolean ``[B, 1, Tq, Tk]``, that stores a single byte. An operation on its values sees the dense mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy

from ..deferred import Deferred, device_only

T = TypeVar("T")

GEOMETRY = "dma_geometry"
"""Attribute of a mask with its geometry."""

PLAIN_STEP = "dma_plain_step"
"""Attribute of a query offset that says that the call is a captured decoding step, whose mask hides no cached key."""

_READ = "dma_read"
"""Attribute of a tensor with what was read from it, the version of its contents, and the layers that know it."""


@dataclass(frozen=True, eq=False)
class MaskGeometry:
    """Which keys each query sees, and the positions of both, in the form that :func:`dma_kernels.attention` takes.

    Positions count from the first visible key of a row, even if a sliding cache has dropped that key.

    Attributes:
        batch: Number of rows.
        q_len: Queries in a row.
        kv_len: Keys in a row.
        is_causal: Whether a query sees no key after its own position.
        window: Causal: the query's own position and the ``window - 1`` before it. Otherwise: keys at most ``window``
            positions away.
        q_offset: Position of query 0: an int, or integer ``[]`` or ``[B]``.
        kv_offset: Position of key 0, in the same form. It is negative in left-padded rows.
        kv_range: Index of the first visible key and index after the last, integer ``[B, 2]``, or ``None`` for all keys.
        is_unpadded: Whether padding is known to hide none of the first ``q_len`` keys. A growing count instead would
            recompile every step.
        pattern: Boolean, broadcastable to ``[B, Hq, Tq, Tk]``: a further mask.
        two_sequences: Whether queries and keys belong to two sequences that share no positions (cross-attention).
        documents: Where the documents of packed rows begin, and the number of tokens: integer ``[documents + 1]``,
            counted over all rows. ``None`` if each row is one document.
    """

    batch: int
    q_len: int
    kv_len: int
    is_causal: bool
    window: int | None = None
    q_offset: int | Tensor = 0
    kv_offset: int | Tensor = 0
    kv_range: Tensor | None = None
    is_unpadded: bool = False
    pattern: Tensor | None = None
    two_sequences: bool = False
    documents: Tensor | None = None

    @property
    def hides_nothing(self) -> bool:
        """Whether the kind of mask implies that every query sees every key."""
        return self.broadcasts_queries and self.kv_range is None and self.pattern is None

    @property
    def broadcasts_queries(self) -> bool:
        """Whether every query sees the same keys."""
        is_plain = (self.pattern is None or self.pattern.shape[2] == 1) and self.documents is None
        return is_plain and not (self.is_causal or self.window)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the mask with one head."""
        return self.batch, 1, self.q_len, self.kv_len

    @property
    def arguments(self) -> dict[str, Any]:
        """The corresponding arguments of :func:`dma_kernels.attention`."""
        names = ("is_causal", "window", "q_offset", "kv_offset", "kv_range")
        return {name: getattr(self, name) for name in names} | {"mask": self.pattern}

    def adapted(self, device: torch.device, batch: int, two_sequences: bool) -> MaskGeometry:
        """Return the geometry on ``device``, with ``batch`` rows and ``two_sequences``.

        If nothing changes, the result is the same object, because layers identify a step by its ``kv_range``.
        """
        changes: dict[str, Any] = {}
        for name in ("q_offset", "kv_offset", "kv_range", "pattern"):
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.device != device:
                changes[name] = value.to(device)
        if self.kv_range is not None and self.kv_range.shape[0] != batch:
            changes["kv_range"] = changes.get("kv_range", self.kv_range).expand(batch, 2)
        if not changes and batch == self.batch and two_sequences == self.two_sequences:
            return self
        return replace(self, batch=batch, two_sequences=two_sequences, **changes)

    def of_queries(self, start: int, stop: int) -> MaskGeometry:
        """Return the geometry of the queries ``start`` to ``stop - 1``, over the same keys."""
        pattern = self.pattern
        if pattern is not None and pattern.shape[2] > 1:
            pattern = pattern[:, :, start:stop]
        return replace(self, q_len=stop - start, q_offset=self.q_offset + start, pattern=pattern)

    def dense(self, device: torch.device | str) -> Tensor:
        """Return the boolean mask ``[B, H, Tq, Tk]``, true is visible. ``H`` is 1 unless the pattern has heads."""
        index = torch.arange(self.kv_len, device=device)
        query = torch.arange(self.q_len, device=device) + _column(self.q_offset)  # [1 or B, Tq]
        distance = query[..., :, None] - (index + _column(self.kv_offset))[..., None, :]  # [1 or B, Tq, Tk]
        seen = torch.ones((), dtype=torch.bool, device=device).expand(self.batch, self.q_len, self.kv_len)
        if self.is_causal:
            seen = seen & (distance >= 0)
            if self.window is not None:
                seen = seen & (distance < self.window)
        elif self.window is not None:
            seen = seen & (distance.abs() <= self.window)
        if self.kv_range is not None:
            seen = seen & keys_in(self.kv_range, self.kv_len)[:, None]
        mask = seen[:, None]
        if self.documents is not None:
            mask = mask & self.same_document(self.documents.to(device))
        return mask if self.pattern is None else mask & self.pattern

    def same_document(self, documents: Tensor) -> Tensor:
        """Return which query and key are of the same document, boolean ``[B, 1, T, T]``."""
        tokens = torch.arange(self.batch * self.q_len, device=documents.device).view(self.batch, self.q_len)
        number = torch.bucketize(tokens, documents, right=True)
        return (number[:, :, None] == number[:, None])[:, None]


def keys_in(kv_range: Tensor, kv_len: int) -> Tensor:
    """Return which keys are in the ranges of the rows, integer ``[B, 2]``, as booleans ``[B, kv_len]``."""
    index = torch.arange(kv_len, device=kv_range.device)
    return (index >= kv_range[:, :1]) & (index < kv_range[:, 1:])


def has_no_values(tensor: Tensor) -> bool:
    """Return whether the host cannot read a tensor: it is traced, captured or fake."""
    if torch.compiler.is_compiling():  # a graph cannot hold the question whether the stream is being captured
        return True
    is_traced = torch._C._get_tracing_state() is not None or tensor.is_meta
    is_captured = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    return is_traced or is_captured or isinstance(tensor, (FakeTensor, Proxy))


def may_be_recomputed() -> bool:
    """Return whether a dispatch mode, such as that of selective checkpointing, sees operations.

    Such a checkpoint matches the operations of a layer with those of its recomputation by their order. So a layer must
    not skip operations because of what an earlier layer computed.
    """
    return torch._C._len_torch_dispatch_stack() > 0


def read_once(tensor: Tensor, layer: object, read: Callable[[], T]) -> T:
    """Read a tensor that all layers of a forward pass share, in the first of them. Reading may wait for the device.

    A layer that asks again belongs to the next forward pass, for which the contents may have changed without a new
    version of the tensor (through ``.data``).
    """
    if has_no_values(tensor) or may_be_recomputed():
        return read()
    known: tuple[int | None, T, set[int]] | None = getattr(tensor, _READ, None)
    if known is None or known[0] != _version_of(tensor) or id(layer) in known[2]:
        known = remember(tensor, read())
    known[2].add(id(layer))
    return known[1]


def remember(tensor: Tensor, value: T) -> tuple[int | None, T, set[int]]:
    """Let :func:`read_once` return a value for a tensor without reading it, in one forward pass.

    Returns the version of the tensor, the value, and the layers that have asked.
    """
    known = _version_of(tensor), value, set[int]()
    setattr(tensor, _READ, known)
    return known


def _version_of(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def documents_starting_at(is_start: Tensor) -> Tensor:
    """Return ``MaskGeometry.documents``, on the CPU.

    ``is_start``, boolean ``[B, T - 1]``, says which tokens begin a document besides the first of each row.
    """
    starts = torch.nn.functional.pad(is_start, (1, 0), value=True)
    return torch.nn.functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel()).cpu()


def _column(offset: int | Tensor) -> int | Tensor:
    """Return an offset that broadcasts over positions: ``[B]`` becomes ``[B, 1]``."""
    return offset[:, None] if isinstance(offset, Tensor) and offset.ndim else offset


class CompactMask(Deferred):
    """A read-only boolean mask ``[B, 1, Tq, Tk]`` that is computed only if an operation needs its values.

    Moving it to a device and selecting consecutive queries keep it compact. Every other operation sees the dense mask.

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
        byte = torch.empty((1, 1, 1, 1), dtype=torch.bool, device=device)  # never read
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
        if not (torch.compiler.is_dynamo_compiling() or may_be_recomputed()):
            self._dense = dense
        return dense

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Move the mask to a device, select queries, and refuse writes and sums."""
        if func is Tensor.bool:
            return args[0]
        if func is Tensor.to:
            device = device_only(args[1:], kwargs)
            if device is not None:
                geometry = args[0].dma_geometry
                return cls.of(geometry.adapted(device, geometry.batch, geometry.two_sequences), device)
        elif func is Tensor.__getitem__:
            if isinstance(args[0], CompactMask):
                return _selected(*args)
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


def _selected(mask: CompactMask, index: Any) -> Any:
    """Return ``mask[index]``, the mask of consecutive queries, or ``NotImplemented`` for any other index."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        shape = mask[index].shape
    if shape == mask.shape:
        return mask
    geometry, count = mask.dma_geometry, shape[2]
    if torch.compiler.is_dynamo_compiling() or geometry.documents is not None:
        return NotImplemented
    if count == 0 or (*shape[:2], shape[3]) != (*mask.shape[:2], mask.shape[3]):
        return NotImplemented
    start, stop, step = parts[-2 if Ellipsis in parts[:3] else 2].indices(mask.shape[2])
    return CompactMask.of(geometry.of_queries(start, stop), mask.device) if step == 1 else NotImplemented
