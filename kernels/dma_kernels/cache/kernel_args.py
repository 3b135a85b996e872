"""Arguments that the kernels over a cache share.

Triton flattens named tuples of arguments, and specializes on every integer in them. For sizes that change as a cache
grows, this would cause recompilation. They are therefore separate arguments, which kernels collect in
:class:`CacheSizes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ..numerics.formats import TILE, padded_channels
from ..numerics.layout import Strided as Strided
from .formats import stored_format
from .page_layout import PageLayout
from .storage import LayerStorage


class Unquantized(NamedTuple):
    """Residual and sink KV of keys, or of values, and the row strides in elements."""

    residual: Any
    sink: Any
    stride_residual: int
    stride_sink: int


class CacheTensors(NamedTuple):
    """The tensors of a cache; page blocks and their stride are in 32-bit words."""

    key: Unquantized
    value: Unquantized
    kv_pages: Any
    page_table: Any
    lengths: Any
    unquantized_rows: Any
    stride_page: int


class CacheSizes(NamedTuple):
    """Columns of the page table, and tiles of residual and sink KV per row."""

    max_pages: int
    residual_tiles: int
    sink_tiles: int


class CacheInputs(NamedTuple):
    """The tensors of a cache, or their layouts, as inputs of a launch plan."""

    kv_pages: Any
    page_table: Any
    key_residual: Any
    value_residual: Any
    key_sink: Any
    value_sink: Any
    lengths: Any
    unquantized_rows: Any

    @classmethod
    def of(cls, storage: LayerStorage) -> CacheInputs:
        """Return the tensors of a cache."""
        return cls(storage.kv_pages.view(torch.int32), *_other_tensors(storage))

    @property
    def tensors(self) -> CacheTensors:
        """The tensors as an argument of kernels."""
        key, value = (
            Unquantized(residual, sink, residual.stride(0), sink.stride(0))
            for residual, sink in ((self.key_residual, self.key_sink), (self.value_residual, self.value_sink))
        )
        return CacheTensors(
            key, value, self.kv_pages, self.page_table, self.lengths, self.unquantized_rows, self.kv_pages.stride(0)
        )

    @property
    def sizes(self) -> CacheSizes:
        """The sizes as arguments of kernels."""
        tiles = (x.shape[2] // TILE for x in (self.key_residual, self.key_sink))
        return CacheSizes(self.page_table.shape[1], *tiles)

    def page_layout(self, format: str) -> PageLayout:
        """Return the layout of page blocks in a format."""
        return PageLayout(stored_format(format), self.key_residual.shape[3], self.value_residual.shape[3])


_other_tensors = attrgetter(*CacheInputs._fields[1:])


@dataclass(frozen=True)
class PageConfig:
    """Compile-time configuration of kernels over page blocks."""

    LAYOUT: PageLayout  # layout of a page block
    KV_HEADS: int  # kv heads

    @property
    def D(self) -> int:
        """Channels of a key."""
        return self.LAYOUT.head_dim

    @property
    def DV(self) -> int:
        """Channels of a value."""
        return self.LAYOUT.value_dim

    @property
    def BLOCK_D(self) -> int:
        """Channels of a key, padded to a power of two."""
        return padded_channels(self.D)

    @property
    def BLOCK_DV(self) -> int:
        """Channels of a value, padded in the same way."""
        return padded_channels(self.DV)

    @property
    def PAGE_WORDS(self) -> int:
        """32-bit words of a page block."""
        return self.LAYOUT.nbytes // 4

    @property
    def KEY_WORDS(self) -> int:
        """Words of its sections of keys."""
        return sum(self.LAYOUT.section_bytes[:3]) // 4
