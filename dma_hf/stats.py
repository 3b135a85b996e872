"""Counters of attention calls, by layer, kernel, recipe and cache, of fallbacks to SDPA and of skipped tiles."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from dma_kernels import Recipe
from dma_kernels.runtime.reports import kernel_reports
from torch import Tensor, nn

P = ParamSpec("P")
T = TypeVar("T")


class Use(NamedTuple):
    """How a call was computed.

    Attributes:
        kernel: ``warp-specialized``, ``one-warpgroup``, ``portable`` or ``reference`` for prompts, and for later chunks
            over a cache. Short calls over plain keys run ``split-KV``, or ``sdpa``, which is PyTorch's kernel. Steps
            over a packed cache run ``decode``. Several kernels of one call are joined by " + ".
        recipe: The preset with these numerics, or ``custom``.
        cache: Where the keys came from: ``int8``, ``int4``, ``pages`` (16-bit pages), or ``none`` for plain tensors,
            including those of Transformers' caches.
    """

    kernel: str
    recipe: str
    cache: str


@dataclass(eq=False)
class Counts:
    """Counts of an attention layer or of a model.

    Attributes:
        uses: Calls that ``dma_mxfp`` computed.
        fallbacks: Calls that SDPA computed, by unsupported option.
        tiles: Pairs of query block and low tile, skipped and examined, for each query head, int64 ``[Hq, 2]``. ``None``
            if no call was made within :func:`counted_tiles`. A model has one row, the sum.
        replays: Decoding steps of ``generate`` that replayed a CUDA graph. Their calls are counted, too.
        eager_decoding: Calls of ``generate`` over a :class:`~dma_hf.DMACache` whose steps ran eagerly, by reason.
    """

    uses: Counter[Use] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    tiles: Tensor | None = None
    replays: int = 0
    eager_decoding: Counter[str] = field(default_factory=Counter)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values == other._values

    @property
    def _values(self) -> dict[str, Any]:
        return vars(self) | {"tiles": None if self.tiles is None else self.tiles.tolist()}

    @property
    def calls(self) -> int:
        """Number of all calls."""
        return self.uses.total() + self.fallbacks.total()

    @property
    def skipped_share(self) -> float | None:
        """Share of the counted low tiles that were skipped, or ``None`` if none were counted."""
        if self.tiles is None:
            return None
        skipped, examined = self.tiles.sum(0).tolist()
        return skipped / examined if examined else None


@dataclass(eq=False)
class Stats(Counts):
    """Counts of a model, and those of each of its layers that was called, by name."""

    layers: dict[str, Counts] = field(default_factory=dict)

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


_counts: dict[int, Counts] = {}
"""By the ids of modules that exist. A lookup in a ``WeakKeyDictionary`` would take longer than the rest of a count."""
_lock = threading.Lock()


class _Thread(threading.local):
    """Where the calls of this thread add skipped tiles, and record their uses, or ``None``.

    Dynamo can trace it, unlike a ``ContextVar``.
    """

    def __init__(self) -> None:
        self.tiles: dict[nn.Module, Tensor] | None = None  # of the instance, or Dynamo would not see that it changes
        self.recorded: list[tuple[nn.Module, Use]] | None = None


_thread = _Thread()


def stats(model: nn.Module) -> Stats:
    """Return what computed the attention of a model since it was loaded, or since :func:`reset_stats`.

    Calls inside ``torch.compile`` are not counted, nor those in CUDA graphs of ``generate_batch``.

    Raises:
        TypeError: ``model`` is not a module.
    """
    total = Stats()
    with _lock:
        for name, module in _modules_of(model):
            found = _counts.get(id(module))
            if found is None:
                continue
            if found.calls or found.tiles is not None:
                total.layers[name] = deepcopy(found)
            total.uses += found.uses
            total.fallbacks += found.fallbacks
            total.replays += found.replays
            total.eager_decoding += found.eager_decoding
    tiles = [layer.tiles.sum(0) for layer in total.layers.values() if layer.tiles is not None]
    total.tiles = torch.stack(tiles).sum(0, keepdim=True) if tiles else None
    return total


def reset_stats(model: nn.Module) -> None:
    """Reset the counts of a model. Errors are those of :func:`stats`."""
    with _lock:
        for _, module in _modules_of(model):
            if id(module) in _counts:
                _counts[id(module)] = Counts()


def _modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a model and the modules in it, by name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    yield from model.named_modules()


def _of(module: nn.Module) -> Counts:
    """Return the counts of a module."""
    found = _counts.get(id(module))
    if found is None:
        found = _counts[id(module)] = Counts()
        weakref.finalize(module, _counts.pop, id(module), None).atexit = False
    return found


def counted(
    module: nn.Module, recipe: str, cache: str, function: Callable[P, T], *arguments: P.args, **options: P.kwargs
) -> tuple[T, str]:
    """Call a function that computes the attention of a layer, and count the call. Returns its result and its kernel."""
    if torch.compiler.is_compiling():
        return function(*arguments, **options), "none"
    kernels: list[str] = []
    with kernel_reports(kernels.append):
        result = function(*arguments, **options)
    kernel = kernels[0] if len(kernels) == 1 else " + ".join(dict.fromkeys(kernels)) or "none"
    if kernels:  # a checkpoint may have saved the result
        count_use(module, Use(kernel, recipe, cache))
    return result, kernel


def count_use(module: nn.Module, use: Use) -> None:
    """Count a call of a layer, or record it (:func:`recorded_uses`)."""
    if _thread.recorded is not None:
        _thread.recorded.append((module, use))
        return
    with _lock:
        _of(module).uses[use] += 1


@contextmanager
def recorded_uses() -> Iterator[list[tuple[nn.Module, Use]]]:
    """Record the calls of this thread within a ``with`` block instead of counting them."""
    uses: list[tuple[nn.Module, Use]] = []
    outer, _thread.recorded = _thread.recorded, uses
    try:
        yield uses
    finally:
        _thread.recorded = outer


def count_replay(model: nn.Module, uses: list[tuple[nn.Module, Use]]) -> None:
    """Count the calls of a captured decoding step that was replayed."""
    with _lock:
        for module, use in uses:
            _of(module).uses[use] += 1
        _of(model).replays += 1


def count_eager_decoding(model: nn.Module, reason: str) -> None:
    """Count a call of ``generate`` whose steps are no CUDA graphs."""
    with _lock:
        _of(model).eager_decoding[reason] += 1


def count_fallback(module: nn.Module, option: str, asked: str) -> None:
    """Count a call of a layer that SDPA computes, and warn of the first one for each option.

    Python shows the warnings of several layers once, because they are the same.
    """
    is_first = torch.compiler.is_compiling()
    if not is_first:
        with _lock:
            fallbacks = _of(module).fallbacks
            fallbacks[option] += 1
            is_first = fallbacks[option] == 1
    if is_first:
        _warn_of_fallback(option, asked)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn_of_fallback(option: str, asked: str) -> None:
    warnings.warn(
        f"dma_mxfp attention does not support {option} ({asked}). Such calls run SDPA, because "
        "on_unsupported='sdpa'. dma_hf.stats(model).fallbacks counts them.",
        stacklevel=2,
    )


@contextmanager
def counted_tiles() -> Iterator[None]:
    """Count the tiles that attention layers skip within a ``with`` block; :func:`stats` has them after the block.

    Layers without a ``skip_threshold`` are not counted. Neither are decoding and later chunks over a ``DMACache``,
    which never skip. Calls in other threads are not counted.
    """
    tiles: dict[nn.Module, Tensor] = {}
    outer, _thread.tiles = _thread.tiles, tiles
    try:
        yield
    finally:
        _thread.tiles = outer
        for module, new in tiles.items():
            with _lock:
                counts = _of(module)
                counts.tiles = new.cpu() if counts.tiles is None else counts.tiles + new.cpu()


def tile_counts_of(module: nn.Module, query: Tensor, recipe: Recipe) -> Tensor | None:
    """Return where a call with queries ``[B, Hq, T, D]`` adds its counts, or ``None`` if tiles are not counted."""
    tiles = _thread.tiles
    if tiles is None or recipe.skip_threshold is None:
        return None
    if module not in tiles:
        tiles[module] = torch.zeros((query.shape[1], 2), dtype=torch.int64, device=query.device)
    return tiles[module]
