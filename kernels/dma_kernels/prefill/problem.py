"""What a prefill call is planned by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from torch import Tensor

from ..numerics.arguments import check_prefill
from ..numerics.geometry import AttentionOptions, PrefillGeometry
from ..numerics.layout import TensorLayout, layout_of
from ..numerics.recipe import Recipe


class PrefillProblem(NamedTuple):
    """A call of :func:`dma_kernels.attention` without the contents of its tensors: the key of its plan.

    Attributes:
        query: Layout of ``[B, Hq, Tq, D]``.
        key: Layout of ``[B, Hkv, Tk, D]``.
        value: Layout of ``[B, Hkv, Tk, Dv]``.
        recipe: The precision of every tile.
        is_causal: Whether a query attends to no key after its own position.
        scale: Factor of the scores, or ``None`` for the default.
        q_offset: Position of query 0, or the layout of one position per batch row; ``None`` for the default.
        kv_offset: Position of key 0, likewise.
        kv_range: Layout of the ranges of visible keys.
        window: Sliding window.
        softcap: Cap of the scores.
        sinks: Layout of the sink logits, contiguous.
        mask: Layout of the mask.
        tile_counts: Layout of the counts of skipped tiles.
        backend: ``auto``, ``reference`` or ``triton``.
        needs_lse: Whether the logarithms of the denominators are returned.
    """

    query: TensorLayout
    key: TensorLayout
    value: TensorLayout
    recipe: Recipe
    is_causal: bool
    scale: float | None
    q_offset: int | TensorLayout | None
    kv_offset: int | TensorLayout
    kv_range: TensorLayout | None
    window: int | None
    softcap: float | None
    sinks: TensorLayout | None
    mask: TensorLayout | None
    tile_counts: TensorLayout | None
    backend: str
    needs_lse: bool = True

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        recipe: Recipe,
        is_causal: bool,
        scale: float | None,
        q_offset: int | Tensor | None,
        kv_offset: int | Tensor,
        kv_range: Tensor | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        mask: Tensor | None,
        tile_counts: Tensor | None,
        backend: str,
        needs_lse: bool = True,
    ) -> Self:
        """Return the problem of a call, whose options are checked but whose tensors are not."""
        return cls(
            TensorLayout.of(query),
            TensorLayout.of(key),
            TensorLayout.of(value),
            recipe,
            is_causal,
            scale,
            TensorLayout.of(q_offset) if isinstance(q_offset, Tensor) else q_offset,
            TensorLayout.of(kv_offset) if isinstance(kv_offset, Tensor) else kv_offset,
            layout_of(kv_range),
            window,
            softcap,
            layout_of(sinks),
            layout_of(mask),
            layout_of(tile_counts),
            backend,
            needs_lse,
        )

    def check(self) -> None:
        """Raise an error if a layout is not as described; see :func:`~dma_kernels.numerics.arguments.check_prefill`."""
        check_prefill(
            self.query,
            self.key,
            self.value,
            self.recipe,
            is_causal=self.is_causal,
            q_offset=self.q_offset,
            kv_offset=self.kv_offset,
            kv_range=self.kv_range,
            mask=self.mask,
            sinks=self.sinks,
            tile_counts=self.tile_counts,
        )

    def options(self, **tensors: Any) -> AttentionOptions:
        """Return the options with their defaults.

        Args:
            tensors: What stands in place of the layouts of ``q_offset``, ``kv_offset``, ``kv_range``, ``sinks`` and
                ``mask``.
        """
        named: dict[str, Any] = {
            "q_offset": self.q_offset,
            "kv_offset": self.kv_offset,
            "kv_range": self.kv_range,
            "sinks": self.sinks,
            "mask": None if self.mask is None else self.mask.of_four_dimensions(),
        }
        return AttentionOptions.of(
            self.query,
            is_causal=self.is_causal,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            **named | tensors,
        )


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What the kernels are selected by: a problem with its defaults filled in.

    Attributes:
        query: Layout of ``[B, Hq, Tq, D]``.
        key: Layout of ``[B, Hkv, Tk, D]``.
        value: Layout of ``[B, Hkv, Tk, Dv]``.
        geometry: Positions and visibility; layouts stand for its tensors.
        arch: Compute capability of the device, major version times ten plus minor.
        has_softcap: Whether scores are capped.
    """

    query: TensorLayout
    key: TensorLayout
    value: TensorLayout
    geometry: PrefillGeometry
    arch: int
    has_softcap: bool
