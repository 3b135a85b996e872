"""What the prefill kernels read: the contract between the quantisers and the attention kernels.

Keys and values come in the operand formats of the compute path (:mod:`dma_kernels.runtime.operand_formats`), from the
quantiser (:mod:`dma_kernels.prefill.quantizer`) or from a cache. Queries are the caller's own; the attention kernel, or
a launch before it, brings them into the format of the keys that they meet.

In exact arithmetic ``(q H) . ((k - mean) H) = q . k - q . mean``. So wherever ``high = "bf16"``, high tiles are scored
with the query and the key as the caller gave them, and ``q . mean`` is subtracted in fp32: no transformed 16-bit copy
is written.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..runtime.operand_formats import OperandFormat


@dataclass(frozen=True)
class TileOperands:
    """What tiles of one kind, high or low, read. Shapes of ``key`` and ``value`` are those of their formats.

    Attributes:
        key: Keys.
        value: Values.
        key_format: Format of ``key``.
        value_format: Format of ``value``: 16 bits or E4M3; of high tiles the caller's own.
        key_scale: Block scales of packed keys, ``[B, Hkv, S, D' / block]``: E8M0 codes (uint8) or E4M3.
        key_descale: Descale of the keys of each tile, fp32 ``[B, Hkv, S / 128]``, contiguous; for packed NVFP4 keys,
            the global scale, expanded from ``[B, Hkv]``. ``None`` for 1. At least fp32's smallest normal number; 1 for
            a tile of zeros.
        value_descale: Descale of each channel of the values, fp32 ``[B, Hkv, Dv]``; ``None`` for 1.
    """

    key: Tensor
    value: Tensor
    key_format: OperandFormat
    value_format: OperandFormat
    key_scale: Tensor | None = None
    key_descale: Tensor | None = None
    value_descale: Tensor | None = None

    @property
    def head_bytes(self) -> int:
        """Bytes of the keys and values of a kv head of a batch row."""
        batch, heads = self.key.shape[:2]
        return (self.key.nbytes + self.value.nbytes) // (batch * heads)


@dataclass(frozen=True)
class Operands:
    """The tensors of one call. All tile-padded storage in it has the same number of tiles.

    Attributes:
        high: What high tiles read.
        low: What low tiles read; ``None`` where the recipe has one precision. The caller's ``value`` is that of
            ``high``.
        key_mean: What ``smooth_k`` subtracted, fp32 ``[B, Hkv, D]``; given iff it did.
        query_global_scale: NVFP4's global scale of the transformed queries, fp32 ``[B, Hq]``; given iff the recipe has
            NVFP4 queries.
        valid_tiles: Tiles of tile-padded storage that hold keys or values; ``None`` for all. The others are
            uninitialized and may not be read, not even with a probability of 0: they are low for no query
            (:meth:`dma_kernels.numerics.geometry.PrefillGeometry.low_tiles`).
    """

    high: TileOperands
    low: TileOperands | None
    key_mean: Tensor | None = None
    query_global_scale: Tensor | None = None
    valid_tiles: range | None = None
