"""What has computed a model's attention: calls by layer, kernel, recipe and cache, and fallbacks with their reasons."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from dma_kernels.runtime.reports import kernel_reports
from torch import Tensor, nn

P = ParamSpec("P")
T = TypeVar("T")


class Use(NamedTuple):
    """How a call was computed.

    Attributes:
        kernel: ``warp-specialised``, ``multi-CTA``, ``portable`` or ``reference`` (prompts, and later chunks over a
            cache), ``decode`` (steps over a packed cache), or several in one call, joined by " + ".
        recipe: The preset with these numerics, or ``custom``.
        cache: What held the keys: ``int8``, ``int4``, ``pages`` (16-bit pages), or ``none`` if they came as plain
            tensors, as from Transformers' own caches.
    """

    kernel: str
    recipe: str
    cache: str


@dataclass
class LayerStats:
    """Counts of one attention layer.

    Attributes:
        uses: Calls that ``dma_mxfp`` computed.
        fallbacks: Calls that SDPA computed instead, by the option that is not supported.
        tiles: Pairs of query block and low tile skipped, and examined, of each query head, int64 ``[Hq, 2]``, that
            :func:`dma_hf.counted_tiles` has counted; ``None`` if it has not. A model has one row, the sum.
    """

    uses: Counter[Use] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    tiles: Tensor | None = None

    @property
    def skipped_share(self) -> float | None:
        """Share of the counted low tiles that were skipped; ``None`` if none was counted."""
        if self.tiles is None:
            return None
        skipped, examined = self.tiles.sum(0).tolist()
        return skipped / examined if examined else None


@dataclass
class Stats(LayerStats):
    """Counts of a model.

    Attributes:
        layers: The layers that have been called, by name.
    """

    layers: dict[str, LayerStats] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """Calls altogether."""
        return self.uses.total() + self.fallbacks.total()

    def __str__(self) -> str:
        lines = [f"{self.calls} attention calls in {len(self.layers)} layers"]
        lines += [
            f"  {count} x {use.kernel}, recipe {use.recipe}, cache {use.cache}"
            for use, count in self.uses.most_common()
        ]
        lines += [f"  {count} x SDPA instead: {option}" for option, count in self.fallbacks.most_common()]
        if self.skipped_share is not None:
            lines.append(f"  {self.skipped_share:.0%} of the low tiles counted were skipped")
        return "\n".join(lines)


_layers: weakref.WeakKeyDictionary[nn.Module, LayerStats] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def stats(model: nn.Module) -> Stats:
    """Return what has computed the attention of a model since it was loaded, or since :func:`reset_stats`.

    Counted where Python runs: a call inside ``torch.compile`` or a CUDA graph that is replayed is not.
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
    counts = [layer.tiles.sum(0) for layer in total.layers.values() if layer.tiles is not None]
    total.tiles = torch.stack(counts).sum(0, keepdim=True) if counts else None
    return total


def reset_stats(model: nn.Module) -> None:
    """Forget the counts of a model."""
    with _lock:
        for module in model.modules():
            _layers.pop(module, None)


def counted(
    module: nn.Module, recipe: str, cache: str, function: Callable[P, T], *arguments: P.args, **options: P.kwargs
) -> T:
    """Call a function that computes the attention of a layer, and count it."""
    if torch.compiler.is_compiling():
        return function(*arguments, **options)
    kernels: list[str] = []
    with kernel_reports(kernels.append):
        result = function(*arguments, **options)
    use = Use(" + ".join(dict.fromkeys(kernels)) or "none", recipe, cache)
    with _lock:
        _layers.setdefault(module, LayerStats()).uses[use] += 1
    return result


def count_tiles(module: nn.Module, tiles: Tensor) -> None:
    """Add the tiles that a layer skipped and examined, ``[Hq, 2]``; waits for their device."""
    tiles = tiles.cpu()
    with _lock:
        layer = _layers.setdefault(module, LayerStats())
        layer.tiles = tiles if layer.tiles is None else layer.tiles + tiles


def count_fallback(module: nn.Module, option: str) -> None:
    """Count a call of a layer that SDPA computes."""
    if not torch.compiler.is_compiling():
        with _lock:
            _layers.setdefault(module, LayerStats()).fallbacks[option] += 1
