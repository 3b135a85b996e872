"""Counters of attention calls, by layer, kernel, recipe and cache, of fallbacks to SDPA and of skipped tiles."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from dma_kernels import Recipe
from dma_kernels.runtime.reports import kernel_reports
from torch import Tensor, nn

P = ParamSpec("P")
T = TypeVar("T")


class Use(NamedTuple):
    """How a call was computed.

    Attributes:
        kernel: ``warp-specialized``, ``multi-CTA``, ``portable`` or ``reference`` for prompts, and for later chunks
            over a cache. Short calls over plain keys run ``split-KV``, or ``sdpa``, which is PyTorch's kernel. Steps
            over a packed cache run ``decode``. Several kernels of one call are joined by " + ".
        recipe: The preset with these numerics, or ``custom``.
        cache: Where the keys came from: ``int8``, ``int4``, ``pages`` (16-bit pages), or ``none`` for plain tensors,
            including those of Transformers' caches.
    """

    kernel: str
    recipe: str
    cache: str


@dataclass
class LayerStats:
    """Counts of one attention layer.

    Attributes:
        uses: Calls that ``dma_mxfp`` computed.
        fallbacks: Calls that SDPA computed, by unsupported option.
        tiles: Pairs of query block and low tile, skipped and examined, for each query head, int64 ``[Hq, 2]``. Only
            :func:`dma_hf.counted_tiles` counts them; without it they are ``None``. A model has one row, the sum.
    """

    uses: Counter[Use] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    tiles: Tensor | None = None

    @property
    def skipped_share(self) -> float | None:
        """Share of the counted low tiles that were skipped, or ``None`` if none were counted."""
        if self.tiles is None:
            return None
        skipped, examined = self.tiles.sum(0).tolist()
        return skipped / examined if examined else None


@dataclass
class Stats(LayerStats):
    """Counts of a model.

    Attributes:
        layers: Counts of each layer that was called, by name.
        replays: Decoding steps of ``generate`` that replayed a CUDA graph. Their calls are counted, too.
        eager_decoding: Calls of ``generate`` over a :class:`~dma_hf.DMACache` whose steps ran eagerly, by reason.
    """

    layers: dict[str, LayerStats] = field(default_factory=dict)
    replays: int = 0
    eager_decoding: Counter[str] = field(default_factory=Counter)

    @property
    def calls(self) -> int:
        """Number of all calls."""
        return self.uses.total() + self.fallbacks.total()

    def __str__(self) -> str:
        lines = [f"{self.calls} attention calls in {len(self.layers)} layers"]
        lines += [
            f"  {count} x {use.kernel}, recipe {use.recipe}, cache {use.cache}"
            for use, count in self.uses.most_common()
        ]
        lines += [f"  {count} x SDPA instead: {option}" for option, count in self.fallbacks.most_common()]
        if self.replays:
            lines.append(f"  {self.replays} decoding steps replayed a CUDA graph")
        lines += [
            f"  {count} x generate without CUDA graphs: {reason}" for reason, count in self.eager_decoding.most_common()
        ]
        if self.skipped_share is not None:
            lines.append(f"  {self.skipped_share:.0%} of the low tiles counted were skipped")
        return "\n".join(lines)


@dataclass
class _Decoding:
    """Counts of the decoding steps of a model."""

    replays: int = 0
    eager: Counter[str] = field(default_factory=Counter)


_layers: weakref.WeakKeyDictionary[nn.Module, LayerStats] = weakref.WeakKeyDictionary()
_models: weakref.WeakKeyDictionary[nn.Module, _Decoding] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def stats(model: nn.Module) -> Stats:
    """Return what computed the attention of a model since it was loaded, or since :func:`reset_stats`.

    Calls inside ``torch.compile`` are not counted, nor those in CUDA graphs of ``generate_batch``.
    """
    total = Stats()
    with _lock:
        for name, module in model.named_modules():
            found = _layers.get(module)
            if found is not None:
                tiles = None if found.tiles is None else found.tiles.clone()
                total.layers[name] = LayerStats(found.uses.copy(), found.fallbacks.copy(), tiles)
                total.uses += found.uses
                total.fallbacks += found.fallbacks
            decoding = _models.get(module)
            if decoding is not None:
                total.replays += decoding.replays
                total.eager_decoding += decoding.eager
    counts = [layer.tiles.sum(0) for layer in total.layers.values() if layer.tiles is not None]
    total.tiles = torch.stack(counts).sum(0, keepdim=True) if counts else None
    return total


def reset_stats(model: nn.Module) -> None:
    """Reset the counts of a model."""
    with _lock:
        for module in model.modules():
            _layers.pop(module, None)
            _models.pop(module, None)


def counted(
    module: nn.Module, recipe: str, cache: str, function: Callable[P, T], *arguments: P.args, **options: P.kwargs
) -> T:
    """Call a function that computes the attention of a layer, and count the call."""
    if torch.compiler.is_compiling():
        return function(*arguments, **options)
    kernels: list[str] = []
    with kernel_reports(kernels.append):
        result = function(*arguments, **options)
    kernel = kernels[0] if len(kernels) == 1 else " + ".join(dict.fromkeys(kernels)) or "none"
    count_use(module, Use(kernel, recipe, cache))
    return result


def count_use(module: nn.Module, use: Use) -> None:
    """Count a call of a layer, or record it (:func:`recorded_uses`)."""
    if _counting.recorded is not None:
        _counting.recorded.append((module, use))
        return
    with _lock:
        _layer(module).uses[use] += 1


@contextmanager
def recorded_uses() -> Iterator[list[tuple[nn.Module, Use]]]:
    """Record the calls of this thread within a ``with`` block instead of counting them."""
    uses: list[tuple[nn.Module, Use]] = []
    outer, _counting.recorded = _counting.recorded, uses
    try:
        yield uses
    finally:
        _counting.recorded = outer


def count_replay(model: nn.Module, uses: list[tuple[nn.Module, Use]]) -> None:
    """Count the calls of a captured decoding step that was replayed."""
    with _lock:
        for module, use in uses:
            _layer(module).uses[use] += 1
        _decoding(model).replays += 1


def note_eager_decoding(model: nn.Module, reason: str) -> None:
    """Count a call of ``generate`` whose steps are no CUDA graphs."""
    with _lock:
        _decoding(model).eager[reason] += 1


def _decoding(model: nn.Module) -> _Decoding:
    found = _models.get(model)
    if found is None:
        found = _models[model] = _Decoding()
    return found


def _layer(module: nn.Module) -> LayerStats:
    """Return the counts of a layer. ``setdefault`` would make new ones, which takes microseconds, in every call."""
    found = _layers.get(module)
    if found is None:
        found = _layers[module] = LayerStats()
    return found


def count_tiles(module: nn.Module, tiles: Tensor) -> None:
    """Add the numbers of tiles that a layer skipped and examined, ``[Hq, 2]``. Waits for the device."""
    tiles = tiles.cpu()
    with _lock:
        layer = _layer(module)
        layer.tiles = tiles if layer.tiles is None else layer.tiles + tiles


def count_fallback(module: nn.Module, option: str) -> None:
    """Count a call of a layer that SDPA computes."""
    if not torch.compiler.is_compiling():
        with _lock:
            _layer(module).fallbacks[option] += 1


TileCounts = dict[nn.Module, Tensor]
"""For each layer, int64 ``[Hq, 2]``: the pairs of query block and low tile that were skipped and examined."""


class _Counting(threading.local):
    """Where the calls of this thread add their counts and their uses, or ``None``.

    Dynamo can trace it, unlike a ``ContextVar``.
    """

    def __init__(self) -> None:
        self.counts: TileCounts | None = None  # of the instance, or Dynamo would not see that it changes
        self.recorded: list[tuple[nn.Module, Use]] | None = None


_counting = _Counting()


@contextmanager
def counted_tiles() -> Iterator[TileCounts]:
    """Count the tiles that attention layers skip within a ``with`` block, and add them to :func:`dma_hf.stats`.

    Layers without a ``skip_threshold`` are not counted. Neither are decoding and later chunks over a ``DMACache``,
    which never skip. In nested blocks only the innermost counts. Calls in other threads are not counted.

    Yields:
        The counts by layer. They grow until the block ends. Reading them waits for the device.
    """
    counts: TileCounts = {}
    outer, _counting.counts = _counting.counts, counts
    try:
        yield counts
    finally:
        _counting.counts = outer
        for module, tiles in counts.items():
            count_tiles(module, tiles)


def tile_counts_of(module: nn.Module, query: Tensor, recipe: Recipe) -> Tensor | None:
    """Return where a call with queries ``[B, Hq, T, D]`` adds its counts, or ``None`` if tiles are not counted."""
    counts = _counting.counts
    if counts is None or recipe.skip_threshold is None:
        return None
    if module not in counts:
        counts[module] = torch.zeros((query.shape[1], 2), dtype=torch.int64, device=query.device)
    return counts[module]


_fallbacks: Counter[str] = Counter()


def fallback_counts() -> dict[str, int]:
    """Return how many attention calls ran SDPA, by unsupported option. A compiled call counts once."""
    with _lock:
        return dict(_fallbacks)


def reset_fallback_counts() -> None:
    """Reset the counts of fallbacks. The next fallback of each option warns again."""
    with _lock:
        _fallbacks.clear()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_fallback(option: str, asked: str) -> None:
    """Count a fallback, and warn if it is the first for its option."""
    with _lock:
        _fallbacks[option] += 1
        is_first = _fallbacks[option] == 1
    if is_first:
        warnings.warn(
            f"dma_mxfp attention does not support {option} ({asked}). Such calls run SDPA, because "
            "on_unsupported='sdpa'. dma_hf.fallback_counts() returns how many.",
            stacklevel=2,
        )
