"""What the prefill kernel reads, and in which form: the contract between the quantisers and the attention kernels.

Keys and values come in the forms that the lowering names (:mod:`dma_kernels.runtime.lowering`), from the quantiser
(:mod:`dma_kernels.prefill.quantizer`) or from a cache; queries are always the caller's own, and the attention kernel
brings each block of them into the form of the keys it meets.

High tiles of unquantised recipes
    In exact arithmetic ``(q H) . ((k - mean) H) = q . k - q . mean``. So wherever ``high = "bf16"``, high tiles are
    scored with the query and the key as the caller gave them, and ``q . mean`` is subtracted in fp32: no transformed
    16-bit copy is written.

Layouts of keys and values, ``kv_base[b]`` being the start of the tile that key 0 of batch row ``b`` lies in
    ``caller``: entry ``j`` is key ``j`` of the caller.
    ``aligned``: entry ``s`` holds position ``kv_base[b] + s``. Whole tiles of storage; whatever the padding, every
    block of the rule is aligned in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..runtime.lowering import Form


@dataclass(frozen=True)
class TileOperands:
    """What tiles of one kind, high or low, read. Shapes of ``key`` and ``value`` as their :class:`Form` says.

    Attributes:
        key: Keys.
        value: Values.
        key_form: Form of ``key``.
        value_form: ``raw``, ``dequantized`` or ``e4m3``; of high tiles ``raw``.
        key_layout: ``caller`` or ``aligned``.
        value_layout: Likewise; E4M3 values are ``aligned``.
        key_scale: Block scales of packed keys, ``[B, Hkv, S, D' / block]``: E8M0 codes (uint8) or E4M3.
        key_factor: fp32 ``[B, Hkv, S / 128]``, contiguous, what one stored unit of the keys of a tile is worth; of
            packed NVFP4 keys, the head's scale, expanded from ``[B, Hkv]``. ``None`` for 1. At least fp32's smallest
            normal number; 1 for a tile of zeros.
        value_factor: fp32 ``[B, Hkv, Dv]``; ``None`` for 1.
    """

    key: Tensor
    value: Tensor
    key_form: Form
    value_form: Form
    key_layout: str
    value_layout: str
    key_scale: Tensor | None = None
    key_factor: Tensor | None = None
    value_factor: Tensor | None = None

    @property
    def head_bytes(self) -> int:
        """Bytes of the keys and values of a kv head of a batch row."""
        batch, heads = self.key.shape[:2]
        return (self.key.nbytes + self.value.nbytes) // (batch * heads)


@dataclass(frozen=True)
class Operands:
    """The tensors of one call. All aligned storage in it has the same number of tiles.

    Attributes:
        high: What high tiles read.
        low: What low tiles read; ``None`` where the recipe has one precision. A raw ``value`` is that of ``high``.
        key_mean: What ``smooth_k`` subtracted, fp32 ``[B, Hkv, D]``; given iff it did.
        query_factor: NVFP4's scale of the transformed queries of each head, fp32 ``[B, Hq]``; given iff the recipe has
            NVFP4 queries.
        written: Tiles of aligned storage that are written; ``None`` for all. The others hold anything, and nothing may
            compute with them, by a probability of 0 either: to no query they are low
            (:meth:`dma_kernels.numerics.geometry.PrefillGeometry.low_tiles`).
    """

    high: TileOperands
    low: TileOperands | None
    key_mean: Tensor | None = None
    query_factor: Tensor | None = None
    written: range | None = None
