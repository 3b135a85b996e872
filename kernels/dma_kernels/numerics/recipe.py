"""The recipe: the precision of each tile. It is plain data, shared by all backends."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from .formats import FORMAT_NAMES, MAX_BAND_TILES, TILE, UNQUANTIZED, ScaleRounding, SharedScale

PV_FORMATS = ("bf16", "fp8")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Numerics of diagonal-tiled mixed-precision attention (arXiv 2604.03950).

    Tiles have 128 positions. A key tile ``J`` is *high* for a query tile ``I`` if ``I - diagonal_tiles <= J <= I``
    (bidirectional: ``|I - J| <= diagonal_tiles``) or ``J < sink_tiles``. All other visible tiles are *low*. Causal
    queries at positions below ``exact_until`` have no low tiles. Nor have short calls
    (:attr:`~dma_kernels.numerics.call.AttentionCall.is_short`).

    Attributes:
        low: Format of queries and keys in low tiles: ``bf16``, ``mxfp8``, ``mxint8``, ``mxfp4`` or ``nvfp4``.
        low_q: Overrides ``low`` for queries.
        low_k: Overrides ``low`` for keys.
        high: Format of queries and keys in high tiles.
        diagonal_tiles: Number of high tiles before the query's own.
        sink_tiles: Number of high tiles at the start of the sequence.
        exact_until: Position before which causal queries have no low tiles, a multiple of 128. With 0 every query may
            have them. Bidirectional calls ignore it.
        scale_rounding: ``floor``, ``ceil`` or ``search``, see :class:`~dma_kernels.numerics.formats.ScaleRounding`.
        shared_scale: Which blocks of low tiles share an E8M0 scale: ``block``, ``row`` or ``tile``, see
            :class:`~dma_kernels.numerics.formats.SharedScale`. High tiles always have block scales.
        smooth_k: Subtract the mean of the first 128 keys of each kv head from its keys. The softmax does not change.
        rotate: Multiply queries and keys by one orthonormal Hadamard matrix. Values stay unchanged.
        pv: Format of probabilities and values in low tiles: ``bf16`` (the model's dtype) or ``fp8`` (both in E4M3). In
            high tiles they are always in the model's dtype.
        skip_threshold: Threshold in nats, above 0, for skipping low tiles; ``None`` disables skipping. Each row of a
            block of 64 query positions compares a tile's largest visible logit with its largest visible logit in high
            tiles. If it is lower by more than the threshold in every row, the block skips the tile. Incomplete blocks
            skip nothing.

    Raises:
        ValueError: A field has an invalid value. The message names the field and the valid values.
    """

    low: str = "mxfp8"
    low_q: str | None = None
    low_k: str | None = None
    high: str = "bf16"
    diagonal_tiles: int = 1
    sink_tiles: int = 1
    exact_until: int = 0
    scale_rounding: str = ScaleRounding.CEIL.value
    shared_scale: str = SharedScale.BLOCK.value
    smooth_k: bool = False
    rotate: bool = False
    pv: str = "bf16"
    skip_threshold: float | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("low", "low_q", "low_k", "high"):
            value = getattr(self, name)
            if not (value is None and name in ("low_q", "low_k")):
                _check_choice(name, value, FORMAT_NAMES)
        _check_choice("scale_rounding", self.scale_rounding, tuple(ScaleRounding))
        _check_choice("shared_scale", self.shared_scale, tuple(SharedScale))
        _check_choice("pv", self.pv, PV_FORMATS)
        for name, unit in (("diagonal_tiles", 1), ("sink_tiles", 1), ("exact_until", TILE)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
            limit = MAX_BAND_TILES * unit
            if value > limit:
                exponent = limit.bit_length() - 1
                raise ValueError(f"{name} must be at most 2**{exponent} = {limit}, for every tile; got {value}")
            if value % unit:
                raise ValueError(f"{name} must be a multiple of {unit}, the positions of a tile; got {value}")
        for name in ("smooth_k", "rotate"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be true or false, got {value!r}")
        _check_threshold(self.skip_threshold)
        if self.scale_rounding == ScaleRounding.SEARCH and self.shared_scale != SharedScale.BLOCK:
            raise ValueError(f"scale_rounding='search' needs shared_scale='block', got {self.shared_scale!r}")
        if self.shared_scale != SharedScale.BLOCK and "nvfp4" in (self.query_low, self.key_low):
            raise ValueError(f"shared_scale={self.shared_scale!r} applies to E8M0 scales; nvfp4 needs 'block'")

    @property
    def query_low(self) -> str:
        """Format of queries in low tiles."""
        return self.low if self.low_q is None else self.low_q

    @property
    def key_low(self) -> str:
        """Format of keys in low tiles."""
        return self.low if self.low_k is None else self.low_k

    @property
    def query_shared_scale(self) -> str:
        """``shared_scale`` of queries in low tiles: if the keys of a tile share a scale, each query has its own."""
        return str(SharedScale.BLOCK if self.shared_scale == SharedScale.BLOCK else SharedScale.ROW)

    def exact_tiles(self, *, is_causal: bool) -> int:
        """Return the number of query tiles at the start of the sequence that have no low tiles."""
        return self.exact_until // TILE if is_causal else 0

    @property
    def is_uniform(self) -> bool:
        """Whether low and high tiles are computed alike."""
        return (
            self.pv == "bf16"
            and self.query_low == self.key_low == self.high
            and (self.high == "bf16" or self.high == "nvfp4" or self.shared_scale == SharedScale.BLOCK)
        )

    @property
    def of_high_tiles(self) -> Recipe:
        """The recipe of a call without low tiles. Unquantized keys need no transform."""
        is_quantized = self.high != UNQUANTIZED
        return replace(
            self, low=self.high, low_q=None, low_k=None, pv=UNQUANTIZED, shared_scale=SharedScale.BLOCK.value,
            smooth_k=self.smooth_k and is_quantized, rotate=self.rotate and is_quantized, skip_threshold=None,
        )  # fmt: skip


RECIPE_FIELDS = tuple(field.name for field in fields(Recipe))


def _check_threshold(value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and value > 0 and not math.isnan(value)):
        raise ValueError(f"skip_threshold must be a number above 0, or None; got {value!r}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
